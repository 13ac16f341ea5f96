#include <gradus/train/config.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::train {
namespace {

using testing::HasSubstr;
using tests::message_of;

class ConfigTest : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_.string();
  }
  void TearDown() override { std::filesystem::remove(path_); }

 private:
  std::filesystem::path path_ = std::filesystem::temp_directory_path() /
                                ("gradus_config_test_" + std::to_string(::getpid()) + ".toml");
};

const ConfigKey& key(const std::string& path) {
  for (const ConfigKey& key : config_keys()) {
    if (key.path() == path) return key;
  }
  throw std::runtime_error("no key " + path);
}

TEST_F(ConfigTest, ReadsWhatItWritesForEveryKey) {
  TrainConfig config;
  int n = 1;
  for (const ConfigKey& k : config_keys()) {
    ++n;
    switch (k.access.index()) {
      case 0:
        set_key(config, k, std::to_string(n));
        break;
      case 1:
        set_key(config, k, std::to_string(n) + ".25");
        break;
      case 2:
        set_key(config, k, "false");
        break;
      default:
        set_key(config, k, "text \"" + std::to_string(n) + "\" \\ \n é");
        break;
    }
  }
  const TrainConfig back = load_config(write(config_toml(config)));
  EXPECT_EQ(describe_config(back), describe_config(config));
}

TEST_F(ConfigTest, KeysAndFlagsAreUnique) {
  std::set<std::string> paths, flags;
  for (const ConfigKey& k : config_keys()) {
    EXPECT_TRUE(paths.insert(k.path()).second) << k.path();
    EXPECT_TRUE(flags.insert(k.flag).second) << k.flag;
    EXPECT_FALSE(k.help.empty());
  }
}

TEST_F(ConfigTest, AWholeNumberIsANumberButNotTheReverse) {
  EXPECT_EQ(load_config(write("[optimizer]\nlr = 1\n")).optimizer.lr, 1.0);
  EXPECT_THAT(message_of([&] { load_config(write("[train]\n\nsteps = 2.5\n")); }),
              HasSubstr(":3: train.steps must be a whole number; got 2.5"));
  EXPECT_THAT(message_of([&] { load_config(write("[model]\nbias = \"yes\"\n")); }),
              HasSubstr("model.bias must be true or false"));
}

TEST_F(ConfigTest, AnUnknownKeyIsRefusedWithTheNearestOne) {
  EXPECT_THAT(message_of([&] { load_config(write("[model]\nlayer = 2\n")); }),
              HasSubstr(":2: unknown key 'model.layer'; did you mean 'model.layers'?"));
  EXPECT_THAT(message_of([&] { load_config(write("steps = 2\n")); }),
              HasSubstr("unknown key 'steps'"));
}

TEST_F(ConfigTest, BadTomlAndAMissingFileAreOneClearError) {
  EXPECT_THAT(message_of([&] { load_config(write("[model\n")); }), HasSubstr(":1: "));
  EXPECT_THAT(message_of([&] { load_config("/nowhere/x.toml"); }),
              HasSubstr("'/nowhere/x.toml' is not one"));
}

TEST_F(ConfigTest, FlagsAreCheckedByType) {
  TrainConfig config;
  EXPECT_THAT(message_of([&] { set_key(config, key("train.steps"), "12x"); }),
              HasSubstr("--steps must be a whole number; got '12x'"));
  EXPECT_THAT(message_of([&] { set_key(config, key("optimizer.lr"), "fast"); }),
              HasSubstr("--lr must be a number"));
  EXPECT_THAT(message_of([&] { set_key(config, key("model.bias"), "1"); }),
              HasSubstr("true or false"));
}

TEST_F(ConfigTest, ValidateNamesTheKeyTheRequirementAndTheValue) {
  EXPECT_EQ(message_of([] { validate(TrainConfig{}); }), "no UserError");
  const std::vector<std::tuple<const char*, const char*, const char*>> cases{
      {"model.heads", "5", "width"},
      {"train.steps", "0", "train.steps must be at least 1; got 0"},
      {"train.batch", "-3", "train.batch must be at least 1; got -3"},
      {"model.dropout", "1.0", "dropout"},
      {"optimizer.kind", "adamx", "optimizer.kind must be adamw or adam or sgd"},
      {"optimizer.clip_value", "-1", "optimizer.clip_value must be between"},
      {"train.accumulate", "33", "train.accumulate must be between 0 and train.batch (32); got 33"},
      {"train.precision", "fp8", "train.precision must be fp32 or bf16 or fp16"},
      {"train.loss_scale", "dynamic", "train.loss_scale is for mixed precision"},
      {"memory.optimizer_state", "4bit", "memory.optimizer_state must be exact or 8bit"},
      {"optimizer.lr", "nan", "optimizer.lr must be between"},
      {"optimizer.warmup", "200", "optimizer.warmup must be below train.steps (200); got 200"},
      {"optimizer.beta1", "1", "optimizer.beta1 must be in [0, 1); got 1"},
      {"optimizer.eps", "-1", "optimizer.eps must be between"},
      {"optimizer.momentum", "-1", "optimizer.momentum must be between"},
      {"sample.temperature", "1e-300", "sample.temperature must be 0"},
      {"memory.limit", "many", "[bytes]"},
      {"memory.limit", "0", "memory.limit must be above 0"},
      {"memory.plan", "fast", "[plan]"},
      {"memory.offload", "", "memory.offload must be"},
      {"memory.compress", "", "memory.compress must be none, lossless, bf16"},
      {"memory.compress", "int3", "got 'int3'"},
      {"memory.plan", "micro-batch=0,recompute=1", "[plan]"},
      {"memory.plan", "micro-batch=1,recompute=7", "[plan]"},
      {"data.tokenizer", "words", "data.tokenizer must be sentencepiece or bytes"},
      {"data.validation_ratio", "0.9", "data.validation_ratio must be between 0 and 0.5"},
      {"sample.prompt", "", "sample.prompt must not be empty"},
  };
  TrainConfig both;
  both.train.accumulate = 2;
  both.memory.plan = "micro-batch=4,recompute=0";
  EXPECT_THAT(message_of([&] { validate(both); }), HasSubstr("must not both say"));
  TrainConfig without_form;
  without_form.memory.optimizer_state = "8bit";
  EXPECT_EQ(message_of([&] { validate(without_form); }), "no UserError");
  without_form.optimizer.kind = "lamb";
  EXPECT_THAT(message_of([&] { validate(without_form); }), HasSubstr("optimizer.kind lamb"));
  for (const auto& [path, value, expected] : cases) {
    SCOPED_TRACE(std::string(path) + " = " + value);
    TrainConfig config;
    set_key(config, key(path), value);
    EXPECT_THAT(message_of([&] { validate(config); }), HasSubstr(expected));
  }
}

}  // namespace
}  // namespace gradus::train
