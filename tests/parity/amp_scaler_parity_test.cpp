// Replays the scripts that amp_scaler_parity.py ran under Python's torch.amp.GradScaler: the same
// decisions and scales, and parameters to 1e-6.

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/scaler/grad_scaler.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/sgd.h>

#include <tests/support/python_recording.h>

namespace gradus::amp {
namespace {

constexpr int kScripts = 50;
const std::vector<std::vector<std::int64_t>> kShapes = {{6, 4}, {6}, {3, 6}, {3}};

using Recording = c10::Dict<c10::IValue, c10::IValue>;
using Words = std::istringstream;

double number(Words& words) {
  std::string word;
  EXPECT_TRUE(words >> word);
  return std::stod(word);  // Reads inf and nan too, which >> does not.
}

std::vector<double> numbers(Words& words) {
  std::vector<double> result;
  for (std::string word; words >> word;) result.push_back(std::stod(word));
  return result;
}

struct Model {
  std::vector<at::Tensor> parameters;
  bool squeeze = false;
};

/// One script's models, optimizers and scaler; class Run of the Python file says what each
/// operation does.
class Replay {
 public:
  Replay(at::Tensor initial, at::Tensor inputs)
      : initial_(std::move(initial)), inputs_(std::move(inputs)) {}

  void line(const std::string& text) {
    Words words(text);
    std::string name;
    words >> name;
    operations_.at(name)(words);
  }

  std::vector<float> steps;
  std::vector<double> scales;  // Scale and tracker in turns.
  std::vector<at::Tensor> parameters;

 private:
  void make_scaler(Words& words) {
    GradScalerOptions options;
    options.init_scale = number(words);
    options.growth_factor = number(words);
    options.backoff_factor = number(words);
    options.growth_interval = static_cast<std::int64_t>(number(words));
    options.enabled = number(words) == 1.0;
    scaler_.emplace(options);
  }

  void make_model(Words& words) {
    Model model{.parameters = {}, .squeeze = number(words) == 1.0};
    for (const auto& shape : kShapes) {
      const auto size = c10::multiply_integers(shape);
      model.parameters.push_back(
          initial_.slice(0, used_, used_ + size).clone().view(shape).requires_grad_());
      used_ += size;
    }
    models_.push_back(std::move(model));
  }

  void make_optimizer(Words& words) {
    std::string kind;
    words >> kind;
    const double rate = number(words);
    std::vector<at::Tensor> owned;
    for (const double index : numbers(words)) {
      const auto& model = models_.at(static_cast<std::size_t>(index));
      owned.insert(owned.end(), model.parameters.begin(), model.parameters.end());
    }
    if (kind == "adamw") {
      optimizers_.push_back(std::make_unique<optim::AdamW>(owned, optim::AdamWOptions{.lr = rate}));
    } else {
      optimizers_.push_back(std::make_unique<optim::SGD>(
          owned, optim::SGDOptions{.lr = rate, .momentum = kind == "momentum" ? 0.9 : 0.0}));
    }
  }

  optim::Optimizer& optimizer(Words& words) {
    return *optimizers_.at(static_cast<std::size_t>(number(words)));
  }

  std::vector<at::Tensor> owned(Words& words) {
    std::vector<at::Tensor> result;
    for (const auto& group : optimizer(words).groups()) {
      result.insert(result.end(), group.parameters.begin(), group.parameters.end());
    }
    return result;
  }

  void forward() {
    const auto x = inputs_[passes_++];
    outputs_.clear();
    for (const auto& model : models_) {
      const auto& p = model.parameters;
      auto y = torch::tanh(x.matmul(p[0].t()) + p[1]).matmul(p[2].t()) + p[3];
      if (model.squeeze) y = (y * 1e-34) * 1e34;
      outputs_.push_back((y * y).mean());
    }
  }

  at::Tensor loss(const std::vector<double>& coefficients) {
    auto total = torch::zeros({});
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      if (coefficients.at(i) != 0.0) total = total + coefficients[i] * outputs_[i];
    }
    return total;
  }

  void backward(Words& words) {
    const bool retain = number(words) == 1.0;
    scaler_->scale(loss(numbers(words))).backward({}, retain);
  }

  void penalty(Words& words) {
    const auto coefficients = numbers(words);
    const auto value = loss(coefficients);
    std::vector<at::Tensor> chosen;
    for (std::size_t i = 0; i < models_.size(); ++i) {
      if (coefficients.at(i) == 0.0) continue;
      chosen.insert(chosen.end(), models_[i].parameters.begin(), models_[i].parameters.end());
    }
    const auto scaled = torch::autograd::grad({scaler_->scale(value)}, chosen, {}, true, true);
    const double inverse = 1.0 / scaler_->get_scale();
    auto norm = torch::zeros({});
    for (const auto& gradient : scaled) norm = norm + (gradient * inverse).square().sum();
    scaler_->scale(value + norm.sqrt()).backward();
  }

