#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <gradus/persample/vmap/internal/layers.h>
#include <gradus/persample/vmap/internal/random_streams.h>
#include <gradus/plane/op/op_plane.h>

namespace gradus::persample::internal {

/// Examples take different ways from here on: `group` numbers the way of each. A signal, not an
/// error; an exception so that it leaves the loss, and autograd's engine, at once.
class Diverged : public std::exception {
 public:
  Diverged(std::vector<std::int64_t> group, std::string operator_name)
      : group(std::move(group)), operator_name(std::move(operator_name)) {}
  const char* what() const noexcept override { return "examples take different ways"; }

  std::vector<std::int64_t> group;
  std::string operator_name;
};

/// Has a loss that was written for plain tensors compute on the wrapped ones of vmap(grad): swaps
/// parameters for wrappers and, operator by operator, makes good what functorch cannot do.
///
/// - A write of values that differ by example into a tensor that is one for all: the storage
/// becomes
///   one for each example first, and whatever else lies on it is bound anew when it is next used.
/// - Values that the host reads and shapes that depend on values: given if all examples agree, else
///   Diverged.
/// - Random numbers: each example draws from its own stream.
class ExampleTransform final : public plane::op::Handler {
 public:
  /// @param parameters  What stands for each parameter, which must outlive this.
  ExampleTransform(Layers& layers, std::unordered_map<c10::TensorImpl*, at::Tensor> parameters,
                   RandomStreams streams);

  void call(plane::op::Call& call) override;

  /// The operator in which the last exception rose, or "".
  std::string_view blamed() const { return blamed_; }

  /// Binds @p tensor to what stands for its storage now.
  void resolve(const at::Tensor& tensor);

  /// The host's numbers in @p tensor, the same for all examples, else Diverged.
  std::vector<std::int64_t> agreed_integers(const at::Tensor& tensor, std::string_view op);
  /// A wrapped tensor made of one plain value an example.
  at::Tensor joined(const std::vector<at::Tensor>& values, std::string_view op);
  Layers& layers() { return layers_; }

 private:
  struct Owned {
    c10::Storage old;  // keeps the address from being used again
    at::Tensor flat;   // [B, elements of the old storage]
  };

  void leaf(plane::op::Call& call);
  bool widen_norm(plane::op::Call& call);
  bool substitute(plane::op::Call& call);
  at::Tensor substituted(const at::Tensor& tensor, std::string_view op);
  void prepare_writes(plane::op::Call& call);
  void own_by_example(const at::Tensor& tensor);
  void by_example(plane::op::Call& call, bool random, bool loses_gradient);

  Layers& layers_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> parameters_;
  RandomStreams streams_;
  std::unordered_map<const void*, Owned> owned_;
  std::unordered_map<const void*, c10::Storage> captured_;
  std::string blamed_;
};

/// Calls @p fn with each defined tensor in @p value (a tensor, or a list of tensors or of optional
/// tensors), and gives a value with what it returned.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& fn);

/// masks.cpp: turns boolean masks among the arguments into index tensors; returns true if the call
/// was replaced.
bool index_masks(ExampleTransform& transform, plane::op::Call& call);

/// packed.cpp: packs and unpacks sequences by gathers; returns true if the call was replaced.
bool pack_sequences(ExampleTransform& transform, plane::op::Call& call);

}  // namespace gradus::persample::internal
