#pragma once

#include <cstddef>
#include <cstdint>

#include <gradus/plane/op/op_plane.h>

namespace gradus::recompute::internal {

/// What a region's watchers need to know of an operator, found once for each.
struct OperatorTraits {
  std::uint64_t writes = 0;      ///< Bit i: the call changes argument i (i < 64).
  std::uint64_t statistics = 0;  ///< Bit i: it does so if it trains (running statistics).
  std::int32_t train_flag = -1;  ///< The argument that says whether it trains.
  bool detaches = false;         ///< aten::detach, which saving a tensor calls.
  bool aliases = false;          ///< Returns a view of an argument, or an argument.
  bool seeded = false;           ///< Draws random numbers.
};

/// Of the operator that @p call calls. Thread-safe.
const OperatorTraits& traits_of(const plane::op::Call& call);

/// Whether @p call, which was not made yet, changes its argument @p index.
bool writes(const plane::op::Call& call, const OperatorTraits& traits, std::size_t index);

}  // namespace gradus::recompute::internal
