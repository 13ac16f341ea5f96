#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>

// What the tests of several models ask.
namespace gradus::models::internal {

class ModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(1);
  }
};

// Two sentence pairs, of which the second source ends early.
class TranslatorTest : public ModelTest {
 protected:
  const at::Tensor source_ = torch::tensor({{3, 1, 4, 1, 5}, {2, 7, 1, 0, 0}});
  const at::Tensor padding_ = torch::tensor({{0, 0, 0, 0, 0}, {0, 0, 0, 1, 1}}).to(torch::kBool);
  const at::Tensor target_ = torch::tensor({{1, 6, 1, 8}, {1, 2, 5, 10}});
};

// Mean cross entropy of a translator's @p next tokens.
template <typename Translator>
at::Tensor loss_of(Translator& model, const at::Tensor& source, const at::Tensor& target,
                   const at::Tensor& next, const at::Tensor& padding) {
  return torch::nn::functional::cross_entropy(model->forward(source, target, padding).flatten(0, 1),
                                              next.flatten());
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no c10::ValueError";
}

inline std::int64_t value_count(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

inline std::map<std::string, at::Tensor> state_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  return state;
}

inline std::set<std::string> names_of(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) names.insert(item.key());
  for (const auto& item : module.named_buffers()) names.insert(item.key());
  return names;
}

// Moves all parameters away from where they begin: biases and norms from 0 and 1, or an exchanged
// pair would not show.
inline void disturb(torch::nn::Module& module, double scale = 0.2) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.add_(torch::randn_like(parameter), scale);
}

// Names of the parameters that a loss's gradient does not reach.
inline std::string out_of_reach(torch::nn::Module& module, const at::Tensor& loss) {
  module.zero_grad();
  loss.backward();
  std::string names;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    const bool reached = gradient.defined() && gradient.isfinite().all().item<bool>() &&
                         gradient.abs().max().item<double>() > 0;
    if (!reached) names += item.key() + " ";
  }
  return names;
}

// The largest difference between a loss's gradient and its central differences, relative to the
// largest gradient, over @p entries entries of each parameter that is trained; for models in double
// precision.
inline double gradient_error(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                             std::int64_t entries = 5) {
  constexpr double kStep = 1e-5;
  module.zero_grad();
  loss().backward();
  const at::NoGradGuard no_grad;
  double error = 0, largest = 0;
  for (auto& parameter : module.parameters()) {
    if (!parameter.requires_grad()) continue;
    const at::Tensor values = parameter.detach().flatten(), gradient = parameter.grad().flatten();
    largest = std::max(largest, gradient.abs().max().item<double>());
    for (std::int64_t i = 0; i < entries; ++i) {
      const std::int64_t at =
          torch::randint(values.numel(), {1}, torch::kLong).item<std::int64_t>();
      const double value = values[at].item<double>();
      const auto loss_at = [&](double moved) {
        values[at] = moved;
        return loss().item<double>();
      };
      const double difference = (loss_at(value + kStep) - loss_at(value - kStep)) / (2 * kStep);
      values[at] = value;
      error = std::max(error, std::abs(difference - gradient[at].item<double>()));
    }
  }
  return error / largest;
}

// The loss after @p steps of Adam, in evaluation.
inline double loss_after_training(torch::nn::Module& module,
                                  const std::function<at::Tensor()>& loss, int steps, double rate) {
  torch::optim::Adam adam(module.parameters(), torch::optim::AdamOptions(rate));
  for (int step = 0; step < steps; ++step) {
    adam.zero_grad();
    loss().backward();
    adam.step();
  }
  module.eval();
  const at::NoGradGuard no_grad;
  return loss().item<double>();
}

// What clone() promises: the same function, in memory of its own. @p run computes with a module.
template <typename Impl>
void expect_clone_equal_and_apart(Impl& module, const std::function<at::Tensor(Impl&)>& run) {
  const auto clone = std::dynamic_pointer_cast<Impl>(module.clone());
  ASSERT_TRUE(clone);
  const at::Tensor before = run(module);
  EXPECT_TRUE(run(*clone).equal(before));
  EXPECT_EQ(names_of(*clone), names_of(module));
  disturb(*clone, 1.0);
  EXPECT_TRUE(run(module).equal(before));
  EXPECT_FALSE(run(*clone).equal(before));
}

inline double gap(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace gradus::models::internal
