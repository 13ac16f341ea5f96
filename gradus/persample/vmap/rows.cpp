#include <gradus/persample/vmap/rows.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/persample/vmap/internal/layers.h>
#include <gradus/persample/vmap/set_aside_gradients.h>

namespace gradus::persample {
namespace {

std::vector<at::Tensor> backward(const at::Tensor& losses, const std::vector<at::Tensor>& wanted,
                                 const at::Tensor& root) {
  return torch::autograd::grad({losses}, wanted, {root}, /*retain_graph=*/true,
                               /*create_graph=*/false, /*allow_unused=*/true);
}

// Rows [first, first + roots.size(0)) at once.
std::vector<at::Tensor> batched_backward(const at::Tensor& losses,
                                         const std::vector<at::Tensor>& wanted,
                                         const at::Tensor& roots) {
  const std::int64_t rows = roots.size(0);
  std::vector<at::Tensor> given;
  {
    internal::Layers layers(rows, /*with_grad=*/false);
    const internal::Layers::Inside inside(layers);
    given = backward(losses, wanted, layers.batched(roots));
  }
  for (at::Tensor& gradient : given) {
    if (gradient.defined()) gradient = internal::by_example(gradient, rows);
  }
  return given;
}

class Rows {
 public:
  Rows(const at::Tensor& losses, std::vector<at::Tensor> wanted)
      : losses_(losses), wanted_(std::move(wanted)) {
    for (const at::Tensor& tensor : wanted_) {
      std::vector<std::int64_t> shape = tensor.sizes().vec();
      shape.insert(shape.begin(), losses.size(0));
      results_.push_back(at::zeros(shape, tensor.options().requires_grad(false)));
    }
  }

  std::vector<at::Tensor> run(const RowOptions& options) {
    const at::NoGradGuard no_grad;
    const std::int64_t examples = losses_.size(0);
    bool batched = options.rows_at_once > 1;
    for (std::int64_t first = 0; first < examples;) {
      const std::int64_t rows = std::min(options.rows_at_once, examples - first);
      if (batched && rows > 1) {
        try {
          const auto given = batched_backward(losses_, wanted_, one_hot(first, rows));
          for (std::size_t k = 0; k < given.size(); ++k) {
            if (given[k].defined()) results_[k].narrow(0, first, rows).copy_(given[k]);
          }
          first += rows;
          continue;
        } catch (const c10::OutOfMemoryError&) {
          throw;
        } catch (const MemoryLimitError&) {
          throw;
        } catch (const c10::Error&) {
          batched = false;  // a formula that cannot be batched: run alone, it says if it is broken
        } catch (const UserError&) {
          batched = false;  // such as a recomputation, which finds other operators than it recorded
        }
      }
      const auto given = backward(losses_, wanted_, one_hot(first, 1).squeeze(0));
      for (std::size_t k = 0; k < given.size(); ++k) {
        if (given[k].defined()) results_[k].select(0, first).add_(given[k]);  // sparse ones too
      }
      ++first;
    }
    return std::move(results_);
  }

 private:
  at::Tensor one_hot(std::int64_t first, std::int64_t rows) const {
    at::Tensor roots = at::zeros({rows, losses_.size(0)}, losses_.options().requires_grad(false));
    roots.diagonal(first).fill_(1);
    return roots;
  }

  const at::Tensor& losses_;
  const std::vector<at::Tensor> wanted_;
  std::vector<at::Tensor> results_;
};

}  // namespace

std::vector<at::Tensor> row_gradients(const at::Tensor& losses,
                                      const std::vector<NamedParameter>& parameters,
                                      const RowOptions& options) {
  GRADUS_CHECK("persample", losses.defined() && losses.dim() == 1 && losses.size(0) >= 1,
               "losses must have shape [B], B >= 1; got ",
               losses.defined() ? base::join("shape ", losses.sizes()) : "an undefined tensor");
  GRADUS_CHECK("persample", losses.requires_grad(),
               "losses must have a graph; got a tensor that requires no gradient");
  GRADUS_CHECK("persample", options.rows_at_once >= 1, "rows_at_once must be at least 1; got ",
               options.rows_at_once);
  GRADUS_CHECK("persample", !internal::transform_active(),
               "row_gradients must not run inside a functorch transform");
  std::vector<at::Tensor> gradients(parameters.size()), wanted;
  std::vector<std::size_t> places;
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    if (!wants_gradient(parameters[k])) continue;
    wanted.push_back(parameters[k].tensor);
    places.push_back(k);
  }
  if (wanted.empty()) return gradients;
  const SetAsideGradients aside(wanted);
  std::vector<at::Tensor> found = Rows(losses, std::move(wanted)).run(options);
  GRADUS_CHECK(
      "persample", !aside.any(),
      "a backward pass that leaves .grad alone is required; got one that adds to it itself "
      "(a checkpoint that runs backward() inside): use loop_gradients()");
  for (std::size_t i = 0; i < places.size(); ++i) gradients[places[i]] = std::move(found[i]);
  return gradients;
}

}  // namespace gradus::persample
