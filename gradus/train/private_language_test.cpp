#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/accountant.h>
#include <gradus/report/metrics.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/explain.h>
#include <gradus/train/internal/run_testing.h>
#include <gradus/train/language_model.h>
#include <gradus/train/private_options.h>
#include <gradus/train/run_data.h>
#include <gradus/train/text_windows.h>
#include <gradus/train/trainer.h>
#include <gradus/train/training_state.h>

#include <tests/support/message_of.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using tests::message_of;

class PrivateLanguageTest : public internal::RunTest {
 protected:
  void SetUp() override {
    RunTest::SetUp();
    write_corpus(1500);
  }

  TrainConfig tiny(const std::string& out) const {
    TrainConfig config = on_corpus(out);
    config.model.layers = 2;
    config.model.width = 16;
    config.model.context = 16;
    config.train.batch = 16;
    config.privacy.enabled = true;
    config.privacy.epsilon = 5.0;
    config.privacy.delta = 1e-4;
    config.privacy.accountant = "rdp";  // the fastest: noise is searched in every run
    config.privacy.secure = false;
    config.privacy.micro_batch = 6;
    return config;
  }
  static TextWindows windows_of(const TrainConfig& config) {
    const RunData data = make_data(config);
    return {data.prepared.tokens, data.training_ranges, config.model.context};
  }
};

TEST_F(PrivateLanguageTest, NoTokenIsInTwoExamplesAndNoneOfValidationInAny) {
  constexpr std::int64_t kTokens = 1000, kContext = 7;
  std::vector<std::int64_t> ids(kTokens);
  for (std::int64_t i = 0; i < kTokens; ++i) ids[static_cast<std::size_t>(i)] = i;
  const std::string path = (directory / "tokens").string();
  data::TokenFile::write(path, ids, {.vocabulary_size = kTokens});
  const auto split = data::split_tokens(kTokens, {.validation_ratio = 0.1, .blocks = 3});
  const TextWindows windows(data::TokenFile::open(path), split.train, kContext);
  std::vector<std::int64_t> all(static_cast<std::size_t>(windows.size()));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const data::Batch batch = windows.rows(all);
  ASSERT_EQ(batch.inputs.sizes(), (at::IntArrayRef{windows.size(), kContext}));
  EXPECT_TRUE((batch.inputs + 1).equal(batch.targets));  // the token behind each
  std::vector<std::int64_t> first(kTokens, -1);
  std::int64_t used = 0, room = 0;
  for (std::int64_t window = 0; window < windows.size(); ++window) {
    for (const at::Tensor& part : {batch.inputs, batch.targets}) {
      for (std::int64_t t = 0; t < kContext; ++t) {
        const auto token = part[window][t].item<std::int64_t>();
        std::int64_t& owner = first[static_cast<std::size_t>(token)];
        used += owner < 0 ? 1 : 0;
        EXPECT_TRUE(owner < 0 || owner == window) << token;
        owner = window;
      }
    }
  }
  for (const auto& range : split.validation) {
    for (std::int64_t i = range.begin; i < range.end; ++i)
      EXPECT_EQ(first[static_cast<std::size_t>(i)], -1) << i;
  }
  for (const auto& range : split.train) room += (range.end - range.begin) / (kContext + 1);
  EXPECT_EQ(windows.size(), room);
  EXPECT_EQ(used, room * (kContext + 1));
  // In the order that is asked for.
  EXPECT_TRUE(windows.rows({2, 0}).inputs.equal(batch.inputs.index({torch::tensor({2, 0})})));
  EXPECT_THAT(message_of([&] {
                TextWindows(data::TokenFile::open(path), {{.begin = 0, .end = kContext}}, kContext);
              }),
              HasSubstr("a window of 8 tokens"));
}

