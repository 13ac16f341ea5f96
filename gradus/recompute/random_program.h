#pragma once

// For this module's tests: programs drawn at random, and tensors compared bit by bit.

#include <random>
#include <vector>

#include <ATen/ATen.h>

namespace gradus::recompute {

// equal() alone calls two NaNs different.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto as_bytes = [](const at::Tensor& t) {
    return t.contiguous().flatten().view(at::kByte);
  };
  return a.numel() == 0 || as_bytes(a).equal(as_bytes(b));
}

// A random program over a pool of tensors: pointwise operators, products, views, in-place updates,
// shared values, dropout, concatenation.
inline std::vector<at::Tensor> random_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  at::manual_seed(seed);
  auto leaf = at::randn({32, 32}).requires_grad_();
  auto weight = at::randn({32, 32}).requires_grad_();
  std::vector<at::Tensor> pool{leaf * 1, at::mm(leaf, weight)};
  for (int i = 0; i < 60; ++i) {
    const at::Tensor a = pool[pick(pool.size())], b = pool[pick(pool.size())];
    at::Tensor c;
    switch (pick(14)) {
      case 0:
        c = a.tanh();
        break;
      case 1:
        c = a.sigmoid() * b;
        break;
      case 2:
        c = at::mm(a, weight) * 0.2;
        break;
      case 3:
        c = (a + b).sin();
        break;
      case 4:
        c = at::dropout(a, 0.3, true);
        break;
      case 5:
        c = a.t().contiguous().cos();
        break;
      case 6:
        c = at::cat({a.narrow(0, 0, 16), b.narrow(0, 16, 16)}, 0);
        break;
      case 7:
        c = at::layer_norm(a, {32});
        break;
      case 8:
        c = at::gelu(b);
        break;
      case 9: {
        c = a * 1;
        c.narrow(1, 0, 8).mul_(0.5);
        break;
      }
      case 10:
        c = (a * 2).relu_();
        break;
      case 11:
        c = at::softmax(a + b.t(), 1);
        break;
      case 12: {
        c = a.exp().clamp_max(4);
        c.add_(b);
        break;
      }
      default:
        c = at::mm(a.tanh(), b.tanh().t()) * 0.1;
        break;
    }
    if (pool.size() < 6) {
      pool.push_back(c);
    } else {
      pool[pick(pool.size())] = c;
    }
  }
  at::Tensor loss = at::zeros({});
  for (const auto& t : pool) loss = loss + t.pow(2).mean();
  pool.clear();
  loss.backward();
  return {leaf.grad(), weight.grad(), loss.detach()};
}

}  // namespace gradus::recompute
