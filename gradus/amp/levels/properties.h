#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace gradus::amp {

/// How a model is trained in lower precision. O0 to O3 are those of NVIDIA Apex; the other two need
/// a device that computes in bfloat16 and no loss scaling.
enum class OptLevel : std::uint8_t {
  O0,    ///< float32, loss scale 1: the reference.
  O1,    ///< Weights stay float32; operators are cast by lists (autocast). Dynamic loss scale.
  O2,    ///< float16 model, float32 BatchNorm, float32 master weights. Dynamic loss scale.
  O3,    ///< float16 everything, loss scale 1: the speed that the others are measured by.
  bf16,  ///< bfloat16 model, float32 BatchNorm, float32 master weights, loss scale 1.
  /// bfloat16 model, float32 BatchNorm, no master weights: updates are rounded at random, so that
  /// their mean is right. Loss scale 1.
  bf16_stochastic,
};

/// "O0" ... "O3", "bf16", "bf16-stochastic".
std::string_view name(OptLevel level);
/// The level of that name. @throws UserError on any other.
OptLevel parse_opt_level(std::string_view name);

/// A number, or dynamic.
struct LossScaling {
  LossScaling() = default;                        ///< Dynamic.
  LossScaling(double number) : number(number) {}  // NOLINT: `.loss_scale = 128.0`
  std::optional<double> number = std::nullopt;    ///< Unset: dynamic.
  bool is_dynamic() const { return !number.has_value(); }
  bool operator==(const LossScaling&) const = default;
};

/// Apex's `"dynamic"`.
inline const LossScaling kDynamicLossScale{};

/// What initialize() is asked for. A property that is unset has the level's value.
struct LevelOptions {
  bool enabled = true;  ///< False: every call here does what a program without amp does.
  OptLevel opt_level = OptLevel::O1;
  /// Dtype of the model's weights and buffers: kFloat, kHalf or kBFloat16.
  std::optional<c10::ScalarType> cast_model_type = std::nullopt;
  std::optional<bool> patch_functions = std::nullopt;  ///< Autocast; O1 only.
  /// The lower precision of patch_functions: kHalf (the default) or kBFloat16.
  std::optional<c10::ScalarType> patch_functions_type = std::nullopt;
  /// Parameters and statistics of BatchNorm layers with affine parameters stay float32.
  std::optional<bool> keep_batchnorm_fp32 = std::nullopt;
  std::optional<bool> master_weights = std::nullopt;  ///< The optimizer steps on float32 copies.
  /// Without master weights: bfloat16 updates are rounded at random.
  std::optional<bool> stochastic_rounding = std::nullopt;
  std::optional<LossScaling> loss_scale = std::nullopt;
  /// Dtype of a model's floating outputs. Unset: float32 where the model is cast, else as they are.
  std::optional<c10::ScalarType> cast_model_outputs = std::nullopt;
  std::size_t num_losses = 1;  ///< Each has a scale of its own. >= 1.
  /// Bounds of a dynamic scale. > 0, min <= max. Unset: GradScaler's own floor.
  std::optional<double> min_loss_scale = std::nullopt;
  double max_loss_scale = 16777216.0;  // 2^24
  /// The models are only evaluated: no master weights are made, nothing can be stepped.
  bool inference = false;
  std::uint64_t rounding_seed = 0;  ///< Of stochastic rounding.
  /// Gets what was chosen, and a line at each skipped step. Unset: silent.
  std::function<void(const std::string&)> report = nullptr;
};

/// What holds: the level's properties with the overrides of LevelOptions.
struct Properties {
  bool enabled = true;
  OptLevel opt_level = OptLevel::O1;
  std::optional<c10::ScalarType> cast_model_type = std::nullopt;
  bool patch_functions = false;
  c10::ScalarType patch_functions_type = c10::ScalarType::Half;
  bool keep_batchnorm_fp32 = false;
  bool master_weights = false;
  bool stochastic_rounding = false;
  LossScaling loss_scale = LossScaling(1.0);
  std::optional<c10::ScalarType> cast_model_outputs = std::nullopt;

  /// True where the model is cast to 16 bits.
  bool casts_to_half() const {
    return cast_model_type.has_value() && *cast_model_type != c10::ScalarType::Float;
  }
};

/// The properties that @p options ask for.
/// @throws UserError that names both sides of a contradiction, with Apex's reason where it has one.
Properties resolve(const LevelOptions& options);

/// One line a property: what the level says and what was overridden.
std::string describe(const Properties& properties, const LevelOptions& options);

}  // namespace gradus::amp