TEST_F(PrivateLanguageTest, ReachesItsEpsilonAndNeverPassesIt) {
  const TrainConfig config = tiny("run");
  const TrainOutcome outcome = run(config);
  EXPECT_EQ(outcome.steps, 8);
  ASSERT_TRUE(outcome.epsilon);
  EXPECT_LE(*outcome.epsilon, 5.0);
  EXPECT_GE(*outcome.epsilon, 4.99);
  const auto windows = static_cast<double>(windows_of(config).size());
  for (const auto& step : metrics(config)) {
    const privacy::History history({{.noise_multiplier = outcome.noise_multiplier,
                                     .sample_rate = 16.0 / windows,
                                     .steps = step.step}});
    EXPECT_EQ(step.extra.at("epsilon"),
              privacy::epsilon_of(history, 1e-4, privacy_options(config).accountant));
    EXPECT_EQ(step.tokens % 16, 0);
    EXPECT_EQ(step.extra.at("max_norm"), 1.0);
    EXPECT_EQ(step.validation_loss.has_value(), step.step % 4 == 0);
  }
  EXPECT_EQ(metrics(config).back().extra.at("epsilon"), *outcome.epsilon);
  EXPECT_THAT(printed, HasSubstr("windows of 17 tokens to train on"));
  EXPECT_THAT(printed, HasSubstr("epsilon 5"));
  EXPECT_THAT(printed, HasSubstr("warning: privacy.secure is false"));
  const std::string html = state::read_file(outcome.report_path);
  for (const char* part : {"Epsilon spent", "Clipped examples", "Norms of one batch",
                           "each window of 17 tokens with probability"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
}

TEST_F(PrivateLanguageTest, WithoutClippingAndNoiseAStepIsThatOfTheMeanLossOfAllWindows) {
  TrainConfig config = tiny("run");
  config.model.dropout = 0.0;
  config.train.batch = windows_of(config).size();  // each window is in each batch
  config.train.steps = 1;
  config.optimizer = {.kind = "sgd",
                      .lr = 0.5,
                      .warmup = 0,
                      .min_lr_ratio = 1.0,
                      .weight_decay = 0.0,
                      .momentum = 0.0};
  config.privacy.epsilon = 0.0;
  config.privacy.noise_multiplier = 1e-12;
  config.privacy.max_grad_norm = 1e3;
  config.privacy.micro_batch = 100;
  const TrainOutcome outcome = run(config);
  EXPECT_EQ(metrics(config)[0].extra.at("clip_fraction"), 0.0);

  torch::manual_seed(3);
  models::Gpt gpt = make_gpt(config, 256);
  std::vector<std::int64_t> all(static_cast<std::size_t>(config.train.batch));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const data::Batch batch = windows_of(config).rows(all);
  const at::Tensor loss = language_model_loss(*gpt, batch.inputs, batch.targets, 0);
  EXPECT_NEAR(outcome.first_loss, loss.item<double>(), 1e-5);
  loss.backward();
  models::Gpt trained = make_gpt(config, 256);
  load_model(*find_training_state(config.train.out).newest, named_tensors(*trained));
  const auto before = gpt->named_parameters(), after = trained->named_parameters();
  for (const auto& parameter : before) {
    const at::Tensor step = 0.5 * parameter.value().grad();
    const at::Tensor got = parameter.value() - after[parameter.key()];
    EXPECT_LE((got - step).norm().item<double>(), 1e-5 * step.norm().item<double>() + 1e-6)
        << parameter.key();
  }
}

TEST_F(PrivateLanguageTest, AnInterruptedAndResumedRunEqualsTheUninterruptedOneBitForBit) {
  struct Case {
    const char* name;
    void (*change)(TrainConfig&);
    int stops[2];  // Asked before each step and after each micro-batch.
  };
  const Case cases[] = {
      {"flat", [](TrainConfig&) {}, {6, 5}},
      {"adaptive", [](TrainConfig& c) { c.privacy.clipping = "adaptive"; }, {9, 3}},
      {"recomputed",
       [](TrainConfig& c) {
         c.memory.plan = "micro-batch=5,recompute=2";
         c.optimizer.kind = "adafactor";
       },
       {7, 6}},
      {"bf16",
       [](TrainConfig& c) {
         c.train.precision = "bf16";
         c.train.accumulate = 3;
       },
       {8, 4}},
      {"bf16-weights", [](TrainConfig& c) { c.train.precision = "bf16-weights"; }, {5, 7}},
      {"bf16-stochastic", [](TrainConfig& c) { c.train.precision = "bf16-stochastic"; }, {6, 3}}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    TrainConfig whole = tiny(std::string("whole-") + each.name);
    each.change(whole);
    whole.train.steps = 5;
    const TrainOutcome expected = run(whole);
    EXPECT_THAT(printed, Not(HasSubstr("note: [persample]")));  // nothing falls back to the loop
    TrainConfig parts = whole;
    parts.train.out += "-parts";
    EXPECT_TRUE(run(parts, false, each.stops[0]).interrupted);
    EXPECT_TRUE(run(parts, true, each.stops[1]).interrupted);
    const TrainOutcome got = run(parts, true);
    EXPECT_EQ(got.steps, 5);
    EXPECT_EQ(numbers(parts), numbers(whole));
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "rng.safetensors"}) {
      EXPECT_TRUE(file_of(got, file) == file_of(expected, file)) << file;
    }
    EXPECT_EQ(private_difference(got, expected), "");
    EXPECT_EQ(got.epsilon, expected.epsilon);
  }
}

