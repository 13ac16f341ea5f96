#pragma once

// A traced pass as a graph of values for gradus/solve.

#include <cstdint>
#include <vector>

#include <gradus/recompute/step_trace.h>
#include <gradus/solve/chain.h>
#include <gradus/solve/keep_or_drop.h>

namespace gradus::plan::internal {

/// The results that backward wants and that can be made again. What lies between two of them is
/// contracted into the later one.
struct Contracted {
  solve::ValueGraph graph;
  std::vector<std::vector<std::int64_t>> members;  ///< Calls of each value.
  std::vector<std::int64_t> value_of;              ///< Of each call; -1: none.
};

/// How to drop a call's results cheaper than by making them again: seconds, < 0: no way.
using MoveSeconds = std::vector<double>;

/// @param left_bytes  Bytes kept of results that are left to others, one a call, < 0: not left;
///   empty: none are.
/// @param can_recompute  False: only what can be moved is a value.
Contracted contract(const recompute::StepTrace& trace, const MoveSeconds& moves,
                    const std::vector<std::int64_t>& left_bytes, bool can_recompute);

/// Merges neighbours into at most @p max_values values.
Contracted merge(const Contracted& full, std::int64_t max_values);

/// True if each value is made from the one before alone and backward wants them in reverse.
bool is_chain(const Contracted& contracted);

/// The chain's stages; limits of it are less base_of(contracted).
solve::Chain chain_of(const Contracted& contracted);
std::int64_t chain_base(const Contracted& contracted);

}  // namespace gradus::plan::internal
