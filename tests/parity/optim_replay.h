#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/optim/clip.h>
#include <gradus/optim/optimizer.h>

#include <tests/support/python_recording.h>

namespace gradus::optim {

/// An optimizer that optim_parity.py's run_case recorded in Python.
struct ReplayCase {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>, bool fused)> make;
  bool clip = false;  ///< The gradients are clipped to a norm of 1.
};

/// What is accepted beside 1e-6.
enum class Bound : std::uint8_t {
  absolute,
  relative_above_one,  ///< 1e-6 of values above 1.
};

inline void expect_near(const at::Tensor& got, const at::Tensor& expected, Bound bound,
                        const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  const auto scale = bound == Bound::absolute ? at::ones_like(expected, at::kDouble)
                                              : expected.to(at::kDouble).abs().clamp_min(1.0);
  const auto difference = (got - expected).abs();
  EXPECT_TRUE(difference.to(at::kDouble).le(scale * 1e-6).all().item<bool>())
      << what << ": " << difference.max().item<double>();
}

/// Takes the recorded gradients of @p name's @p count parameters and compares parameters, norms and
/// state.
inline void replay(const c10::Dict<c10::IValue, c10::IValue>& recording, const std::string& name,
                   const ReplayCase& test, bool fused, Bound bound, int count) {
  constexpr int kSteps = 20;
  SCOPED_TRACE(name + (fused ? " fused" : " operations"));
  const auto tensor = [&](const std::string& key) {
    return recording.at(name + "/" + key).toTensor();
  };
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < count; ++i) {
    parameters.push_back(tensor("initial/" + std::to_string(i)).clone().requires_grad_());
  }
  const auto optimizer = test.make(parameters, fused);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto key = "gradient/" + std::to_string(step) + "/" + std::to_string(i);
      if (recording.contains(name + "/" + key)) parameters[i].mutable_grad() = tensor(key).clone();
    }
    if (test.clip) {
      const double norm = tensor("norm/" + std::to_string(step)).item<double>();
      EXPECT_NEAR(clip_gradient_norm(parameters, 1.0), norm, 1e-6 * norm);
    }
    optimizer->step();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    expect_near(parameters[i].detach(), tensor("final/" + std::to_string(i)), bound,
                "parameter " + std::to_string(i));
  }
  std::size_t states = 0;
  for (const auto& entry : recording)
    states += entry.key().toStringRef().starts_with(name + "/state/");
  EXPECT_EQ(optimizer->state().size(), states);
  for (const auto& entry : optimizer->state())
    expect_near(entry.tensor, tensor("state/" + entry.name), bound, entry.name);
}

}  // namespace gradus::optim
