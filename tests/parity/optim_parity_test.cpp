// Replays what optim_parity.py recorded from Python's torch.optim: same gradients, 20 steps, 1e-6.

#include <filesystem>
#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <tests/parity/optim_replay.h>
#include <torch/torch.h>

#include <gradus/optim/adamw.h>
#include <gradus/optim/sgd.h>

namespace gradus::optim {
namespace {

constexpr int kParameters = 4;

using Case = ReplayCase;

std::vector<Case> cases() {
  const auto adamw = [](AdamWOptions options) {
    return [options](std::vector<at::Tensor> parameters, bool fused) mutable {
      options.fused = fused;
      return std::make_unique<AdamW>(std::move(parameters), options);
    };
  };
  const auto sgd = [](SGDOptions options) {
    return [options](std::vector<at::Tensor> parameters, bool fused) mutable {
      options.fused = fused;
      return std::make_unique<SGD>(std::move(parameters), options);
    };
  };
  return {
      {"adamw", adamw({.lr = 1e-2})},
      {"adamw_amsgrad", adamw({.lr = 1e-2,
                               .beta1 = 0.8,
                               .beta2 = 0.95,
                               .eps = 1e-6,
                               .weight_decay = 0.1,
                               .amsgrad = true})},
      {"adamw_maximize", adamw({.lr = 1e-2, .maximize = true})},
      {"sgd", sgd({.lr = 1e-2, .weight_decay = 0.1})},
      {"sgd_momentum", sgd({.lr = 1e-2, .momentum = 0.9, .dampening = 0.3})},
      {"sgd_nesterov", sgd({.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true})},
      {"adamw_clipped", adamw({.lr = 1e-2}), true},
  };
}

TEST(OptimParityTest, TwentyStepsEqualPythonsTorchOptim) {
  if (!std::filesystem::exists(GRADUS_PARITY_PYTHON)) {
    GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON << ": run scripts/setup.sh";
  }
  const auto recording = tests::python_recording(GRADUS_PARITY_PYTHON, GRADUS_PARITY_SCRIPT);
  int replayed = 0;
  for (const auto& test : cases()) {
    for (const auto* dtype : {"_float64", "_float32"}) {
      const auto name = test.name + dtype;
      if (test.clip && name.ends_with("_float32")) continue;
      for (const bool fused : {true, false}) {
        replay(recording, name, test, fused, Bound::absolute, kParameters);
        ++replayed;
      }
    }
  }
  EXPECT_EQ(replayed, 26);
}

}  // namespace
}  // namespace gradus::optim
