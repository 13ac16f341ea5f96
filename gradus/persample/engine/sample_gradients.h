#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/persample/vmap/examples.h>

namespace torch::nn {
class Module;
}

namespace gradus::persample {

/// What computes per-sample gradients.
enum class Engine : std::uint8_t {
  automatic,  ///< graph; what does not match the loop by vmap, and what vmap cannot do by the loop.
  graph,      ///< Rules on autograd nodes, one backward pass (graph_gradients.h).
  vmap,       ///< functorch's vmap over grad (vmap.h).
  loop,       ///< One example at a time: right for everything, and the oracle of the others.
};

struct SampleOptions {
  Engine engine = Engine::automatic;
  /// Examples of each new graph that are computed by the loop too and compared; 0 checks none.
  std::int64_t checked_examples = 2;
  /// Relative difference from the loop that counts as equal, by the coarsest dtype that took part.
  double tolerance_float64 = 1e-9;
  double tolerance_float32 = 1e-4;
  double tolerance_16bit = 5e-2;
  /// A parameter that does not match the loop is an error instead of falling back.
  bool strict = false;
  /// Changes examples on each new graph, so that of each two either one changes alone, and refuses
  /// models in which the loss of one that did not change does.
  bool check_mixing = true;
  GraphOptions graph{};
  /// Most working bytes of a vmap pass, where base::MemoryTracker is installed; 0 for no limit.
  /// Elsewhere vmap takes 32 examples at once.
  std::int64_t vmap_bytes = std::int64_t{1} << 30;
  /// Told of each fall-back, one line each.
  std::function<void(const std::string&)> log = nullptr;
};

/// The parameters of @p module, by name, tied ones once.
std::vector<NamedParameter> parameters_of(const torch::nn::Module& module);

/// Per-sample gradients of an unmodified model, by whichever engine gets them right, in a side
/// table keyed by parameter; .grad is left alone.
///
///     SampleGradients table(parameters_of(*model));
///     at::Tensor losses = table.backward(
///         [&](const Batch& batch) { return loss_of(model->forward(batch[0]), batch[1]); },  // [B]
///         {inputs, targets});
///     at::Tensor weights = (1.0 / table.norms()).clamp_max(1.0);
///     std::vector<at::Tensor> clipped = table.weighted_sums(weights);
///
/// On the first batch of each graph the loss is also computed for a few examples alone, and with
/// some examples changed: a model that mixes examples is refused by name, a parameter that the
/// graph engine gets wrong falls back. What that batch did not prove (weights that are zero hide
/// what is behind them) is looked at again at its 2nd, 4th, 8th, ... batch, and once it has a
/// gradient. What depends on the data of later batches only is seen by chance at best: this is a
/// check of the program, not of each batch.
class SampleGradients {
 public:
  explicit SampleGradients(std::vector<NamedParameter> parameters, SampleOptions options = {});
  /// Names modules of @p module that mix examples (BatchNorm in training, frozen or not) in errors.
  explicit SampleGradients(std::shared_ptr<torch::nn::Module> module, SampleOptions options = {});
  ~SampleGradients();
  SampleGradients(const SampleGradients&) = delete;
  SampleGradients& operator=(const SampleGradients&) = delete;

  /// Computes the losses of @p batch and each example's gradient, and adds those to the table.
  /// A loss that writes to its batch gets copies.
  /// @return The losses, [B], without graph.
  /// @throws UserError if examples mix, the losses reach no parameter that wants a gradient, or
  /// under `strict` a parameter does not match the loop.
  at::Tensor backward(const LossFunction& loss, const Batch& batch);
  /// The same for losses [B] that are there already: by the graph engine alone, and what it cannot
  /// tell is an error, as is a backward pass that adds to .grad itself.
  void backward(const at::Tensor& losses);

  std::int64_t examples() const;
  const std::vector<NamedParameter>& parameters() const;
  at::Tensor gradients(std::size_t index, bool sparse = false) const;
  at::Tensor norms(std::size_t index) const;
  at::Tensor norms() const;
  at::Tensor weighted_sum(std::size_t index, const at::Tensor& weights) const;
  std::vector<at::Tensor> weighted_sums(const at::Tensor& weights, bool consume = true);
  void clear();
  std::vector<std::string> explain() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// One call: each example's gradient of each parameter of @p module that wants one, [B, *shape], by
/// name.
std::vector<std::pair<std::string, at::Tensor>> gradients(
    const std::shared_ptr<torch::nn::Module>& module, const LossFunction& loss, const Batch& batch,
    const SampleOptions& options = {});

/// Norm of each example's gradient over all parameters, float64 [B]: which examples teach most
/// (data pruning by GraNd; Paul et al. 2021).
at::Tensor gradient_norms(const std::shared_ptr<torch::nn::Module>& module,
                          const LossFunction& loss, const Batch& batch,
                          const SampleOptions& options = {});

/// The gradient noise scale tr(S) / |G|^2 of the mean gradient G and the covariance S of one
/// example's gradient, each by its unbiased estimate over the batch (McCandlish et al. 2018, "An
/// empirical model of large-batch training", appendix A): about the batch size beyond which larger
/// ones help less.
/// @throws UserError for fewer than two examples.
double noise_scale(const std::shared_ptr<torch::nn::Module>& module, const LossFunction& loss,
                   const Batch& batch, const SampleOptions& options = {});

/// The jacobian of each example's outputs: @p outputs gives [B, K] for a batch; the result is
/// [B, K, *shape] for each parameter, by K backward passes.
std::vector<at::Tensor> jacobians(const std::vector<NamedParameter>& parameters,
                                  const std::function<at::Tensor(const Batch&)>& outputs,
                                  const Batch& batch, const SampleOptions& options = {});

}  // namespace gradus::persample
