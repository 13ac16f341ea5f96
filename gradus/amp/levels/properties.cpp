#include <gradus/amp/levels/properties.h>

#include <array>
#include <cmath>
#include <sstream>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

constexpr const char* kComponent = "amp_levels";

constexpr std::array kLevels{OptLevel::O0, OptLevel::O1,   OptLevel::O2,
                             OptLevel::O3, OptLevel::bf16, OptLevel::bf16_stochastic};

Properties of_level(OptLevel level) {
  Properties p;
  p.opt_level = level;
  switch (level) {
    case OptLevel::O0:
      p.cast_model_type = c10::kFloat;
      break;
    case OptLevel::O1:
      p.patch_functions = true;
      p.loss_scale = kDynamicLossScale;
      break;
    case OptLevel::O2:
      p.cast_model_type = c10::kHalf;
      p.keep_batchnorm_fp32 = true;
      p.master_weights = true;
      p.loss_scale = kDynamicLossScale;
      break;
    case OptLevel::O3:
      p.cast_model_type = c10::kHalf;
      break;
    case OptLevel::bf16:
      p.cast_model_type = c10::kBFloat16;
      p.keep_batchnorm_fp32 = true;
      p.master_weights = true;
      break;
    case OptLevel::bf16_stochastic:
      p.cast_model_type = c10::kBFloat16;
      p.keep_batchnorm_fp32 = true;
      p.stochastic_rounding = true;
      break;
  }
  return p;
}

const char* yes_or_no(bool value) { return value ? "true" : "false"; }

std::string scale_name(const LossScaling& scale) {
  return scale.is_dynamic() ? "dynamic" : base::join(*scale.number);
}

void check_is_weight_type(const char* what, c10::ScalarType dtype) {
  GRADUS_CHECK(kComponent, dtype == c10::kFloat || dtype == c10::kHalf || dtype == c10::kBFloat16,
               what, " must be float32, float16 or bfloat16; got ", dtype);
}

// The refusals of Apex's Properties.__setattr__, with its reasons.
void check_overrides_of_o1(const LevelOptions& o) {
  GRADUS_CHECK(kComponent, !o.cast_model_type || *o.cast_model_type == c10::kFloat,
               "opt_level O1 must not change cast_model_type: O1 inserts casts around functions "
               "rather than model weights, so the weights themselves stay float32; got ",
               *o.cast_model_type, ". To cast the model use O2, O3 or bf16");
  GRADUS_CHECK(
      kComponent, !o.keep_batchnorm_fp32,
      "opt_level O1 must not set keep_batchnorm_fp32: with O1, batch norm functions run in "
      "float32 by themselves; got ",
      yes_or_no(*o.keep_batchnorm_fp32), ". Leave it unset");
  GRADUS_CHECK(kComponent, !o.master_weights,
               "opt_level O1 must not set master_weights: it makes no sense to use master weights "
               "with O1, whose model weights are float32 themselves; got ",
               yes_or_no(*o.master_weights), ". Leave it unset, or use O2");
  GRADUS_CHECK(kComponent, o.patch_functions.value_or(true),
               "opt_level O1 must not set patch_functions to false: patched functions are all that "
               "O1 is. Use O0");
}

void check_overrides_of_others(const LevelOptions& o) {
  const auto level = name(o.opt_level);
  GRADUS_CHECK(kComponent, !o.patch_functions.value_or(false),
               "patch_functions must only be set by selecting opt_level O1; got true with ", level,
               ", which casts the model instead");
  GRADUS_CHECK(kComponent, !o.patch_functions_type,
               "patch_functions_type must only be set with opt_level O1; got ",
               *o.patch_functions_type, " with ", level, ". Set cast_model_type instead");
}

void check_scales(const LevelOptions& o) {
  if (o.loss_scale && o.loss_scale->number) {
    const double scale = *o.loss_scale->number;
    GRADUS_CHECK(kComponent, std::isfinite(scale) && scale > 0.0,
                 "loss_scale must be finite and > 0, or dynamic; got ", scale);
  }
  const double low = o.min_loss_scale.value_or(o.max_loss_scale);
  GRADUS_CHECK(kComponent, std::isfinite(low) && low > 0.0,
               "min_loss_scale must be finite and > 0; got ", low);
  GRADUS_CHECK(kComponent, std::isfinite(o.max_loss_scale) && o.max_loss_scale >= low,
               "max_loss_scale must be finite and >= min_loss_scale; got ", o.max_loss_scale,
               " and ", low);
  GRADUS_CHECK(kComponent, o.num_losses >= 1, "num_losses must be at least 1; got ", o.num_losses);
}

