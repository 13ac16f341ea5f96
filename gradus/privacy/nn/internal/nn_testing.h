#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

// What the tests of several files ask.
namespace gradus::privacy::nn::internal {

class NnTest : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(1);
  }
};

// Draws options of random cases; the standard fixes mt19937's numbers, but not those of its
// distributions.
class Dice {
 public:
  explicit Dice(std::uint32_t seed) : engine_(seed) {}
  // One of first, ..., last.
  std::int64_t operator()(std::int64_t first, std::int64_t last) {
    return first +
           static_cast<std::int64_t>(engine_() % static_cast<std::uint32_t>(last - first + 1));
  }
  bool coin() { return (*this)(0, 1) == 1; }

 private:
  std::mt19937 engine_;
};

inline at::TensorOptions float64() { return at::TensorOptions(torch::kFloat64); }

// The largest difference in units of the larger of 1 and the largest value.
inline double gap(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes()) return std::numeric_limits<double>::infinity();
  if (got.numel() == 0) return 0.0;
  const double scale = std::max(1.0, expected.abs().max().item<double>());
  const double difference = (got - expected).abs().max().item<double>();
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference / scale;
}

// "" if the tensors are equal to @p tolerance, pair by pair; else the first that is not.
inline std::string mismatch(const std::vector<at::Tensor>& got,
                            const std::vector<at::Tensor>& expected, double tolerance) {
  std::ostringstream text;
  if (got.size() != expected.size()) text << got.size() << " tensors for " << expected.size();
  for (std::size_t i = 0; text.str().empty() && i < got.size(); ++i) {
    if (got[i].defined() != expected[i].defined()) {
      text << "tensor " << i << " is defined on one side only";
    } else if (got[i].defined() && !(gap(got[i], expected[i]) <= tolerance)) {
      text << "tensor " << i << " differs by " << gap(got[i], expected[i]) << ", shapes "
           << got[i].sizes() << " and " << expected[i].sizes();
    }
  }
  return text.str();
}

// Gradients of a loss in which every value of @p results has a weight of its own, the same for any
// results of these shapes.
inline std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& results,
                                         const std::vector<at::Tensor>& leaves) {
  at::Tensor loss = torch::zeros({}, results[0].options());
  for (const auto& result : results) {
    if (!result.defined()) continue;
    const at::Tensor weights =
        torch::arange(1, result.numel() + 1, result.options()).mul(0.7).sin().view(result.sizes());
    loss = loss + (result * weights).sum();
  }
  return torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/false, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

inline std::vector<at::Tensor> flat(const std::tuple<at::Tensor, at::Tensor>& results) {
  return {std::get<0>(results), std::get<1>(results)};
}

inline std::vector<at::Tensor> flat(
    const std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>>& results) {
  const auto& [output, states] = results;
  return {output, std::get<0>(states), std::get<1>(states)};
}

// Copies parameters by name, in place.
inline void copy_parameters(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto source = from.named_parameters();
  for (auto& item : to.named_parameters()) item.value().copy_(source[item.key()]);
}

// "name [shape]" of each parameter, in order.
inline std::vector<std::string> signature(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  for (const auto& item : module.named_parameters()) {
    std::ostringstream line;
    line << item.key() << " " << item.value().sizes();
    lines.push_back(line.str());
  }
  return lines;
}

// What torch::save wrote of @p from, loaded into @p to.
template <typename From, typename To>
void save_and_load(const From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

}  // namespace gradus::privacy::nn::internal
