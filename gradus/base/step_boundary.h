#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace gradus::base {

/// Tells its subscribers that an optimizer step is over, in the order in which they subscribed.
/// Parts that keep state from step to step (caches, plans, profiles) renew it there.
/// Thread-safe; a subscriber may unsubscribe itself or others while it is told.
class StepBoundary {
 public:
  using Listener = std::function<void(std::int64_t step)>;

  /// Ends the subscription when destroyed; may outlive the boundary.
  class [[nodiscard]] Subscription {
   public:
    Subscription() = default;
    explicit Subscription(std::shared_ptr<void> alive) : alive_(std::move(alive)) {}

   private:
    std::shared_ptr<void> alive_;
  };

  StepBoundary();
  ~StepBoundary();
  StepBoundary(const StepBoundary&) = delete;
  StepBoundary& operator=(const StepBoundary&) = delete;

  Subscription subscribe(Listener listener);
  /// Calls every listener with the number of the step that ended. The first exception ends the
  /// round.
  void notify(std::int64_t step);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The process's boundary: trainers notify it, anyone may listen.
StepBoundary& step_boundary();

}  // namespace gradus::base
