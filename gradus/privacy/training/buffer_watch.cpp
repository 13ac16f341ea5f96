#include <gradus/privacy/training/internal/buffer_watch.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/instancenorm.h>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy::internal {
namespace {

using torch::nn::Module;

template <typename Impl>
bool updates_statistics(const Module& module) {
  const auto* norm = dynamic_cast<const Impl*>(&module);
  return norm != nullptr && norm->is_training() && norm->options.track_running_stats();
}

// Bit by bit, so that a NaN equals itself.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type() || a.device() != b.device() ||
      a.layout() != b.layout()) {
    return false;
  }
  if (a.layout() != at::kStrided) return same_bits(a.to_dense(), b.to_dense());
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().reshape({-1}).view(at::kByte);
  };
  return bytes(a).equal(bytes(b));
}

}  // namespace

void BufferWatch::take(const Module& model) {
  const at::NoGradGuard no_grad;
  saved_.clear();
  for (const auto& buffer : model.named_buffers()) {
    if (buffer.value().defined() && !buffer.value().is_inference())
      saved_.push_back({buffer.key(), buffer.value(), buffer.value().detach().clone()});
  }
}

std::optional<std::string> BufferWatch::restore(const Module& model) const {
  if (saved_.empty()) return std::nullopt;
  const at::NoGradGuard no_grad;
  const auto buffers = model.named_buffers();
  std::optional<std::string> changed;
  for (const Saved& each : saved_) {
    const at::Tensor* now = buffers.find(each.name);
    at::Tensor buffer = now != nullptr && now->defined() ? *now : each.buffer;
    if (same_bits(buffer, each.value)) continue;
    changed = each.name;
    // In place where it can be, so that views of the buffer see it.
    if (buffer.sizes() == each.value.sizes() && buffer.scalar_type() == each.value.scalar_type() &&
        buffer.layout() == at::kStrided) {
      buffer.copy_(each.value);
    } else {
      buffer.set_data(each.value.clone());
    }
  }
  return changed;
}

void refuse_buffer(const std::optional<std::string>& changed) {
  GRADUS_CHECK(kComponent, !changed, "buffer '", *changed,
               "' must not change in a forward pass of private training: it goes into the saved "
               "model without noise. It has its old value again. Switch the update off, or, if it "
               "does not depend on the examples, set allow_buffer_updates");
}

void refuse_running_statistics(const Module& model) {
  for (const auto& module : model.named_modules("", /*include_self=*/true)) {
    const bool updates = updates_statistics<torch::nn::InstanceNorm1dImpl>(*module.value()) ||
                         updates_statistics<torch::nn::InstanceNorm2dImpl>(*module.value()) ||
                         updates_statistics<torch::nn::InstanceNorm3dImpl>(*module.value());
    GRADUS_CHECK(kComponent, !updates, "layer '", module.key(), "' (", module.value()->name(),
                 ") must not keep running statistics in private training: they hold sums over "
                 "examples without noise. Construct it with track_running_stats(false), or use "
                 "privacy::fix(model)");
  }
}

}  // namespace gradus::privacy::internal
