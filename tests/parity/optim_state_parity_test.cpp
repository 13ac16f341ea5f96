// Exchanges optimizer state with Python's torch.optim in both directions (optim_state_parity.py):
// state that Python saved continues here, and state saved here continues there, to 1e-6. Learning
// rates of every schedule that torch has.

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adam.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/muon.h>
#include <gradus/optim/schedule.h>
#include <gradus/optim/sgd.h>
#include <gradus/optim/torch_state.h>
#include <gradus/state/safetensors.h>

namespace gradus::optim {
namespace {

constexpr int kSteps = 20;
constexpr std::size_t kParameters = 5;

using Tensors = std::map<std::string, at::Tensor>;

// The folder that both sides write into; made by Python's record, and removed at the end.
class Exchange {
 public:
  Exchange()
      : folder_(std::filesystem::temp_directory_path() /
                ("gradus_optim_state_parity_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
    python("record");
  }
  ~Exchange() { std::filesystem::remove_all(folder_); }
  Exchange(const Exchange&) = delete;

  void python(const std::string& verb) const {
    const auto command = std::string("'") + GRADUS_PARITY_PYTHON + "' '" +
                         GRADUS_STATE_PARITY_SCRIPT + "' " + verb + " '" + folder_.string() + "'";
    if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  state::SafetensorsContent load(const std::string& name) const {
    return state::load_safetensors(path(name));
  }

 private:
  std::filesystem::path folder_;
};

struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(std::vector<ParameterGroup>)> make;
};

// With other rates and betas than Python's, which must come with the state; what cannot change
// after construction is the same.
std::vector<Case> cases() {
  using Groups = std::vector<ParameterGroup>;
  std::vector<Case> result;
  for (const bool fused : {true, false}) {
    result.push_back({"adamw", [=](Groups groups) {
                        return std::make_unique<AdamW>(groups, AdamWOptions{.fused = fused});
                      }});
    result.push_back({"adamw_amsgrad", [=](Groups groups) {
                        return std::make_unique<AdamW>(
                            groups, AdamWOptions{.amsgrad = true, .fused = fused});
                      }});
    result.push_back({"adam", [=](Groups groups) {
                        return std::make_unique<Adam>(groups, AdamOptions{.fused = fused});
                      }});
    result.push_back({"sgd_nesterov", [=](Groups groups) {
                        return std::make_unique<SGD>(
                            groups, SGDOptions{.momentum = 0.7, .nesterov = true, .fused = fused});
                      }});
    result.push_back({"sgd", [=](Groups groups) {
                        return std::make_unique<SGD>(groups, SGDOptions{.fused = fused});
                      }});
  }
  result.push_back(
      {"muon", [](Groups groups) { return std::make_unique<Muon>(groups, MuonOptions{}); }});
  result.push_back(
      {"muon_rms", [](Groups groups) {
         return std::make_unique<Muon>(
             groups,
             MuonOptions{.nesterov = false, .iterations = 4, .rate = MuonRate::match_rms_adamw});
       }});
  return result;
}

std::vector<at::Tensor> parameters_in(const Tensors& tensors) {
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < kParameters; ++i) {
    result.push_back(tensors.at("parameter." + std::to_string(i)).clone().requires_grad_());
  }
  return result;
}

std::unique_ptr<Optimizer> optimizer_for(const Case& test, const std::vector<at::Tensor>& p) {
  return test.make({{.parameters = {p[0], p[1]}, .lr = 0.7, .weight_decay = 0.7},
                    {.parameters = {p[2], p[3], p[4]}, .lr = 0.7, .weight_decay = 0.7}});
}

TorchState flat_state(const state::SafetensorsContent& content) {
  TorchState result{.param_groups = content.metadata.at("param_groups")};
  for (const auto& [name, tensor] : content.tensors) {
    if (name.starts_with("state.")) result.tensors.push_back({name, tensor});
  }
  return result;
}

void expect_near(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_LE((got.detach() - expected).abs().max().item<double>(), 1e-6) << what;
}

// Python's state, steps here; then writes what it reached for Python to continue.
void continue_from_python(const Exchange& exchange, const Case& test, const std::string& name) {
  const auto before = exchange.load(name + ".before");
  const auto steps = exchange.load(name + ".steps").tensors;
  auto parameters = parameters_in(before.tensors);
  const auto optimizer = optimizer_for(test, parameters);
  load_torch_state(*optimizer, flat_state(before));
  EXPECT_EQ(optimizer->groups()[1].lr, 3e-3);
  EXPECT_EQ(optimizer->groups()[0].weight_decay, 0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (std::size_t i = 0; i < kParameters; ++i) {
      const auto gradient =
          steps.find("gradient." + std::to_string(step) + "." + std::to_string(i));
      if (gradient != steps.end()) parameters[i].mutable_grad() = gradient->second.clone();
    }
    optimizer->step();
  }
  const auto reached = to_torch_state(*optimizer);
  for (std::size_t i = 0; i < kParameters; ++i) {
    expect_near(parameters[i], steps.at("after." + std::to_string(i)), std::to_string(i));
  }
  std::size_t states = 0;
  for (const auto& [key, tensor] : steps) states += key.starts_with("after.state.");
  EXPECT_EQ(reached.tensors.size(), states);
  for (const auto& entry : reached.tensors) {
    expect_near(entry.tensor, steps.at("after." + entry.name), entry.name);
  }

  std::vector<state::NamedTensor> out;
  for (const auto& entry : reached.tensors) out.emplace_back(entry.name, entry.tensor.clone());
  for (std::size_t i = 0; i < kParameters; ++i) {
    out.emplace_back("parameter." + std::to_string(i), parameters[i].detach().clone());
    out.emplace_back("gradient." + std::to_string(i), parameters[i].grad());
  }
  state::save_safetensors(exchange.path(name + ".cpp"), out,
                          {{"param_groups", reached.param_groups}});
}

// One more step here, for what Python made of the same one.
void expect_python_continued(const Exchange& exchange, const Case& test, const std::string& name) {
  const auto saved = exchange.load(name + ".cpp");
  auto parameters = parameters_in(saved.tensors);
  const auto optimizer = optimizer_for(test, parameters);
  load_torch_state(*optimizer, flat_state(saved));
  for (std::size_t i = 0; i < kParameters; ++i) {
    parameters[i].mutable_grad() = saved.tensors.at("gradient." + std::to_string(i));
  }
  optimizer->step();
  const auto continued = exchange.load(name + ".continued").tensors;
  for (std::size_t i = 0; i < kParameters; ++i) {
    const auto key = "parameter." + std::to_string(i);
    expect_near(parameters[i], continued.at(key), key);
    EXPECT_FALSE(torch::equal(continued.at(key), saved.tensors.at(key))) << "Python did not step";
  }
}

// One recording for all tests: starting Python takes longer than they do.
class OptimStateParityTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    if (std::filesystem::exists(GRADUS_PARITY_PYTHON)) exchange_ = std::make_unique<Exchange>();
  }
  static void TearDownTestSuite() { exchange_.reset(); }
  void SetUp() override {
    if (!exchange_) {
      GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON
                   << ": run scripts/setup.sh";
    }
  }
  static std::unique_ptr<Exchange> exchange_;
};

