#include <gradus/recompute/memory_budget.h>

#include <optional>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/internal/tape.h>

namespace gradus::recompute {
namespace {

using internal::Content;
using internal::Tape;
using plane::saved::Packed;
using plane::saved::Value;

// Gives autograd's saved tensors to the tape.
class TapeHooks final : public plane::saved::Hooks {
 public:
  explicit TapeHooks(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}
  std::optional<Packed> pack(const Value& value) override {
    const std::shared_ptr<Content> content = tape_->find(value);
    if (content == nullptr) return std::nullopt;
    if (std::optional<Packed> small = tape_->encode(content, value)) return small;
    if (tape_->leaves(*content)) {
      tape_->leave();
      const std::shared_ptr<void> lease(nullptr, [tape = tape_](void*) { tape->end_left(); });
      return Packed{.payload = {value.tensor},
                    .restore = [lease](std::vector<at::Tensor> payload) { return payload[0]; },
                    .as_saved = true};
    }
    tape_->save(content, value.maker);
    // Ends when autograd drops the saved tensor, with the last copy of the function below.
    const std::shared_ptr<void> lease(nullptr,
                                      [tape = tape_, content](void*) { tape->release(content); });
    return Packed{.payload = {},
                  .restore = [tape = tape_, content, shape = Tape::shape_of(value.tensor),
                              lease](auto) { return tape->get(content, shape); }};
  }

 private:
  std::shared_ptr<Tape> tape_;
};

}  // namespace

struct MemoryBudget::State {
  explicit State(const MemoryBudgetOptions& options)
      : tape(std::make_shared<Tape>(options.stash, options.encoder, options.encode_unplanned)),
        limit({.device_bytes = options.limit_bytes}),
        pressure([tape = std::weak_ptr(tape)](std::int64_t needed) {
          const auto alive = tape.lock();
          return alive != nullptr && alive->evict(needed) > 0;
        }),
        watch(plane::op::push(plane::op::Order::record, tape)),
        hooks(plane::saved::push(plane::saved::Order::rematerialise,
                                 std::make_shared<TapeHooks>(tape))) {}

  std::shared_ptr<Tape> tape;
  base::MemoryLimit limit;
  base::PressureGuard pressure;
  plane::op::Guard watch;
  plane::saved::Guard hooks;
};

MemoryBudget::MemoryBudget(const MemoryBudgetOptions& options) {
  GRADUS_CHECK("memory_budget", options.limit_bytes >= 0,
               "limit_bytes must be >= 0 (0: no limit); got ", options.limit_bytes);
  state_ = std::make_unique<State>(options);
  state_->tape->set_plan(options.plan);
}

MemoryBudget::~MemoryBudget() = default;

void MemoryBudget::trace(std::function<void(const StepTrace&)> trace,
                         std::function<void(const Value&, std::int64_t)> on_saved) {
  state_->tape->trace(std::move(trace), std::move(on_saved));
}

void MemoryBudget::on_pass(std::function<void(const EvictionPlan*)> ended) {
  state_->tape->on_pass(std::move(ended));
}

void MemoryBudget::set_plan(std::shared_ptr<const EvictionPlan> plan) {
  state_->tape->set_plan(std::move(plan));
}

void MemoryBudget::set_plans(std::vector<ProgramPlan> plans) {
  state_->tape->set_plans(std::move(plans));
}

BudgetStatistics MemoryBudget::statistics() const { return state_->tape->statistics(); }

}  // namespace gradus::recompute
