#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace gradus::solve {

/// Marks a place where a sequence must not be cut.
inline constexpr std::int64_t kNoCut = std::numeric_limits<std::int64_t>::max();

struct PartitionOptions {
  std::int64_t max_stages = 300;  ///< >= 1.
  double balance_weight = 1.0;    ///< What uneven times cost against large cuts, > 0.
  double max_stage_ratio = 3.0;  ///< Longest stage over total time / max_stages, >= 2. Raised where
                                 ///< one operator, or a stretch without cuts, is longer.
};

struct Partition {
  std::vector<std::int64_t> ends;  ///< One past the last operator of each stage.
  double cost = 0.0;               ///< The objective below.
  double longest_ms = 0.0;         ///< Time of the longest stage.
  std::int64_t cut_bytes = 0;      ///< Sum over the cuts.
};

/// Merges a sequence of operators into at most max_stages contiguous stages of even time, cut where
/// little is alive, by a dynamic program over (stages, operators).
///
/// Minimises, exactly, the sum over stages of balance_weight * (stage_ms / even_ms)^2, where
/// even_ms = total / max_stages, plus the sum over cuts of cut_bytes / mean cut_bytes, among
/// partitions with no stage longer than max_stage_ratio * even_ms. Where all times are 0, each
/// operator counts as 1. Time operators * max_stages * operators in the longest stage.
/// @param times_ms  Of each operator, finite and >= 0.
/// @param cut_bytes  Alive after each operator but the last and wanted later, >= 0, or kNoCut; one
///   shorter than times_ms.
/// @throws UserError on other sizes or values.
Partition partition(const std::vector<double>& times_ms, const std::vector<std::int64_t>& cut_bytes,
                    const PartitionOptions& options = {});

}  // namespace gradus::solve
