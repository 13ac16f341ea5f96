#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/vmap/examples.h>

namespace gradus::persample {

struct RowOptions {
  /// Examples whose backward passes run as one, >= 1: functorch batches the backward formulas.
  /// What cannot be batched (a torch::autograd::Function, some formulas) is run one by one. 1: all
  /// one by one.
  std::int64_t rows_at_once = 16;
};

/// One gradient an example by B backward passes over a graph that exists: no second forward, and
/// the masks and branches of the forward pass that was made. The graph stays as it is and may be
/// used again.
///
/// Exact where examples do not mix: row i is the gradient of losses[i], whatever the graph; that
/// this is what a batch of one would give is for the caller to know. Costs at most B backward
/// passes.
/// @param losses  Shape [B], with its graph.
/// @return As loop_gradients(). Leaves .grad alone.
/// @throws UserError if @p losses has another shape or no graph, rows_at_once < 1, a functorch
/// transform is active, or the pass adds to .grad itself.
std::vector<at::Tensor> row_gradients(const at::Tensor& losses,
                                      const std::vector<NamedParameter>& parameters,
                                      const RowOptions& options = {});

}  // namespace gradus::persample
