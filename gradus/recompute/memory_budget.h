#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>

#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/eviction_plan.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::recompute {

/// Somewhere else to keep bytes. Called in the middle of an allocation: must not allocate device
/// memory in put().
class Stash {
 public:
  virtual ~Stash() = default;
  /// Takes a copy of the bytes, or returns null if it has no room. The handle frees it.
  virtual std::shared_ptr<void> put(const c10::Storage& storage) = 0;
  /// Brings the bytes back in a new storage of the same device.
  virtual c10::Storage get(const std::shared_ptr<void>& handle) = 0;
};

/// Keeps what autograd saves in fewer bytes.
class Encoder {
 public:
  virtual ~Encoder() = default;
  /// A smaller form of @p value, of at most @p max_ratio of its bytes; nullopt if there is none.
  /// Called on the thread that saves it, without gradient recording.
  virtual std::optional<plane::saved::Packed> encode(const plane::saved::Value& value,
                                                     double max_ratio) = 0;
};

struct MemoryBudgetOptions {
  std::int64_t limit_bytes =
      0;  ///< Of all live device memory, > 0: enforced, as by base::MemoryLimit; 0: no limit,
          ///< nothing is dropped (to trace a plain pass).
  std::shared_ptr<const EvictionPlan> plan{};  ///< Null: online eviction. See set_plan().
  std::shared_ptr<Stash> stash{};              ///< For what the plan offloads.
  std::shared_ptr<Encoder> encoder{};          ///< For what the plan leaves.
  /// Passes without a plan encode what the encoder makes half as large. A small form goes like
  /// other values where memory is short all the same: the value is then made again.
  bool encode_unplanned = false;
};

/// The plan of one of several programs.
struct ProgramPlan {
  std::shared_ptr<const EvictionPlan> plan{};  ///< Its calls tell the program; not null.
  bool online = false;                         ///< It runs as without a plan all the same.
};

/// What a budget did so far.
struct BudgetStatistics {
  std::int64_t recorded = 0;  ///< Operators that can be run again.
  std::int64_t evicted = 0;   ///< Values dropped.
  std::int64_t evicted_bytes = 0;
  std::int64_t replayed = 0;  ///< Operators run again.
  double replay_seconds = 0.0;
  std::int64_t offloaded = 0;       ///< Values moved to the stash.
  std::int64_t fetched = 0;         ///< Values brought back.
  std::int64_t encoded = 0;         ///< Values kept in a smaller form.
  std::int64_t decoded = 0;         ///< Reads of such.
  std::int64_t planned_passes = 0;  ///< Passes that followed the plan to their end.
  std::int64_t strayed_passes = 0;  ///< Passes that differed from it.
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
/// @throws UserError on a negative limit. Allocations that still do not fit throw
/// MemoryLimitError; a
///   tensor changed in place between use and replay is a UserError that names it.
class [[nodiscard]] MemoryBudget {
 public:
  explicit MemoryBudget(const MemoryBudgetOptions& options);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  BudgetStatistics statistics() const;

  /// Gives @p trace every pass from now on, as it ends: with the first call of the next one (whose
  /// result needs a gradient), on the thread that makes it; set_plan() may be called there. Null
  /// ends it. A pass is traced
  /// under the limit as well as without one. @p on_saved is called for what autograd saves in a
  /// traced pass, with the call that made it.
  void trace(std::function<void(const StepTrace&)> trace,
             std::function<void(const plane::saved::Value&, std::int64_t call)> on_saved = nullptr);
  /// Calls @p ended as each pass ends, where a trace is given, with the plan that it followed to
  /// its end, null if none; null ends that.
  void on_pass(std::function<void(const EvictionPlan* followed)> ended);
  /// Follows @p plan from the next pass on; null: online eviction.
  void set_plan(std::shared_ptr<const EvictionPlan> plan);
  /// Each pass follows the first of @p plans that has its calls: of several programs that take
  /// turns. Where two begin with the same calls, the first is followed until they part.
  void set_plans(std::vector<ProgramPlan> plans);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::recompute
