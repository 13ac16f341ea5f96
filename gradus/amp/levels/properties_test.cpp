#include <gradus/amp/levels/properties.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

using testing::HasSubstr;

std::string refusal(const LevelOptions& options) {
  try {
    resolve(options);
  } catch (const UserError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(PropertiesTest, AreThoseOfApexAndOfTheTwoBfloat16Levels) {
  struct Row {
    OptLevel level;
    std::optional<c10::ScalarType> model;
    bool patch, keep, masters, stochastic;
    std::optional<double> scale;  // none: dynamic
    std::optional<c10::ScalarType> outputs;
  };
  const auto none = std::nullopt;
  const std::vector<Row> table{
      {OptLevel::O0, c10::kFloat, false, false, false, false, 1.0, c10::kFloat},
      {OptLevel::O1, none, true, false, false, false, none, none},
      {OptLevel::O2, c10::kHalf, false, true, true, false, none, c10::kFloat},
      {OptLevel::O3, c10::kHalf, false, false, false, false, 1.0, c10::kFloat},
      {OptLevel::bf16, c10::kBFloat16, false, true, true, false, 1.0, c10::kFloat},
      {OptLevel::bf16_stochastic, c10::kBFloat16, false, true, false, true, 1.0, c10::kFloat},
  };
  for (const auto& row : table) {
    SCOPED_TRACE(std::string(name(row.level)));
    const auto p = resolve({.opt_level = row.level});
    EXPECT_TRUE(p.enabled);
    EXPECT_EQ(p.opt_level, row.level);
    EXPECT_EQ(p.cast_model_type, row.model);
    EXPECT_EQ(p.patch_functions, row.patch);
    EXPECT_EQ(p.keep_batchnorm_fp32, row.keep);
    EXPECT_EQ(p.master_weights, row.masters);
    EXPECT_EQ(p.stochastic_rounding, row.stochastic);
    EXPECT_EQ(p.loss_scale.number, row.scale);
    EXPECT_EQ(p.cast_model_outputs, row.outputs);
    EXPECT_EQ(parse_opt_level(name(row.level)), row.level);
  }
  EXPECT_EQ(LevelOptions().opt_level, OptLevel::O1);
}

TEST(PropertiesTest, OverridesReplaceTheLevelsValuesAndAreReported) {
  const LevelOptions options{.opt_level = OptLevel::O3,
                             .keep_batchnorm_fp32 = true,
                             .loss_scale = 128.0,
                             .cast_model_outputs = c10::kHalf};
  const auto p = resolve(options);
  EXPECT_TRUE(p.keep_batchnorm_fp32);
  EXPECT_EQ(p.loss_scale.number, 128.0);
  EXPECT_EQ(p.cast_model_outputs, c10::kHalf);
  const auto text = describe(p, options);
  EXPECT_THAT(text, HasSubstr("opt_level O3"));
  EXPECT_THAT(text, HasSubstr("cast_model_type: Half\n"));
  EXPECT_THAT(text, HasSubstr("keep_batchnorm_fp32: true (overridden)"));
  EXPECT_THAT(text, HasSubstr("loss_scale: 128 (overridden)"));
  EXPECT_THAT(text, HasSubstr("master_weights: false\n"));
  EXPECT_TRUE(resolve({.opt_level = OptLevel::O0, .loss_scale = kDynamicLossScale})
                  .loss_scale.is_dynamic());
  EXPECT_EQ(resolve({.patch_functions_type = c10::kBFloat16}).patch_functions_type, c10::kBFloat16);
}

TEST(PropertiesTest, ContradictionsAreRefusedByName) {
  struct Row {
    LevelOptions options;
    const char* message;
  };
  const std::vector<Row> table{
      {{.cast_model_type = c10::kHalf}, "O1 inserts casts around functions rather than model"},
      {{.keep_batchnorm_fp32 = true}, "with O1, batch norm functions run in float32 by themselves"},
      {{.keep_batchnorm_fp32 = false}, "opt_level O1 must not set keep_batchnorm_fp32"},
      {{.master_weights = false}, "it makes no sense to use master weights with O1"},
      {{.patch_functions = false}, "patched functions are all that O1 is"},
      {{.opt_level = OptLevel::O2, .patch_functions = true},
       "patch_functions must only be set by selecting opt_level O1"},
      {{.opt_level = OptLevel::O2, .patch_functions_type = c10::kHalf}, "Set cast_model_type"},
      {{.opt_level = OptLevel::O0, .master_weights = true}, "master_weights must go with a model"},
      {{.opt_level = OptLevel::O2, .cast_model_type = c10::kFloat}, "master_weights must go with"},
      {{.opt_level = OptLevel::O2, .cast_model_type = c10::kDouble}, "got Double"},
      {{.opt_level = OptLevel::O2, .cast_model_outputs = c10::kLong}, "cast_model_outputs must be"},
      {{.opt_level = OptLevel::bf16_stochastic, .master_weights = true}, "got both"},
      {{.opt_level = OptLevel::bf16_stochastic, .cast_model_type = c10::kHalf},
       "stochastic_rounding must go with cast_model_type bfloat16; got Half"},
      {{.stochastic_rounding = true}, "got an uncast model"},
      {{.loss_scale = 0.0}, "loss_scale must be finite and > 0"},
      {{.loss_scale = std::numeric_limits<double>::infinity()}, "loss_scale must be finite"},
      {{.num_losses = 0}, "num_losses must be at least 1"},
      {{.min_loss_scale = 8.0, .max_loss_scale = 4.0}, "max_loss_scale must be finite and >= min"},
      {{.min_loss_scale = -1.0}, "min_loss_scale must be finite and > 0"},
      {{.patch_functions_type = c10::kFloat}, "patch_functions_type must be float16 or bfloat16"},
  };
  for (const auto& row : table) EXPECT_THAT(refusal(row.options), HasSubstr(row.message));
  EXPECT_EQ(refusal({.cast_model_type = c10::kFloat}), "accepted");
  EXPECT_THROW(parse_opt_level("02"), UserError);
}

}  // namespace
}  // namespace gradus::amp
