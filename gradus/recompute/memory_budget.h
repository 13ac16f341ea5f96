#pragma once

#include <cstdint>
#include <memory>

namespace gradus::recompute {

struct MemoryBudgetOptions {
  std::int64_t limit_bytes =
      0;  ///< Of all live device memory, > 0: enforced, as by base::MemoryLimit.
};

/// What a budget did so far.
struct BudgetStatistics {
  std::int64_t recorded = 0;  ///< Operators that can be run again.
  std::int64_t evicted = 0;   ///< Values dropped.
  std::int64_t evicted_bytes = 0;
  std::int64_t replayed = 0;  ///< Operators run again.
  double replay_seconds = 0.0;
};

/// Keeps a training loop inside a memory limit, on an unmodified model: while it lives, the tensors
/// that autograd saves on this thread are dropped when memory is short and computed again when
/// backward wants them, those first that cost least time for their bytes and are wanted last.
///
///     MemoryBudget budget({.limit_bytes = 600_MiB});
///     auto loss = model->forward(x);
///     loss.backward();
///     optimizer.step();
///
/// Every operator of the forward pass is recorded with its arguments (the op plane sees it; about 2
/// microseconds each); a dropped tensor is replayed from what is still in memory. Gradients are
/// those of the plain program, bit for bit: random operators draw the same numbers again, running
/// statistics and other outside tensors are changed once. What cannot be made again (tensors from
/// outside, results of operators on sparse tensors, tensors that a double backward saves) is kept.
/// Eviction follows DTR (Kirisame et al. 2021, "Dynamic Tensor Rematerialization"), asked by the
/// allocator at the very moment an allocation would not fit.
///
/// Covers backward passes that this thread starts while it lives. Nests with checkpoint(), whose
/// regions it leaves alone. One budget a thread.
/// @throws UserError on a limit below 1 byte. Allocations that still do not fit throw
/// MemoryLimitError; a
///   tensor changed in place between use and replay is a UserError that names it.
class [[nodiscard]] MemoryBudget {
 public:
  explicit MemoryBudget(const MemoryBudgetOptions& options);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  BudgetStatistics statistics() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::recompute
