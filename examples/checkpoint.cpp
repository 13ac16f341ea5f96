// Checkpoints the blocks of a model by hand, under autocast, and gets the gradients of the plain
// run.

#include <cstdio>

#include <torch/torch.h>

#include <gradus/gradus.h>

int main() {
  torch::manual_seed(1);
  std::vector<torch::nn::Sequential> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::GELU(),
                                           torch::nn::Dropout(0.2)));
  }
  const at::Tensor x = torch::randn({32, 64});
  const auto gradient = [&](bool checkpointed) {
    torch::manual_seed(2);  // the same dropout in both runs
    for (auto& block : blocks) block->zero_grad();
    const gradus::amp::AutocastGuard autocast({.dtype = at::kBFloat16});
    at::Tensor h = x;
    for (auto& block : blocks) {
      // The block's handle is captured by value: it must live until backward.
      auto run = [block](at::Tensor v) mutable { return block->forward(v); };
      h = checkpointed ? gradus::recompute::checkpoint(run, h) : run(h);
    }
    h.to(at::kFloat).pow(2).mean().backward();
    return blocks[0]->parameters()[0].grad().clone();
  };
  const bool equal = gradient(true).equal(gradient(false));
  std::printf("gradients are %s\n", equal ? "bit-equal" : "different");
  return equal ? 0 : 1;
}
