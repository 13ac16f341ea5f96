#include <gradus/train/memory_attribution.h>

#include <unordered_set>

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

// Looks at what autograd saves and leaves it to the hooks of later orders.
class MarkBeforeBudget final : public plane::saved::Hooks {
 public:
  explicit MarkBeforeBudget(const torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters()) note(parameter);
    for (const at::Tensor& buffer : module.buffers()) note(buffer);
  }
  bool reads_data() const override { return false; }
  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value) override {
    const at::Tensor& tensor = value.tensor;
    // Token ids are inputs; the rest that autograd saves is of the model, or was computed.
    if (tensor.has_storage() && tensor.scalar_type() != at::kLong &&
        !model_.contains(tensor.storage().unsafeGetStorageImpl())) {
      tracker_.attribute(tensor, MemoryCategory::activations);
    }
    return std::nullopt;
  }

 private:
  void note(const at::Tensor& tensor) {
    if (tensor.has_storage()) model_.insert(tensor.storage().unsafeGetStorageImpl());
  }
  base::MemoryTracker& tracker_ = base::MemoryTracker::install();
  std::unordered_set<const c10::StorageImpl*> model_;
};

}  // namespace

BudgetAttribution::BudgetAttribution(const torch::nn::Module& module)
    : activations_(plane::saved::push(plane::saved::Order::checkpoint,
                                      std::make_shared<MarkBeforeBudget>(module))) {}

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