TEST_F(PrivateLanguageTest, ARunWithSecureNoiseResumesWithoutLosingBudget) {
  TrainConfig config = tiny("run");
  config.privacy.secure = true;
  EXPECT_TRUE(run(config, false, 9).interrupted);
  const double sigma = run(config, true, 5).noise_multiplier;
  const TrainOutcome done = run(config, true);
  EXPECT_EQ(done.steps, 8);
  EXPECT_EQ(done.noise_multiplier, sigma);
  EXPECT_LE(*done.epsilon, 5.0);
  EXPECT_GE(*done.epsilon, 4.99);  // All eight steps count, none twice.
  EXPECT_THAT(printed, Not(HasSubstr("warning: privacy.secure")));
}

TEST_F(PrivateLanguageTest, AResumedRunKeepsItsPrivacyItsTextAndItsSteps) {
  const TrainConfig config = tiny("run");
  EXPECT_TRUE(run(config, false, 9).interrupted);
  const auto refusal = [&](const auto& change) {
    TrainConfig changed = config;
    change(changed);
    return message_of([&] { run(changed, true); });
  };
  EXPECT_THAT(refusal([](TrainConfig& c) { c.privacy.epsilon = 8.0; }),
              HasSubstr("keeps the privacy it began with; it began with epsilon 5"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.train.steps = 20; }), HasSubstr("steps 20"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.data.validation_ratio = 0.2; }),
              HasSubstr("validation ratio 0.2"));
  EXPECT_THAT(refusal([](TrainConfig& c) {
                c.privacy.enabled = false;
                c.privacy.epsilon = 0.0;
              }),
              HasSubstr("got none"));
  EXPECT_EQ(run(config, true).steps, 8);

  TrainConfig plain = tiny("plain");
  plain.privacy = {};
  EXPECT_TRUE(run(plain, false, 3).interrupted);
  plain.privacy = config.privacy;
  EXPECT_THAT(message_of([&] { run(plain, true); }), HasSubstr("it began with none"));
}

TEST_F(PrivateLanguageTest, MicroBatchesRecomputationAndABudgetChangeNoResultButForRounding) {
  TrainConfig whole = tiny("whole");
  whole.model.dropout = 0.0;
  whole.privacy.micro_batch = 1000;
  const TrainOutcome unlimited = run(whole);
  const auto expected = metrics(whole);
  struct Case {
    const char* name;
    void (*change)(TrainConfig&);
  };
  const Case cases[] = {
      {"pieces", [](TrainConfig& c) { c.privacy.micro_batch = 5; }},
      {"accumulated", [](TrainConfig& c) { c.train.accumulate = 4; }},
      {"recomputed", [](TrainConfig& c) { c.memory.plan = "micro-batch=7,recompute=2"; }},
      {"limited", [](TrainConfig& c) { c.memory.limit = "1"; }}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    TrainConfig config = whole;
    config.train.out = (directory / each.name).string();
    each.change(config);
    const std::int64_t limit = unlimited.peak_bytes * 6 / 10;
    if (!config.memory.limit.empty()) config.memory.limit = std::to_string(limit);
    const TrainOutcome outcome = run(config);
    if (!config.memory.limit.empty()) {
      EXPECT_LE(outcome.peak_bytes, limit);
      EXPECT_GT(outcome.plain_peak_bytes, limit);
      EXPECT_NE(outcome.plan, Plan{});
    }
    const auto got = metrics(config);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].tokens, expected[i].tokens);
      EXPECT_NEAR(got[i].loss, expected[i].loss, 1e-4);
      EXPECT_EQ(got[i].extra.at("epsilon"), expected[i].extra.at("epsilon"));
      EXPECT_NEAR(got[i].extra.at("norm_median"), expected[i].extra.at("norm_median"), 1e-3);
    }
  }
}

