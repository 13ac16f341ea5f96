#include <gradus/train/language_model.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/module.h>

#include <gradus/accumulate/window.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/privacy/training/losses.h>
#include <gradus/recompute/checkpoint.h>

namespace gradus::train {

models::Gpt make_gpt(const TrainConfig& config, std::int64_t vocabulary) {
  return models::Gpt(models::GptOptions{.vocabulary = vocabulary,
                                        .context = config.model.context,
                                        .layers = config.model.layers,
                                        .heads = config.model.heads,
                                        .width = config.model.width,
                                        .dropout = config.model.dropout,
                                        .bias = config.model.bias});
}

std::vector<std::pair<std::string, at::Tensor>> named_tensors(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& entry : module.named_parameters())
    tensors.emplace_back(entry.key(), entry.value());
  for (const auto& entry : module.named_buffers()) tensors.emplace_back(entry.key(), entry.value());
  return tensors;
}

namespace {

// [B, T, V], in float32 or wider.
at::Tensor logits_of(models::GptImpl& gpt, const at::Tensor& inputs_BT, std::int64_t recomputed) {
  at::Tensor x = gpt.embed(inputs_BT);
  std::int64_t index = 0;
  for (const auto& block : gpt.blocks()) {
    if (index++ < recomputed) {
      x = recompute::checkpoint([block](at::Tensor h) { return block->forward(h); }, x);
    } else {
      x = block->forward(x);
    }
  }
  // A model of 16 bits has logits of 16 bits; a mean over thousands of tokens wants more.
  const at::Tensor head_BTV = gpt.head(x);
  return at::isReducedFloatingType(head_BTV.scalar_type()) ? head_BTV.to(at::kFloat) : head_BTV;
}

}  // namespace

at::Tensor language_model_loss(models::GptImpl& gpt, const at::Tensor& inputs_BT,
                               const at::Tensor& targets_BT, std::int64_t recomputed) {
  const at::Tensor logits_BTV = logits_of(gpt, inputs_BT, recomputed);
  return at::cross_entropy_loss(logits_BTV.flatten(0, 1), targets_BT.flatten());
}

at::Tensor language_model_losses(models::GptImpl& gpt, const at::Tensor& inputs_BT,
                                 const at::Tensor& targets_BT, std::int64_t recomputed) {
  return privacy::cross_entropy_per_example(logits_of(gpt, inputs_BT, recomputed), targets_BT,
                                            /*ignore_index=*/-100, /*class_dim=*/-1);
}

void language_model_backward(models::GptImpl& gpt, amp::Amp& amp, optim::Optimizer& optimizer,
                             accumulate::GradientWindow& window, const at::Tensor& inputs_BT,
                             const at::Tensor& targets_BT, std::int64_t recomputed, bool judge) {
  const at::Tensor loss = [&] {
    const amp::Region region = amp.region();
    return language_model_loss(gpt, inputs_BT, targets_BT, recomputed);
  }();
  amp::ScaledLoss scaled(amp, loss, {&optimizer}, {.delay_overflow_check = !judge});
  window.backward(loss, static_cast<double>(inputs_BT.numel()));
  scaled.finish();
}

double evaluate(models::GptImpl& gpt, data::BatchStream& stream, std::int64_t sequences,
                std::int64_t micro_batch) {
  const at::NoGradGuard no_grad;
  const bool was_training = gpt.is_training();
  const data::DataPosition position = stream.position();
  gpt.eval();
  double sum = 0.0;
  std::int64_t done = 0;
  const at::Device device = gpt.parameters().front().device();
  const auto restore = [&] {
    gpt.train(was_training);
    stream.seek(position);
  };
  try {
    stream.seek({});
    while (done < sequences) {
      const data::Batch batch = stream.next();
      for (std::int64_t at = 0; at < batch.size() && done < sequences; at += micro_batch) {
        const std::int64_t size = std::min({micro_batch, batch.size() - at, sequences - done});
        sum += language_model_loss(gpt, batch.inputs.narrow(0, at, size).to(device),
                                   batch.targets.narrow(0, at, size).to(device), 0)
                   .item<double>() *
               static_cast<double>(size);
        done += size;
      }
    }
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return sum / static_cast<double>(done);
}

}  // namespace gradus::train
