#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::privacy::nn {

using PlainState = torch::OrderedDict<std::string, at::Tensor>;

/// The state of a module, and of all below it, as it would be if every layer of gradus in it were
/// torch::nn's: names and shapes of PyTorch's state_dict, in C++ and Python.
///
/// Of DPMultiheadAttention the three projections become in_proj_weight [3E, E] (kdim = vdim = E;
/// else they stay q_proj_weight, ...) and in_proj_bias [3E], and the SequenceBias bias_k and bias_v
/// [1, 1, E]; everything else, the recurrent layers too, already has these names. A layer may
/// itself be the module.
///
/// @return Parameters and buffers of each module before those of its children. Detached; the joined
///   tensors are copies, all others share memory with the module.
PlainState plain_state(const torch::nn::Module& module);

/// Copies a state that plain_state(), or PyTorch, gave into @p module, in place: parameters stay
/// the same tensors. Devices may differ; dtypes are never converted silently.
/// @throws UserError that lists every missing and unexpected name and every other shape or dtype;
///   then nothing has changed.
void load_plain_state(torch::nn::Module& module, const PlainState& state);

}  // namespace gradus::privacy::nn
