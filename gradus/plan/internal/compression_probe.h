#pragma once

// What compression would make of the results of a traced pass, and which saves it gets under a
// plan.

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <gradus/base/clock.h>
#include <gradus/compress/policy.h>
#include <gradus/plan/simulate.h>
#include <gradus/recompute/eviction_plan.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan::internal {

/// Measures, in one traced pass, what a guard would make of each value that autograd saves.
class CompressionProbe {
 public:
  /// @param seconds  No value is probed once so much time was spent.
  CompressionProbe(double seconds, base::Clock clock);

  /// A save of what @p call made; @p allowed: false rules the call out. Values whose size does not
  /// depend on the data are encoded once for each layout and operator.
  void saved(const compress::CompressGuard& guard, const plane::saved::Value& value,
             std::int64_t call, bool allowed);

  /// One entry a call; bytes of 0 unless each of its saves can be compressed and all of them take
  /// less than the call's bytes. Empty if no call has any.
  std::vector<CompressedResult> results(const recompute::StepTrace& trace) const;

  /// Kinds of saves by call, as kind_of().
  using Kind = std::string;
  static Kind kind_of(const plane::saved::Value& value);
  std::set<Kind> kinds(const std::vector<recompute::Disposition>& plan) const;

  double seconds() const { return spent_s_; }  ///< So far, to be left out of the pass's.

 private:
  struct Save {
    compress::Probe probe;
    std::int64_t plain_bytes = 0;
    bool shared = false;  // finds an encoding of another save
  };
  struct Call {
    bool possible = true;
    std::vector<Save> saves;
    std::set<Kind> kinds;
    std::set<std::string> encodings;  // a guard shares equal ones
  };
  struct Known {
    bool possible = false;
    compress::Probe probe;
  };

  /// Seconds a plain byte of each method: medians of what was measured.
  struct Rates {
    std::array<double, compress::kMethodCount> encode{}, restore{};
  };
  Rates rates() const;
  Known look(const compress::CompressGuard& guard, const plane::saved::Value& value,
             const std::string& layout);

  double limit_s_;
  base::Clock clock_;
  double spent_s_ = 0.0;
  std::map<std::int64_t, Call> calls_;
  std::map<std::string, Known> by_layout_;
};

/// The saves that a plan leaves to compression, as a guard's `keep` asks. Thread-safe.
///
/// What reaches a guard is what the budget did not take: what the plan leaves, and what cannot be
/// made again. The latter is none of the plan's, and left alone unless it is of a planned kind.
class LeftSaves {
 public:
  void set(std::set<CompressionProbe::Kind> kinds);
  bool contains(const plane::saved::Value& value) const;

 private:
  mutable std::mutex mutex_;
  std::set<CompressionProbe::Kind> kinds_;
};

}  // namespace gradus::plan::internal
