#include <gradus/accumulate/local_steps.h>

#include <cmath>
#include <optional>
#include <unordered_set>

#include <ATen/core/grad_mode.h>

#include <gradus/accumulate/internal/accumulators.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>

namespace gradus::accumulate {
namespace {

at::ScalarType wide(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

}  // namespace

struct LocalSteps::State {
  struct Entry {
    at::Tensor parameter{};
    at::Tensor start{};  // theta_0
    at::Tensor sum{};
  };

  void restore() {
    const at::NoGradGuard no_grad;
    for (Entry& entry : entries) {
      if (entry.start.defined()) entry.parameter.copy_(entry.start);
      entry.start.reset();
      entry.parameter.mutable_grad().reset();
    }
    losses.clear();
    broken = false;
  }

  std::vector<Entry> entries{};
  LocalStepsOptions options{};
  std::vector<at::Tensor> losses{};
  bool broken = false;
  std::optional<internal::Accumulator> accumulator{};
};

LocalSteps::LocalSteps(const std::vector<at::Tensor>& parameters, const LocalStepsOptions& options)
    : state_(std::make_unique<State>()) {
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : parameters) {
    GRADUS_CHECK("local_steps", parameter.defined(), "parameters must be defined tensors");
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      state_->entries.push_back({.parameter = parameter});
  }
  GRADUS_CHECK("local_steps", !state_->entries.empty(),
               "there must be at least one parameter; got none");
  GRADUS_CHECK("local_steps", options.steps >= 1, "steps must be >= 1; got ", options.steps);
  GRADUS_CHECK("local_steps", std::isfinite(options.learning_rate) && options.learning_rate > 0.0,
               "learning_rate must be finite and > 0; got ", options.learning_rate);
  state_->options = options;
  std::vector<at::Tensor> unique;
  for (const State::Entry& entry : state_->entries) unique.push_back(entry.parameter);
  state_->accumulator.emplace(
      "local_steps", unique,
      internal::Obstacles{.always =
                              "LocalSteps sums up gradients after backward. Step after backward"});
}

LocalSteps::~LocalSteps() {
  if (state_->broken || !state_->losses.empty()) state_->restore();
}

bool LocalSteps::full() const {
  return static_cast<std::int64_t>(state_->losses.size()) >= state_->options.steps;
}
bool LocalSteps::empty() const { return state_->losses.empty(); }

void LocalSteps::backward(const at::Tensor& loss) {
  GRADUS_CHECK("local_steps", !state_->broken,
               "the window must be reset() after a backward that threw");
  GRADUS_CHECK("local_steps", !full(),
               "the window must be finished before another micro-batch; it made ",
               state_->losses.size(), " of ", state_->options.steps, " steps");
  GRADUS_CHECK("local_steps", loss.defined() && loss.dim() == 0 && loss.requires_grad(),
               "loss must be a scalar that requires a gradient");
  for (const State::Entry& entry : state_->entries) {
    GRADUS_CHECK("local_steps", !entry.parameter.grad().defined(),
                 "gradients must be cleared before a window begins: call zero_grad(true)");
  }
  const at::Tensor value = loss.detach().clone();
  state_->broken = true;
  loss.backward();
  const at::NoGradGuard no_grad;
  for (State::Entry& entry : state_->entries) {
    const at::Tensor gradient = entry.parameter.grad();
    if (!gradient.defined()) continue;
    if (!entry.start.defined()) {
      const base::MemoryCategoryScope category(base::MemoryCategory::gradients);
      entry.start = entry.parameter.detach().clone();
      entry.sum = gradient.to_dense().to(wide(gradient.scalar_type()), false, /*copy=*/true);
    } else {
      entry.sum.add_(gradient);
    }
    entry.parameter.add_(gradient, -state_->options.learning_rate);
    entry.parameter.mutable_grad().reset();
  }
  state_->broken = false;
  state_->losses.push_back(value);
}

LocalStepsResult LocalSteps::finish() {
  GRADUS_CHECK("local_steps", !state_->broken,
               "the window must be reset() after a backward that threw");
  GRADUS_CHECK("local_steps", !empty(),
               "the window must hold a micro-batch to be finished; it is empty");
  const at::NoGradGuard no_grad;
  LocalStepsResult result{.steps = static_cast<std::int64_t>(state_->losses.size())};
  for (const at::Tensor& loss : state_->losses) result.mean_loss += loss.item<double>();
  result.mean_loss /= static_cast<double>(result.steps);
  state_->restore();
  for (State::Entry& entry : state_->entries) {
    if (!entry.sum.defined()) continue;
    entry.sum.mul_(1.0 / static_cast<double>(result.steps));
    entry.parameter.mutable_grad() = entry.sum.to(entry.parameter.scalar_type());
    entry.sum.reset();
  }
  return result;
}

void LocalSteps::reset() {
  state_->restore();
  for (State::Entry& entry : state_->entries) entry.sum.reset();
}

}  // namespace gradus::accumulate
