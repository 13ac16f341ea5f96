#include <gradus/accumulate/wide_gradients.h>

#include <atomic>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <gradus/accumulate/internal/accumulators.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/plane/grad/grad_plane.h>

namespace gradus::accumulate {
namespace {

bool narrow(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

}  // namespace

struct WideGradients::State {
  struct Entry {
    at::Tensor parameter{};
    at::Tensor sum{};
    std::optional<plane::grad::Hook> hook{};
  };

  // Parameters on several devices come from several threads of the engine, each to entries of its
  // own.
  void take(Entry& entry) const {
    if (!collecting) return;
    const at::Tensor gradient = entry.parameter.grad();
    if (!gradient.defined() || !narrow(gradient.scalar_type())) return;
    GRADUS_CHECK("wide_gradients", gradient.layout() == at::kStrided,
                 "fp32 sums are kept of dense gradients only; got a sparse one for ",
                 base::describe_tensor(entry.parameter), ". Use an embedding without sparse(true)");
    const at::NoGradGuard no_grad;
    const base::MemoryCategoryScope category(base::MemoryCategory::gradients);
    if (entry.sum.defined()) {
      entry.sum.add_(gradient);
    } else {
      entry.sum = gradient.to(at::kFloat);
    }
    entry.parameter.mutable_grad().reset();
  }

  // A frozen parameter cannot be watched; it may be thawed before any backward pass.
  void watch(Entry& entry) {
    if (entry.hook || !entry.parameter.requires_grad()) return;
    entry.hook = plane::grad::on_accumulated(entry.parameter,
                                             [this, to = &entry](const at::Tensor&) { take(*to); });
  }

  std::vector<std::unique_ptr<Entry>> entries{};
  std::unordered_map<const void*, Entry*> of_parameter{};
  std::atomic<bool> collecting = false;
  std::optional<internal::Accumulator> accumulator{};
};

WideGradients::WideGradients(const std::vector<at::Tensor>& parameters)
    : state_(std::make_unique<State>()) {
  for (const at::Tensor& parameter : parameters) {
    GRADUS_CHECK("wide_gradients", parameter.defined(), "parameters must be defined tensors");
    const auto [place, added] =
        state_->of_parameter.try_emplace(parameter.unsafeGetTensorImpl(), nullptr);
    if (!added) continue;
    auto entry = std::make_unique<State::Entry>();
    entry->parameter = parameter;
    state_->watch(*entry);
    place->second = entry.get();
    state_->entries.push_back(std::move(entry));
  }
  state_->accumulator.emplace("wide_gradients", parameters,
                              internal::Obstacles{.always = "fp32 sums (fp32_gradients) take each "
                                                            "gradient themselves. Leave them out, "
                                                            "or step after backward"});
}

WideGradients::~WideGradients() = default;

void WideGradients::collect(bool on) {
  if (on) {
    for (const auto& entry : state_->entries) state_->watch(*entry);
  }
  state_->collecting = on;
}

at::Tensor WideGradients::gradient(const at::Tensor& parameter) const {
  const auto found = state_->of_parameter.find(parameter.unsafeGetTensorImpl());
  return found == state_->of_parameter.end() || found->second == nullptr ? at::Tensor()
                                                                         : found->second->sum;
}

std::vector<at::Tensor> WideGradients::gradients() const {
  std::vector<at::Tensor> sums;
  for (const auto& entry : state_->entries) {
    if (entry->sum.defined()) sums.push_back(entry->sum);
  }
  return sums;
}

void WideGradients::write() const {
  const at::NoGradGuard no_grad;
  const base::MemoryCategoryScope category(base::MemoryCategory::gradients);
  for (const auto& entry : state_->entries) {
    if (entry->sum.defined())
      entry->parameter.mutable_grad() = entry->sum.to(entry->parameter.scalar_type());
  }
}

void WideGradients::clear() {
  for (const auto& entry : state_->entries) entry->sum.reset();
}

}  // namespace gradus::accumulate
