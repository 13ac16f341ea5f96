#pragma once

// The dynamic layers of functorch that make up vmap(grad(f)), and the values in them.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/functorch/DynamicLayer.h>

namespace gradus::persample::internal {

/// True if a functorch transform is active on this thread.
bool transform_active();

/// A vmap layer over a number of examples and, if wanted, a grad layer in it. They are on only
/// while an Inside lives: a program's own code runs without them, because LibTorch refuses a C++
/// autograd::Function under any.
class Layers {
 public:
  Layers(std::int64_t examples, bool with_grad);
  ~Layers();
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  std::int64_t examples() const { return examples_; }
  /// The tensor of which example i is physical[i].
  at::Tensor batched(const at::Tensor& physical) const;
  /// @p value as the loss sees it.
  at::Tensor wrapped(const at::Tensor& value);
  /// The value of @p parameter as the loss sees it, with the parameter's own edge in the graph:
  /// what differentiates by the parameter (this engine, a loss that calls torch::autograd::grad)
  /// finds all its uses, also those that no operator shows (an argument of
  /// torch::autograd::Function).
  at::Tensor stand_in(const at::Tensor& parameter);

  /// Has the layers on while it lives; changes nothing where they are on.
  class [[nodiscard]] Inside {
   public:
    explicit Inside(Layers& layers);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Layers& layers_;
    bool pushed_;
  };
  /// True inside both layers; false for what functorch runs of an operator in the outer one.
  bool both_on() const;

 private:
  std::vector<at::functorch::DynamicLayer> stash_;  // the inner one first
  std::int64_t examples_;
  std::int64_t vmap_level_ = 0;
  std::int64_t grad_level_ = 0;
};

/// While it lives, operators of this thread compute on plain tensors, out of all layers.
class OutsideLayers {
 public:
  OutsideLayers();
  ~OutsideLayers();
  OutsideLayers(const OutsideLayers&) = delete;
  OutsideLayers& operator=(const OutsideLayers&) = delete;

 private:
  std::vector<at::functorch::DynamicLayer> layers_;
};

/// What a tensor inside the layers stands for.
struct Plain {
  at::Tensor value{};  ///< Free of layers; dimension 0 counts examples if batched.
  bool batched = false;
};
/// Call it inside or outside the layers; the views that it makes are made outside.
Plain plain(const at::Tensor& tensor);
/// The plain value of one example.
at::Tensor plain_of(const Plain& value, std::int64_t example);
bool is_batched(const at::Tensor& tensor);
/// A value that the grad layer wraps.
bool is_wrapped(const at::Tensor& tensor);
/// Left over from layers that are gone.
bool is_dead(const at::Tensor& tensor);
/// The wrapped value itself, or the tensor.
const at::Tensor& unwrapped(const at::Tensor& tensor);
/// Has the wrapper @p tensor stand for another value of the same shape and strides.
void rebind(const at::Tensor& tensor, at::Tensor value);

/// One gradient of every example, physical [B, *shape], from what backward gave inside layers.
at::Tensor by_example(const at::Tensor& gradient, std::int64_t examples);

}  // namespace gradus::persample::internal
