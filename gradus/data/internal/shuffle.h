#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include <gradus/data/internal/counter_random.h>

namespace gradus::data::internal {

/// Fills @p order with 0, 1, ... and, if asked, permutes it (Fisher-Yates) by the numbers of (seed,
/// epoch).
inline void order_of_epoch(std::vector<std::uint32_t>& order, std::uint64_t seed,
                           std::int64_t epoch, bool shuffle) {
  std::iota(order.begin(), order.end(), 0U);
  if (!shuffle) return;
  CounterRandom random(seed, static_cast<std::uint64_t>(epoch));
  for (std::size_t left = order.size(); left > 1; --left)
    std::swap(order[left - 1], order[random.below(left)]);
}

}  // namespace gradus::data::internal
