#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::persample {

/// Takes the .grad of leaves away while it lives and puts it back at the end, so that what a
/// backward pass adds to them on its own (a checkpoint that runs backward() inside its node) is
/// seen and changes nothing.
class [[nodiscard]] SetAsideGradients {
 public:
  explicit SetAsideGradients(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
    kept_.reserve(leaves_.size());
    for (const at::Tensor& leaf : leaves_) {
      kept_.push_back(std::exchange(leaf.mutable_grad(), at::Tensor()));
    }
  }
  ~SetAsideGradients() {
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      leaves_[i].mutable_grad() = std::move(kept_[i]);
    }
  }
  SetAsideGradients(const SetAsideGradients&) = delete;
  SetAsideGradients& operator=(const SetAsideGradients&) = delete;

  /// True if some leaf got a .grad since construction, or the last take() of it.
  bool any() const {
    return std::any_of(leaves_.begin(), leaves_.end(),
                       [](const at::Tensor& leaf) { return leaf.grad().defined(); });
  }
  /// The .grad that leaf number @p index got, and none is left; undefined if it got none.
  at::Tensor take(std::size_t index) {
    return std::exchange(leaves_[index].mutable_grad(), at::Tensor());
  }

 private:
  std::vector<at::Tensor> leaves_;
  std::vector<at::Tensor> kept_;
};

}  // namespace gradus::persample
