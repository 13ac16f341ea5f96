// Replays what optim_adafactor_parity.py recorded from Python's torch.optim: same gradients, 20
// steps, 1e-6.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>

#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/torch.h>

#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>

namespace gradus::optim {
namespace {

constexpr int kSteps = 20;
constexpr int kParameters = 5;

using Recording = c10::Dict<c10::IValue, c10::IValue>;

Recording record() {
  const auto path = std::filesystem::temp_directory_path() /
                    ("gradus_optim_adafactor_parity_" + std::to_string(getpid()) + ".pt");
  const auto command = std::string("'") + GRADUS_PARITY_PYTHON + "' '" + GRADUS_PARITY_SCRIPT +
                       "' '" + path.string() + "'";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  return torch::pickle_load(bytes).toGenericDict();
}

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>, bool fused)> make;
};

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

void expect_near(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  // Absolute below 1, relative above.
  const auto bound = expected.abs().clamp_min(1.0).mul(1e-6);
  EXPECT_TRUE((got - expected).abs().le(bound).all().item<bool>())
      << what << ": " << (got - expected).abs().max().item<double>();
}

void replay(const Recording& recording, const std::string& name, const Case& test, bool fused) {
  SCOPED_TRACE(name + (fused ? " fused" : " operations"));
  const auto tensor = [&](const std::string& key) {
    return recording.at(name + "/" + key).toTensor();
  };
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < kParameters; ++i) {
    parameters.push_back(tensor("initial/" + std::to_string(i)).clone().requires_grad_());
  }
  const auto optimizer = test.make(parameters, fused);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int i = 0; i < kParameters; ++i) {
      const auto key = "gradient/" + std::to_string(step) + "/" + std::to_string(i);
      if (recording.contains(name + "/" + key)) parameters[i].mutable_grad() = tensor(key).clone();
    }
    optimizer->step();
  }
  for (int i = 0; i < kParameters; ++i) {
    expect_near(parameters[i].detach(), tensor("final/" + std::to_string(i)),
                "parameter " + std::to_string(i));
  }
  std::size_t states = 0;
  for (const auto& entry : recording)
    states += entry.key().toStringRef().starts_with(name + "/state/");
  EXPECT_EQ(optimizer->state().size(), states);
  for (const auto& entry : optimizer->state())
    expect_near(entry.tensor, tensor("state/" + entry.name), entry.name);
}

TEST(OptimAdafactorParityTest, TwentyStepsOfAdamAndAdafactorEqualPythonsTorchOptim) {
  if (!std::filesystem::exists(GRADUS_PARITY_PYTHON)) {
    GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON << ": run scripts/setup.sh";
  }
  const auto recording = record();
  int replayed = 0;
  for (const auto& test : cases()) {
    for (const auto* dtype : {"_float64", "_float32"}) {
      for (const bool fused : {true, false}) {
        replay(recording, test.name + dtype, test, fused);
        ++replayed;
      }
    }
  }
  EXPECT_EQ(replayed, 28);
}

}  // namespace
}  // namespace gradus::optim