  void poison(Words& words) {
    const auto model = static_cast<std::size_t>(number(words));
    const auto parameter = static_cast<std::size_t>(number(words));
    models_.at(model).parameters.at(parameter).grad().view(-1)[-1].fill_(number(words));
  }

  void clip_norm(Words& words) {
    const auto all = owned(words);
    optim::clip_gradient_norm(all, number(words));
  }

  void clip_value(Words& words) {
    const auto all = owned(words);
    optim::clip_gradient_value(all, number(words));
  }

  void update(Words& words) {
    const auto given = numbers(words);
    scaler_->update(given.empty() ? std::nullopt : std::optional(given.front()));
    scales.push_back(scaler_->get_scale());
    scales.push_back(static_cast<double>(scaler_->growth_tracker()));
    std::vector<at::Tensor> all;
    for (const auto& model : models_) {
      for (const auto& parameter : model.parameters) all.push_back(parameter.detach().reshape(-1));
    }
    parameters.push_back(torch::cat(all));
  }

  void reload() {
    const auto state = scaler_->state();
    scaler_.emplace(GradScalerOptions{.init_scale = 3.0, .growth_interval = 7});
    scaler_->load_state(state);
  }

  const std::unordered_map<std::string, std::function<void(Words&)>> operations_ = {
      {"scaler", [this](Words& w) { make_scaler(w); }},
      {"model", [this](Words& w) { make_model(w); }},
      {"optimizer", [this](Words& w) { make_optimizer(w); }},
      {"zero", [this](Words& w) { optimizer(w).zero_grad(); }},
      {"forward", [this](Words&) { forward(); }},
      {"backward", [this](Words& w) { backward(w); }},
      {"penalty", [this](Words& w) { penalty(w); }},
      {"poison", [this](Words& w) { poison(w); }},
      {"unscale", [this](Words& w) { scaler_->unscale(optimizer(w)); }},
      {"clip_norm", [this](Words& w) { clip_norm(w); }},
      {"clip_value", [this](Words& w) { clip_value(w); }},
      {"step", [this](Words& w) { steps.push_back(scaler_->step(optimizer(w)) ? 1.0F : 0.0F); }},
      {"update", [this](Words& w) { update(w); }},
      {"reload", [this](Words&) { reload(); }},
  };

  at::Tensor initial_;
  at::Tensor inputs_;
  std::int64_t used_ = 0;
  std::int64_t passes_ = 0;
  std::optional<GradScaler> scaler_;
  std::vector<Model> models_;
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers_;
  std::vector<at::Tensor> outputs_;
};

TEST(AmpScalerParityTest, FiftyScriptsTakeTheDecisionsOfTorchAmp) {
  if (!std::filesystem::exists(GRADUS_PARITY_PYTHON)) {
    GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON << ": run scripts/setup.sh";
  }
  at::set_num_threads(1);
  const auto recording = tests::python_recording(GRADUS_PARITY_PYTHON, GRADUS_PARITY_SCRIPT);
  std::int64_t skipped = 0;
  std::int64_t grown = 0;
  double worst = 0.0;
  for (int i = 0; i < kScripts; ++i) {
    const auto at = [&](const char* key) { return recording.at(std::to_string(i) + "/" + key); };
    const auto script = at("script").toStringRef();
    SCOPED_TRACE(script.substr(0, script.find('\n')));
    Replay replay(at("initial").toTensor(), at("inputs").toTensor());
    std::istringstream lines(script);
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with('#')) ASSERT_NO_THROW(replay.line(line)) << line;
    }
    EXPECT_TRUE(torch::equal(torch::tensor(replay.steps), at("steps").toTensor()))
        << torch::tensor(replay.steps) << at("steps").toTensor();
    const auto scales = torch::tensor(replay.scales, torch::kDouble).view({-1, 2});
    EXPECT_TRUE(torch::equal(scales, at("scales").toTensor())) << scales << at("scales").toTensor();
    const auto parameters = torch::stack(replay.parameters);
    const auto difference = (parameters - at("parameters").toTensor()).abs().max().item<double>();
    EXPECT_LE(difference, 1e-6);
    worst = std::max(worst, difference);
    skipped += std::ranges::count(replay.steps, 0.0F);
    grown += (scales.slice(0, 1).select(1, 0) > scales.slice(0, 0, -1).select(1, 0))
                 .sum()
                 .item<std::int64_t>();
  }
  // The scripts must ask something.
  EXPECT_GE(skipped, 200);
  EXPECT_GE(grown, 50);
  std::ostringstream text;
  text << worst;
  RecordProperty("largest_difference", text.str());
}

}  // namespace
}  // namespace gradus::amp
