// Replays what optim_parity.py recorded from Python's torch.optim: same gradients, 20 steps, 1e-6.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/torch.h>

#include <gradus/optim/adamw.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/sgd.h>

namespace gradus::optim {
namespace {

constexpr int kSteps = 20;
constexpr int kParameters = 4;

using Recording = c10::Dict<c10::IValue, c10::IValue>;

// Leaves null where the interpreter is absent; a script that fails is a failure.
std::unique_ptr<Recording> record() {
  const auto path = std::filesystem::temp_directory_path() /
                    ("gradus_optim_parity_" + std::to_string(getpid()) + ".pt");
  const auto command = std::string("'") + GRADUS_PARITY_PYTHON + "' '" + GRADUS_PARITY_SCRIPT +
                       "' '" + path.string() + "'";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  return std::make_unique<Recording>(torch::pickle_load(bytes).toGenericDict());
}

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>, bool fused)> make;
  bool clip = false;
};

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

void replay(const Recording& recording, const std::string& name, const Case& test, bool fused) {
  SCOPED_TRACE(name + (fused ? " fused" : " foreach"));
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
    if (test.clip) {
      const double norm = tensor("norm/" + std::to_string(step)).item<double>();
      EXPECT_NEAR(clip_gradient_norm(parameters, 1.0), norm, 1e-6 * norm);
    }
    optimizer->step();
  }
  for (int i = 0; i < kParameters; ++i) {
    const auto expected = tensor("final/" + std::to_string(i));
    EXPECT_LE((parameters[i].detach() - expected).abs().max().item<double>(), 1e-6)
        << "parameter " << i;
  }
  std::size_t states = 0;
  for (const auto& entry : recording)
    states += entry.key().toStringRef().starts_with(name + "/state/");
  EXPECT_EQ(optimizer->state().size(), states);
  for (const auto& entry : optimizer->state()) {
    const auto expected = tensor("state/" + entry.name);
    ASSERT_EQ(entry.tensor.sizes(), expected.sizes()) << entry.name;
    EXPECT_EQ(entry.tensor.scalar_type(), expected.scalar_type()) << entry.name;
    EXPECT_LE((entry.tensor - expected).abs().max().item<double>(), 1e-6) << entry.name;
  }
}

TEST(OptimParityTest, TwentyStepsEqualPythonsTorchOptim) {
  if (!std::filesystem::exists(GRADUS_PARITY_PYTHON)) {
    GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON << ": run scripts/setup.sh";
  }
  const auto recording = record();
  int replayed = 0;
  for (const auto& test : cases()) {
    for (const auto* dtype : {"_float64", "_float32"}) {
      const auto name = test.name + dtype;
      if (test.clip && name.ends_with("_float32")) continue;
      for (const bool fused : {true, false}) {
        replay(*recording, name, test, fused);
        ++replayed;
      }
    }
  }
  EXPECT_EQ(replayed, 26);
}

}  // namespace
}  // namespace gradus::optim
