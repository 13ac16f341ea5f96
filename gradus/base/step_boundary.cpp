#include <gradus/base/step_boundary.h>

#include <mutex>
#include <vector>

namespace gradus::base {

struct StepBoundary::State {
  std::mutex mutex;
  std::vector<std::weak_ptr<Listener>> listeners;
};

StepBoundary::StepBoundary() : state_(std::make_unique<State>()) {}
StepBoundary::~StepBoundary() = default;

StepBoundary::Subscription StepBoundary::subscribe(Listener listener) {
  auto alive = std::make_shared<Listener>(std::move(listener));
  const std::lock_guard lock(state_->mutex);
  state_->listeners.push_back(alive);
  return Subscription(std::move(alive));
}

void StepBoundary::notify(std::int64_t step) {
  std::vector<std::weak_ptr<Listener>> round;
  {
    const std::lock_guard lock(state_->mutex);
    std::erase_if(state_->listeners, [](const auto& listener) { return listener.expired(); });
    round = state_->listeners;
  }
  for (const auto& listener : round) {
    if (const auto alive = listener.lock()) (*alive)(step);
  }
}

StepBoundary& step_boundary() {
  static StepBoundary* const instance = new StepBoundary;
  return *instance;
}

}  // namespace gradus::base
