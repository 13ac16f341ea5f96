#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/vmap/examples.h>

namespace gradus::persample {

/// What is kept of a layer's per-sample gradients until their weighted sum.
enum class Keep : std::uint8_t {
  cheapest,  ///< Factors or formed gradients, whichever a layer's measured times and bytes favour.
  factors,   ///< Always factors: ghost norms, then weighted products ("book-keeping").
  formed,    ///< Always the gradients themselves.
};

struct GraphOptions {
  Keep keep = Keep::cheapest;
  /// Formed gradients may take this many times the bytes of the factors that they replace.
  double formed_bytes = 2.0;
  /// Compares counted operations instead of measured milliseconds: two runs then choose alike, and
  /// are equal bit for bit.
  bool reproducible = false;
  /// The caller has checked that no example changes another's loss. Without it layouts that look
  /// like a permutation of the batch, and parameters shared by way of unknown operators, are
  /// errors.
  bool examples_checked = false;
};

/// Per-sample gradients by rules on the nodes of one autograd graph: of an unmodified model,
/// whatever dimension its layers take for the batch, with one backward pass and without the sums
/// over the batch that .grad would hold. A side table keyed by parameter; nothing else changes.
///
///     GraphGradients table(parameters);
///     table.backward(losses);                       // [B]
///     at::Tensor weights = (1.0 / table.norms()).clamp_max(1.0);
///     std::vector<at::Tensor> clipped = table.weighted_sums(weights);
///
/// The first batch of each graph takes a few backward passes more, to find where its examples lie
/// (analysis.h). Not for use from several threads at once.
class GraphGradients {
 public:
  /// @throws UserError if a parameter requires a gradient and is no leaf.
  explicit GraphGradients(std::vector<NamedParameter> parameters, GraphOptions options = {});
  ~GraphGradients();
  GraphGradients(const GraphGradients&) = delete;
  GraphGradients& operator=(const GraphGradients&) = delete;

  /// Runs backward from @p losses, shape [B], and adds each example's gradient to its own in the
  /// table. The graph is freed unless @p keep_graph.
  /// @throws UserError, by name, if examples mix: a gradient that belongs to no single example
  /// (BatchNorm in training), an embedding with scale_grad_by_freq, another B than in an earlier
  /// call since clear(); if a parameter has a gradient hook, or its gradient comes from losses that
  /// are functions of parameters alone. Hooks between a parameter and its use get each example's
  /// gradient.
  void backward(const at::Tensor& losses, bool keep_graph = false);

  /// Sets GraphOptions::examples_checked for the next calls.
  void set_examples_checked(bool checked);
  /// Parameters, by number, to which the next calls add nothing; empty: none.
  void set_skipped(std::vector<bool> skipped);
  /// True if the table holds gradients of this parameter.
  bool uses(std::size_t index) const;
  /// Frees what is kept of one parameter, which then counts as not used.
  void forget(std::size_t index);

  /// B of the calls since clear(), or 0.
  std::int64_t examples() const;
  const std::vector<NamedParameter>& parameters() const;

  /// Per-sample gradients of parameter number @p index, [B, *shape]; zeros where it was not used;
  /// undefined where it wants no gradient. Of a table that only lookups use, @p sparse gives a
  /// sparse tensor.
  at::Tensor gradients(std::size_t index, bool sparse = false) const;
  /// L2 norm of each example's gradient of one parameter, float64 [B].
  at::Tensor norms(std::size_t index) const;
  /// Norm of each example's gradient over all parameters, float64 [B].
  at::Tensor norms() const;
  /// Sum over examples of weights[b] times the gradient, in the parameter's shape and dtype float32
  /// or float64; zeros where it was not used, undefined where it wants no gradient.
  at::Tensor weighted_sum(std::size_t index, const at::Tensor& weights) const;
  /// weighted_sum() of each parameter; frees each one's factors as it goes if @p consume.
  std::vector<at::Tensor> weighted_sums(const at::Tensor& weights, bool consume = true);

  /// Forgets gradients, keeps what it learned of the graphs.
  void clear();

  /// How each parameter's gradients came: "ProductTerm factors", by name; for logs and tests.
  std::vector<std::string> explain() const;
  /// How many graphs were analysed anew since construction.
  std::int64_t analyses() const;

 private:
  class Table;
  std::unique_ptr<Table> table_;
};

}  // namespace gradus::persample
