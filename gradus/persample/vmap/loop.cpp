#include <gradus/persample/vmap/loop.h>

#include <numeric>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <gradus/base/error.h>
#include <gradus/base/rng.h>
#include <gradus/persample/vmap/internal/random_streams.h>
#include <gradus/persample/vmap/set_aside_gradients.h>

namespace gradus::persample {

std::vector<at::Tensor> loop_gradients(const std::vector<NamedParameter>& parameters,
                                       const LossFunction& loss, const Batch& batch,
                                       const LoopOptions& options) {
  const std::int64_t total = count_examples(batch);
  std::vector<std::int64_t> indices;
  if (options.examples) {
    indices = *options.examples;
  } else {
    indices.resize(static_cast<std::size_t>(total));
    std::iota(indices.begin(), indices.end(), 0);
  }
  const auto examples = static_cast<std::int64_t>(indices.size());

  std::vector<at::Tensor> gradients(parameters.size());
  std::vector<at::Tensor> wanted;
  std::vector<std::size_t> places;
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    if (!wants_gradient(parameters[k])) continue;
    const at::Tensor& tensor = parameters[k].tensor;
    std::vector<std::int64_t> shape = tensor.sizes().vec();
    shape.insert(shape.begin(), examples);
    gradients[k] = at::zeros(shape, tensor.options().requires_grad(false));
    wanted.push_back(tensor);
    places.push_back(k);
  }
  if (wanted.empty()) return gradients;

  SetAsideGradients aside(wanted);
  std::optional<base::RngGuard> restored;
  if (options.seed) restored.emplace();
  for (std::int64_t row = 0; row < examples; ++row) {
    const std::int64_t index = indices[static_cast<std::size_t>(row)];
    const Batch example = examples_at(batch, {index});
    if (options.seed) internal::seed_generators(example_seed(*options.seed, index));
    const at::AutoGradMode grad_mode(true);
    const at::Tensor sum = summed_loss(loss(example), 1);
    if (!sum.requires_grad()) continue;
    const auto own = torch::autograd::grad({sum}, wanted, {}, /*retain_graph=*/false,
                                           /*create_graph=*/false, /*allow_unused=*/true);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      // add_, not copy_: it takes sparse gradients as well.
      if (own[i].defined()) gradients[places[i]].select(0, row).add_(own[i]);
      // What the pass added by itself is a part of the gradient, as in a plain backward().
      if (const at::Tensor inside = aside.take(i); inside.defined()) {
        gradients[places[i]].select(0, row).add_(inside);
      }
    }
  }
  return gradients;
}

}  // namespace gradus::persample