std::unique_ptr<Exchange> OptimStateParityTest::exchange_;

TEST_F(OptimStateParityTest, StateGoesToPythonsTorchOptimAndBack) {
  const auto& exchange = *exchange_;
  const auto each = [&](const auto& fn) {
    for (const auto& test : cases()) {
      for (const auto* dtype : {"_float64", "_float32"}) {
        SCOPED_TRACE(test.name + dtype);
        fn(exchange, test, test.name + dtype);
      }
    }
  };
  each(continue_from_python);
  exchange.python("continue");
  each(expect_python_continued);
}

TEST_F(OptimStateParityTest, SchedulesHaveTorchsLearningRates) {
  const std::vector<std::pair<std::string, Schedule>> schedules{
      {"cosine", cosine_schedule({.peak_lr = 2.0, .total_steps = 60, .min_lr = 0.05})},
      {"linear",
       linear_schedule({.lr = 2.0, .start_factor = 0.25, .end_factor = 0.75, .total_steps = 40})},
      {"step", step_schedule(2.0, 7, 0.5)},
      {"multistep", multistep_schedule(2.0, {5, 20, 20, 33}, 0.5)},
      {"exponential", exponential_schedule(2.0, 0.9)},
      {"polynomial", polynomial_schedule(2.0, 40, 1.5)},
      {"one_cycle", one_cycle_schedule({.max_lr = 2.0, .total_steps = 60})},
      {"one_cycle_linear", one_cycle_schedule({.max_lr = 2.0,
                                               .total_steps = 60,
                                               .warmup_share = 0.41,
                                               .cosine = false,
                                               .div_factor = 5.0,
                                               .final_div_factor = 10.0})},
      {"one_cycle_three",
       one_cycle_schedule(
           {.max_lr = 2.0, .total_steps = 60, .warmup_share = 0.37, .three_phase = true})},
      {"sequential",
       sequential_schedule(
           {linear_schedule({.lr = 2.0, .start_factor = 0.1, .end_factor = 1.0, .total_steps = 10}),
            cosine_schedule({.peak_lr = 2.0, .total_steps = 50})},
           {10})}};
  const auto rates = exchange_->load("schedules").tensors;
  EXPECT_EQ(rates.size(), schedules.size());
  for (const auto& [name, schedule] : schedules) {
    SCOPED_TRACE(name);
    const auto& expected = rates.at(name);
    for (std::int64_t step = 0; step < expected.numel(); ++step) {
      EXPECT_NEAR(schedule(step), expected[step].item<double>(), 1e-12) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace gradus::optim
