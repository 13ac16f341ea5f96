#include <gradus/train/precision.h>

#include <charconv>
#include <cmath>

#include <gradus/base/error.h>
#include <gradus/train/internal/one_of.h>

namespace gradus::train {
namespace {

amp::LossScaling parse_loss_scale(const std::string& text) {
  if (text == "dynamic") return {};
  double number = 0.0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  GRADUS_CHECK("config",
               status == std::errc{} && end == text.data() + text.size() && std::isfinite(number) &&
                   number > 0.0,
               "train.loss_scale must be dynamic or a number above 0; got '", text, "'");
  return number;
}

}  // namespace

const std::vector<std::string>& precision_names() {
  static const std::vector<std::string> names{
      "fp32", "bf16", "fp16", "O0", "O1", "O2", "O3", "bf16-weights", "bf16-stochastic"};
  return names;
}

amp::LevelOptions precision_options(const TrainConfig& config) {
  const std::string& name = config.train.precision;
  internal::check_one_of("train.precision", name, precision_names());
  amp::LevelOptions options;
  if (name == "fp32") {
    GRADUS_CHECK("config", config.train.loss_scale.empty(),
                 "train.loss_scale is for mixed precision; got '", config.train.loss_scale,
                 "' with train.precision fp32");
    options.enabled = false;
    return options;
  }
  if (name == "bf16") {
    // bfloat16 has float32's range: nothing underflows that a scale would save.
    options.patch_functions_type = c10::ScalarType::BFloat16;
    options.loss_scale = 1.0;
  } else if (name == "bf16-weights") {
    options.opt_level = amp::OptLevel::bf16;
  } else if (name != "fp16") {
    options.opt_level = amp::parse_opt_level(name);
  }
  if (!config.train.loss_scale.empty())
    options.loss_scale = parse_loss_scale(config.train.loss_scale);
  options.rounding_seed = static_cast<std::uint64_t>(config.train.seed);
  amp::resolve(options);  // refuses what contradicts itself
  return options;
}

}  // namespace gradus::train
