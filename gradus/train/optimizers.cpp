#include <gradus/train/optimizers.h>

#include <utility>

#include <torch/nn/module.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>
#include <gradus/optim/adam_mini.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/came.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/groups.h>
#include <gradus/optim/lamb.h>
#include <gradus/optim/lars.h>
#include <gradus/optim/muon.h>
#include <gradus/optim/sgd.h>
#include <gradus/train/internal/one_of.h>

namespace gradus::train {
namespace {

using Groups = std::vector<optim::ParameterGroup>;
using Made = std::unique_ptr<optim::Optimizer>;
using Maker = Made (*)(Groups, const TrainConfig&);

template <typename Optimizer, typename Options>
Made make(Groups groups, const Options& options) {
  return std::make_unique<Optimizer>(std::move(groups), options);
}

// Adam's options under the names that they share.
template <typename Options>
Options adam_like(const TrainConfig& config) {
  Options options;
  options.beta1 = config.optimizer.beta1;
  options.beta2 = config.optimizer.beta2;
  options.eps = config.optimizer.eps;
  return options;
}

struct Kind {
  const char* name;
  const char* eight_bit;  // null if there is none
  Maker make;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"adamw", "adamw8bit",
       [](Groups groups, const TrainConfig& config) {
         return make<optim::AdamW>(std::move(groups), adam_like<optim::AdamWOptions>(config));
       }},
      {"adam", "adam8bit",
       [](Groups groups, const TrainConfig& config) {
         return make<optim::Adam>(std::move(groups), adam_like<optim::AdamOptions>(config));
       }},
      {"sgd", "sgd8bit",
       [](Groups groups, const TrainConfig& config) {
         return make<optim::SGD>(std::move(groups),
                                 optim::SGDOptions{.momentum = config.optimizer.momentum});
       }},
      {"adafactor", nullptr,
       [](Groups groups, const TrainConfig&) {
         return make<optim::Adafactor>(std::move(groups), optim::AdafactorOptions{});
       }},
      {"adamw8bit", nullptr,
       [](Groups groups, const TrainConfig& config) {
         return make<optim::Adam8bit>(std::move(groups), adam_like<optim::Adam8bitOptions>(config));
       }},
      {"adam8bit", nullptr,
       [](Groups groups, const TrainConfig& config) {
         auto options = adam_like<optim::Adam8bitOptions>(config);
         options.decoupled_weight_decay = false;
         return make<optim::Adam8bit>(std::move(groups), options);
       }},
      {"sgd8bit", nullptr,
       [](Groups groups, const TrainConfig& config) {
         return make<optim::SGD8bit>(std::move(groups),
                                     optim::SGD8bitOptions{.momentum = config.optimizer.momentum});
       }},
      {"lamb", nullptr,
       [](Groups groups, const TrainConfig& config) {
         return make<optim::Lamb>(std::move(groups), adam_like<optim::LambOptions>(config));
       }},
      {"lars", nullptr,
       [](Groups groups, const TrainConfig& config) {
         return make<optim::Lars>(std::move(groups),
                                  optim::LarsOptions{.momentum = config.optimizer.momentum});
       }},
      {"came", nullptr,
       [](Groups groups, const TrainConfig& config) {
         return make<optim::Came>(
             std::move(groups),
             optim::CameOptions{.beta1 = config.optimizer.beta1, .beta2 = config.optimizer.beta2});
       }},
      {"adam-mini", nullptr,
       [](Groups groups, const TrainConfig& config) {
         auto options = adam_like<optim::AdamMiniOptions>(config);
         options.heads = config.model.heads;
         return make<optim::AdamMini>(std::move(groups), options);
       }},
      {"muon", nullptr,
       [](Groups groups, const TrainConfig& config) {
         // Updates as large as AdamW's: one learning rate serves both.
         return make<optim::MuonWithAdamW>(
             std::move(groups),
             optim::MuonWithAdamWOptions{.muon = {.rate = optim::MuonRate::match_rms_adamw},
                                         .adamw = adam_like<optim::AdamWOptions>(config)});
       }},
  };
  return all;
}

Groups groups_of(const TrainConfig& config, const torch::nn::Module& module, double lr) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& entry : module.named_parameters())
    parameters.emplace_back(entry.key(), entry.value());
  const double decay = config.optimizer.weight_decay;
  if (config.optimizer.kind == "muon") {
    optim::MuonGroupsOptions options;
    options.rates.muon.lr = options.rates.adamw.lr = lr;
    options.rates.muon.weight_decay = options.rates.adamw.weight_decay = decay;
    return optim::muon_groups(parameters, options);
  }
  return optim::decay_groups(parameters, {.lr = lr, .weight_decay = decay, .no_decay_names = {}});
}

}  // namespace

const std::vector<std::string>& optimizer_kinds() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const Kind& kind : kinds()) result.emplace_back(kind.name);
    return result;
  }();
  return names;
}

std::optional<std::string> eight_bit_kind(const std::string& kind) {
  for (const Kind& each : kinds()) {
    if (each.name == kind && each.eight_bit != nullptr) return each.eight_bit;
  }
  return std::nullopt;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const TrainConfig& config, const amp::Amp& amp,
                                                 const torch::nn::Module& module, double lr) {
  internal::check_one_of("optimizer.kind", config.optimizer.kind, optimizer_kinds());
  Groups groups = amp.groups(groups_of(config, module, lr));
  for (const Kind& kind : kinds()) {
    if (config.optimizer.kind == kind.name) return kind.make(std::move(groups), config);
  }
  throw InternalError("[train] an optimizer kind without a maker: " + config.optimizer.kind);
}

}  // namespace gradus::train
