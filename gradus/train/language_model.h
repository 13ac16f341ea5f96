#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/data/batches.h>
#include <gradus/models/gpt.h>
#include <gradus/train/config.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace gradus::accumulate {
class GradientWindow;
}
namespace gradus::amp {
class Amp;
}
namespace gradus::optim {
class Optimizer;
}

namespace gradus::train {

// Shapes: B sequences, T tokens of each.

/// The GPT of a configuration for @p vocabulary tokens, with weights drawn from the default
/// generator.
models::Gpt make_gpt(const TrainConfig& config, std::int64_t vocabulary);

/// Parameters and buffers by name.
std::vector<std::pair<std::string, at::Tensor>> named_tensors(const torch::nn::Module& module);

/// The mean cross-entropy of @p targets_BT, in nats a token, in float32 or wider. Keeps nothing of
/// the first @p recomputed blocks for backward but their inputs.
at::Tensor language_model_loss(models::GptImpl& gpt, const at::Tensor& inputs_BT,
                               const at::Tensor& targets_BT, std::int64_t recomputed);

/// The same of each sequence alone, the mean over its own tokens: [B].
at::Tensor language_model_losses(models::GptImpl& gpt, const at::Tensor& inputs_BT,
                                 const at::Tensor& targets_BT, std::int64_t recomputed);

/// Forward and backward of one micro-batch in what @p amp computes in: the trainer's steps and the
/// trials that they are planned from go through here.
///
/// @param window     Takes the gradients; weighted by the tokens.
/// @param judge      The window's gradients are complete: the loss scale may be changed by what was
/// found in them. False leaves that to a later micro-batch.
void language_model_backward(models::GptImpl& gpt, amp::Amp& amp, optim::Optimizer& optimizer,
                             accumulate::GradientWindow& window, const at::Tensor& inputs_BT,
                             const at::Tensor& targets_BT, std::int64_t recomputed, bool judge);

/// The mean loss of @p sequences sequences of @p stream from its start, in evaluation mode, at most
/// @p micro_batch at a time. Leaves stream, mode and random state as they were.
double evaluate(models::GptImpl& gpt, data::BatchStream& stream, std::int64_t sequences,
                std::int64_t micro_batch);

}  // namespace gradus::train
