// Replays what optim_adafactor_parity.py recorded from Python's torch.optim: same gradients, 20
// steps, 1e-6.

#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <tests/parity/optim_replay.h>
#include <torch/torch.h>

#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>

namespace gradus::optim {
namespace {

constexpr int kParameters = 5;

using Case = ReplayCase;

template <typename Kind, typename Options>
Case make_case(const std::string& name, const Options& options) {
  return {name, [options](std::vector<at::Tensor> parameters, bool fused) {
            auto own = options;
            own.fused = fused;
            return std::make_unique<Kind>(std::move(parameters), own);
          }};
}

std::vector<Case> cases() {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  return {
      make_case<Adam>("adam", AdamOptions{.lr = 1e-2}),
      make_case<Adam>("adam_amsgrad", AdamOptions{.lr = 1e-2,
                                                  .beta1 = 0.8,
                                                  .beta2 = 0.95,
                                                  .eps = 1e-6,
                                                  .weight_decay = 0.1,
                                                  .amsgrad = true}),
      make_case<Adam>("adam_maximize",
                      AdamOptions{.lr = 1e-2, .weight_decay = 0.1, .maximize = true}),
      make_case<Adafactor>("adafactor", AdafactorOptions{}),
      make_case<Adafactor>("adafactor_decay",
                           AdafactorOptions{.lr = 1e-1, .weight_decay = 0.1, .maximize = true}),
      make_case<Adafactor>(
          "adafactor_eps",
          AdafactorOptions{
              .lr = 2e-2, .beta2_decay = -0.5, .eps1 = 0.5, .eps2 = 2.0, .clip_threshold = 1.5}),
      make_case<Adafactor>("adafactor_no_clip",
                           AdafactorOptions{.lr = 5e-2, .clip_threshold = kNever}),
  };
}

TEST(OptimAdafactorParityTest, TwentyStepsOfAdamAndAdafactorEqualPythonsTorchOptim) {
  if (!std::filesystem::exists(GRADUS_PARITY_PYTHON)) {
    GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON << ": run scripts/setup.sh";
  }
  const auto recording = tests::python_recording(GRADUS_PARITY_PYTHON, GRADUS_PARITY_SCRIPT);
  int replayed = 0;
  for (const auto& test : cases()) {
    for (const auto* dtype : {"_float64", "_float32"}) {
      for (const bool fused : {true, false}) {
        replay(recording, test.name + dtype, test, fused, Bound::relative_above_one, kParameters);
        ++replayed;
      }
    }
  }
  EXPECT_EQ(replayed, 28);
}

}  // namespace
}  // namespace gradus::optim
