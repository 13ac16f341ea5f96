#include <gradus/recompute/internal/surroundings.h>

#include <mutex>
#include <utility>

namespace gradus::recompute::internal {
namespace {

std::vector<at::Generator> custom_generators(const RegionRecord& record) {
  std::vector<at::Generator> custom;
  for (const auto& entry : record.generators) custom.push_back(entry.first);
  return custom;
}

}  // namespace

Surroundings::Surroundings(const CheckpointOptions& options) {
  if (options.preserve_rng_state) rng_ = base::RngState::capture();
}

Surroundings::Scope::Scope(const Surroundings& surroundings, const RegionRecord& record)
    : autocast_(surroundings.autocast_) {
  if (!surroundings.rng_) return;
  rng_.emplace(custom_generators(record));
  surroundings.rng_->restore();
  for (const auto& [generator, state] : record.generators) {
    at::Generator target = generator;
    const std::lock_guard lock(target.mutex());
    target.set_state(state);
  }
}

GradientsAside::GradientsAside(const RegionRecord& record) {
  if (!record.ran_backward) return;
  for (const OutsideTensor& outside : record.read) {
    const auto alive = outside.tensor.lock();
    if (!alive) continue;
    at::Tensor leaf(alive);
    if (!leaf.is_leaf() || !leaf.requires_grad()) continue;
    gradients_.emplace_back(leaf, leaf.mutable_grad());
    leaf.mutable_grad() = at::Tensor();
  }
}

GradientsAside::~GradientsAside() {
  for (auto& [leaf, gradient] : gradients_) leaf.mutable_grad() = gradient;
}

}  // namespace gradus::recompute::internal