TEST_F(PrivateLanguageTest, APlanIsOfPrivateSteps) {
  TrainConfig config = tiny("run");
  config.memory.limit = "64MiB";
  std::ostringstream out;
  const PlanExplanation as_private = explain_plan(config, {.out = out, .terminal = {}});
  config.privacy = {};
  const PlanExplanation as_plain = explain_plan(config, {.out = out, .terminal = {}});
  // What is kept until the norms are known, and the sum beside the gradient.
  EXPECT_GT(as_private.choice.plain_peak_bytes, as_plain.choice.plain_peak_bytes);
}

TEST_F(PrivateLanguageTest, EmptyBatchesAreStepsWithNoise) {
  TrainConfig config = tiny("run");
  config.train.batch = 1;
  config.train.steps = 30;
  config.train.eval_every = 0;
  EXPECT_EQ(run(config).steps, 30);
  const auto all = metrics(config);
  const auto empty = std::ranges::count_if(all, [](const auto& step) { return step.tokens == 0; });
  EXPECT_GT(empty, 2);
  EXPECT_LT(empty, 25);
  for (const auto& step : all) {
    EXPECT_TRUE(std::isfinite(step.loss));
    EXPECT_GT(step.grad_norm, 0.0);
  }
}

TEST_F(PrivateLanguageTest, TheExampleConfigurationTrains) {
  TrainConfig config = load_config(GRADUS_SOURCE_DIR "/examples/configs/private_language.toml");
  validate(config);
  const TrainConfig small = tiny("run");
  config.data.corpus = small.data.corpus;
  config.data.cache = small.data.cache;
  config.data.validation_ratio = 0.2;  // of a text of 7,000 bytes
  config.train.out = small.train.out;
  config.train.threads = 1;
  config.train.steps = 3;
  config.train.batch = 32;
  config.train.eval_every = 3;
  config.train.eval_sequences = 4;
  config.optimizer.warmup = 0;
  config.sample.tokens = 4;
  config.privacy.delta = 1e-3;
  config.privacy.accountant = "rdp";
  config.privacy.micro_batch = 16;
  const TrainOutcome outcome = run(config);
  EXPECT_EQ(outcome.steps, 3);
  EXPECT_LE(*outcome.epsilon, 3.0);
  EXPECT_TRUE(outcome.sample.starts_with(config.sample.prompt));

  // Sizes above the traced ones are planned too.
  config.model.layers = 1;
  config.model.width = 64;
  config.train.out += "-limited";
  config.train.steps = 2;
  config.memory.limit = "16MiB";
  const TrainOutcome limited = run(config);
  EXPECT_GT(limited.plan.largest(32), 3);
  EXPECT_LE(limited.peak_bytes, 16 << 20);
}

TEST_F(PrivateLanguageTest, WhatCannotBeCombinedIsRefusedByNameBeforeAnythingIsTrained) {
  struct Case {
    void (*change)(TrainConfig&);
    const char* part;
  };
  const Case cases[] = {
      {[](TrainConfig& c) { c.privacy.noise_multiplier = 1.0; }, "got both"},
      {[](TrainConfig& c) { c.train.precision = "fp16"; },
       "got fp16. A loss scale skips the steps whose gradients overflow, and whether a step was "
       "skipped follows from the data: it would be released without noise"},
      {[](TrainConfig& c) { c.train.precision = "O2"; }, "got O2. A loss scale"},
      {[](TrainConfig& c) { c.train.precision = "O3"; }, "got O3. In float16"},
      {[](TrainConfig& c) {
         c.train.precision = "bf16";
         c.train.loss_scale = "dynamic";
       },
       "train.loss_scale must be empty in private training; got 'dynamic'"},
      {[](TrainConfig& c) { c.memory.compress = "int8"; },
       "memory.compress must be lossless or none in private training; got 'int8'"},
      {[](TrainConfig& c) { c.train.batch = 5000; }, "must be at most the windows"},
      {[](TrainConfig& c) { c.data.limit = 5; }, "data.limit is for classifiers"},
      {[](TrainConfig& c) { c.model.context = 100000; }, "sequence_length + 1 = 100001 tokens"}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.part);
    TrainConfig config = tiny("refused");
    each.change(config);
    EXPECT_THAT(message_of([&] { run(config); }), HasSubstr(each.part));
    EXPECT_FALSE(fs::exists(fs::path(config.train.out) / "metrics.jsonl"));
  }
}

}  // namespace
}  // namespace gradus::train
