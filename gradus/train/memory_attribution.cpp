#include <gradus/train/memory_attribution.h>

#include <torch/nn/module.h>

#include <gradus/base/memory_tracker.h>

namespace gradus::train {
namespace {

using base::MemoryCategory;

class MarkActivations final : public plane::saved::Hooks {
 public:
  bool reads_data() const override { return false; }
  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value) override {
    // The mark ends with the function, when autograd drops the tensor.
    auto mark = std::make_shared<base::SavedMark>(value.tensor);
    return plane::saved::Packed{{value.tensor},
                                [mark = std::move(mark)](std::vector<at::Tensor> payload) {
                                  return std::move(payload[0]);
                                }};
  }
};

}  // namespace

MemoryAttribution::MemoryAttribution(const torch::nn::Module& module) {
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  for (const at::Tensor& parameter : module.parameters()) {
    tracker.attribute(parameter, MemoryCategory::parameters);
    if (!parameter.requires_grad()) continue;
    gradients_.push_back(plane::grad::on_accumulated(parameter, [&tracker](const at::Tensor& leaf) {
      tracker.attribute(leaf.grad(), MemoryCategory::gradients);
    }));
  }
  for (const at::Tensor& buffer : module.buffers())
    tracker.attribute(buffer, MemoryCategory::parameters);
  activations_ =
      plane::saved::push(plane::saved::Order::observe, std::make_shared<MarkActivations>());
}

}  // namespace gradus::train
