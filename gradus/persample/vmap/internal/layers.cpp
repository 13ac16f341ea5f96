#include <gradus/persample/vmap/internal/layers.h>

#include <mutex>
#include <utility>

#include <ATen/functorch/BatchedFallback.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

namespace gradus::persample::internal {

namespace functorch = at::functorch;

bool transform_active() { return !functorch::getDynamicLayerStack().empty(); }

Layers::Layers(std::int64_t examples, bool with_grad) : examples_(examples) {
  // functorch warns at each operator that it runs example by example: slow, but right.
  static std::once_flag quiet;
  std::call_once(quiet, [] { functorch::setVmapFallbackWarningEnabled(false); });
  vmap_level_ = functorch::initAndPushDynamicLayer(
      functorch::TransformType::Vmap, c10::SymInt(examples), functorch::RandomnessType::Different);
  if (with_grad) {
    grad_level_ = functorch::initAndPushDynamicLayer(functorch::TransformType::Grad, std::nullopt,
                                                     std::nullopt, /*prev_grad_mode=*/true);
    stash_.push_back(functorch::popDynamicLayer());
  }
  stash_.push_back(functorch::popDynamicLayer());
}

Layers::~Layers() {
  while (!stash_.empty()) {
    functorch::pushDynamicLayer(std::move(stash_.back()));
    stash_.pop_back();
  }
  // What outlives the layers is marked as dead.
  while (transform_active()) functorch::popDynamicLayerAndDeleteMetadata();
}

Layers::Inside::Inside(Layers& layers) : layers_(layers), pushed_(!transform_active()) {
  while (pushed_ && !layers_.stash_.empty()) {
    functorch::pushDynamicLayer(std::move(layers_.stash_.back()));
    layers_.stash_.pop_back();
  }
}

Layers::Inside::~Inside() {
  while (pushed_ && transform_active()) layers_.stash_.push_back(functorch::popDynamicLayer());
}

bool Layers::both_on() const { return functorch::getDynamicLayerStack().size() == 2; }

at::Tensor Layers::batched(const at::Tensor& physical) const {
  return functorch::makeBatched(physical, 0, vmap_level_);
}

at::Tensor Layers::wrapped(const at::Tensor& value) {
  const Inside inside(*this);
  return functorch::makeTensorWrapper(value, grad_level_);
}

at::Tensor Layers::stand_in(const at::Tensor& parameter) {
  at::Tensor wrapper = wrapped(parameter.detach());
  torch::autograd::impl::set_gradient_edge(wrapper,
                                           torch::autograd::impl::gradient_edge(parameter));
  return wrapper;
}

OutsideLayers::OutsideLayers() {
  while (!functorch::getDynamicLayerStack().empty()) {
    layers_.push_back(functorch::popDynamicLayer());
  }
}

OutsideLayers::~OutsideLayers() {
  while (!layers_.empty()) {
    functorch::pushDynamicLayer(std::move(layers_.back()));
    layers_.pop_back();
  }
}

bool is_wrapped(const at::Tensor& tensor) {
  return functorch::maybeGetTensorWrapper(tensor) != nullptr;
}

bool is_dead(const at::Tensor& tensor) { return functorch::isDeadTensorWrapper(tensor); }

const at::Tensor& unwrapped(const at::Tensor& tensor) {
  const functorch::TensorWrapper* const wrapper = functorch::maybeGetTensorWrapper(tensor);
  return wrapper == nullptr ? tensor : wrapper->value();
}

bool is_batched(const at::Tensor& tensor) {
  return functorch::maybeGetBatchedImpl(unwrapped(tensor)) != nullptr;
}

Plain plain(const at::Tensor& tensor) {
  const at::Tensor& value = unwrapped(tensor);
  const functorch::BatchedTensorImpl* const batched = functorch::maybeGetBatchedImpl(value);
  if (batched == nullptr) return {.value = value, .batched = false};
  const OutsideLayers outside;
  return {.value = batched->value().movedim(batched->bdim(), 0), .batched = true};
}

at::Tensor plain_of(const Plain& value, std::int64_t example) {
  return value.batched ? value.value.select(0, example) : value.value;
}

void rebind(const at::Tensor& tensor, at::Tensor value) {
  functorch::TensorWrapper* const wrapper = functorch::maybeGetTensorWrapper(tensor);
  // functorch replaces what a wrapper stands for nowhere, so there is no setter. The member is no
  // constant, and the new value has the sizes and strides that the wrapper shows.
  const_cast<at::Tensor&>(wrapper->value()) = std::move(value);
}

at::Tensor by_example(const at::Tensor& gradient, std::int64_t examples) {
  const Plain value = plain(gradient);
  const OutsideLayers outside;
  if (value.batched) return value.value.detach();
  std::vector<std::int64_t> shape = value.value.sizes().vec();
  shape.insert(shape.begin(), examples);
  return value.value.detach().unsqueeze(0).expand(shape);
}

}  // namespace gradus::persample::internal