void check_together(const Properties& p) {
  const auto level = name(p.opt_level);
  GRADUS_CHECK(kComponent, !p.master_weights || p.casts_to_half(),
               "master_weights must go with a model in 16 bits: the weights of ", level,
               " are float32 and need no copies; got master_weights true");
  GRADUS_CHECK(kComponent, !p.stochastic_rounding || !p.master_weights,
               "stochastic_rounding must replace master_weights: with master weights nothing is "
               "rounded but copies; got both");
  GRADUS_CHECK(kComponent, !p.stochastic_rounding || p.cast_model_type == c10::kBFloat16,
               "stochastic_rounding must go with cast_model_type bfloat16; got ",
               p.cast_model_type ? base::join(*p.cast_model_type) : "an uncast model",
               ". Use opt_level bf16-stochastic");
}

}  // namespace

std::string_view name(OptLevel level) {
  switch (level) {
    case OptLevel::O0:
      return "O0";
    case OptLevel::O1:
      return "O1";
    case OptLevel::O2:
      return "O2";
    case OptLevel::O3:
      return "O3";
    case OptLevel::bf16:
      return "bf16";
    case OptLevel::bf16_stochastic:
      return "bf16-stochastic";
  }
  return "";
}

OptLevel parse_opt_level(std::string_view text) {
  for (const OptLevel level : kLevels) {
    if (name(level) == text) return level;
  }
  GRADUS_CHECK(kComponent, false,
               "opt_level must be O0, O1, O2, O3, bf16 or bf16-stochastic (the letter O, not the "
               "number zero); got '",
               text, "'");
}

Properties resolve(const LevelOptions& o) {
  GRADUS_CHECK(kComponent, !name(o.opt_level).empty(), "opt_level must be a level; got number ",
               static_cast<int>(o.opt_level));
  if (o.opt_level == OptLevel::O1) {
    check_overrides_of_o1(o);
  } else {
    check_overrides_of_others(o);
  }
  check_scales(o);
  Properties p = of_level(o.opt_level);
  p.enabled = o.enabled;
  if (o.cast_model_type) {
    check_is_weight_type("cast_model_type", *o.cast_model_type);
    p.cast_model_type = o.cast_model_type;
  }
  if (o.patch_functions_type) {
    GRADUS_CHECK(kComponent,
                 *o.patch_functions_type == c10::kHalf || *o.patch_functions_type == c10::kBFloat16,
                 "patch_functions_type must be float16 or bfloat16; got ", *o.patch_functions_type);
    p.patch_functions_type = *o.patch_functions_type;
  }
  if (o.cast_model_outputs) check_is_weight_type("cast_model_outputs", *o.cast_model_outputs);
  p.keep_batchnorm_fp32 = o.keep_batchnorm_fp32.value_or(p.keep_batchnorm_fp32);
  p.master_weights = o.master_weights.value_or(p.master_weights);
  p.stochastic_rounding = o.stochastic_rounding.value_or(p.stochastic_rounding);
  p.loss_scale = o.loss_scale.value_or(p.loss_scale);
  p.cast_model_outputs = o.cast_model_outputs;
  if (!p.cast_model_outputs && p.cast_model_type) p.cast_model_outputs = c10::kFloat;
  check_together(p);
  return p;
}

std::string describe(const Properties& p, const LevelOptions& o) {
  std::ostringstream out;
  const auto line = [&](const char* property, const auto& value, bool overridden) {
    out << "  " << property << ": " << value << (overridden ? " (overridden)" : "") << '\n';
  };
  if (!p.enabled) return "mixed precision: not enabled\n";
  out << "mixed precision: opt_level " << name(p.opt_level) << '\n';
  line("cast_model_type", p.cast_model_type ? base::join(*p.cast_model_type) : "none",
       o.cast_model_type.has_value());
  line("patch_functions",
       p.patch_functions ? base::join("true, ", p.patch_functions_type) : "false",
       o.patch_functions || o.patch_functions_type);
  line("keep_batchnorm_fp32", yes_or_no(p.keep_batchnorm_fp32), o.keep_batchnorm_fp32.has_value());
  line("master_weights", yes_or_no(p.master_weights), o.master_weights.has_value());
  line("stochastic_rounding", yes_or_no(p.stochastic_rounding), o.stochastic_rounding.has_value());
  line("loss_scale", scale_name(p.loss_scale), o.loss_scale.has_value());
  line("cast_model_outputs", p.cast_model_outputs ? base::join(*p.cast_model_outputs) : "none",
       o.cast_model_outputs.has_value());
  return out.str();
}

}  // namespace gradus::amp
