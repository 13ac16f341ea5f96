#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/optim/adamw.h>
#include <gradus/plan/budget_compression.h>
#include <gradus/plan/simulate.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/report/metrics.h>
#include <gradus/state/content_hash.h>
#include <gradus/train/explain.h>
#include <gradus/train/generate.h>
#include <gradus/train/internal/run_testing.h>
#include <gradus/train/language_model.h>
#include <gradus/train/memory_attribution.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/precision.h>
#include <gradus/train/step_trial.h>
#include <gradus/train/trainer.h>
#include <gradus/train/training_state.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using base::MemoryCategory;

class TrainingTest : public internal::RunTest {
 protected:
  void SetUp() override {
    RunTest::SetUp();
    write_corpus(4000);
  }

  TrainConfig tiny(const std::string& out) const { return on_corpus(out); }
  static std::vector<double> losses(const std::vector<report::StepMetrics>& metrics) {
    std::vector<double> result;
    for (const auto& step : metrics) result.push_back(step.loss);
    return result;
  }
};

TEST_F(TrainingTest, LearnsAndWritesWhatItPromises) {
  TrainConfig config = tiny("run");
  config.train.steps = 60;
  config.optimizer.lr = 5e-3;
  config.sample.tokens = 5;
  config.sample.prompt = "in the";
  const TrainOutcome outcome = run(config);
  EXPECT_FALSE(outcome.interrupted);
  EXPECT_EQ(outcome.steps, 60);
  EXPECT_LT(outcome.last_loss, 0.75 * outcome.first_loss);
  EXPECT_TRUE(outcome.sample.starts_with("in the"));
  for (const char* file : {"config.toml", "tokenizer", "metrics.jsonl", "report.html"}) {
    EXPECT_TRUE(fs::exists(fs::path(config.train.out) / file)) << file;
  }
  EXPECT_TRUE(fs::exists(fs::path(outcome.state_path) / "model.safetensors"));
  const auto steps = metrics(config);
  ASSERT_EQ(steps.size(), 60u);
  EXPECT_TRUE(steps[3].validation_loss.has_value());
  EXPECT_EQ(steps[10].peak.total(), steps[10].peak_bytes);
  EXPECT_GT(steps[10].peak[MemoryCategory::activations], 0);
}

TEST_F(TrainingTest, StopsAtAnyMicroBatchAndResumesBitForBit) {
  TrainConfig config = tiny("whole");
  config.memory.plan = "micro-batch=3,recompute=2";
  run(config);
  const auto whole = losses(metrics(config));
  for (const int stop : {0, 1, 4, 11}) {
    SCOPED_TRACE(stop);
    TrainConfig part = config;
    part.train.out = (directory / ("part" + std::to_string(stop))).string();
    const TrainOutcome stopped = run(part, false, stop);
    EXPECT_TRUE(stopped.interrupted);
    EXPECT_LT(stopped.steps, 8);
    run(part, true);
    EXPECT_EQ(losses(metrics(part)), whole);
  }
}

TEST_F(TrainingTest, PeakStaysUnderTheLimitAndLossesEqualThePlainRuns) {
  TrainConfig plain = tiny("plain");
  plain.model.dropout = 0.0;
  plain.train.steps = 20;
  const TrainOutcome unlimited = run(plain);

  TrainConfig limited = plain;
  limited.train.out = (directory / "limited").string();
  const std::int64_t limit = unlimited.peak_bytes / 2;
  limited.memory.limit = std::to_string(limit);
  const TrainOutcome outcome = run(limited);
  EXPECT_LE(outcome.peak_bytes, limit);
  EXPECT_NEAR(static_cast<double>(outcome.plain_peak_bytes),
              static_cast<double>(unlimited.peak_bytes),
              0.03 * static_cast<double>(unlimited.peak_bytes));
  const auto a = losses(metrics(plain)), b = losses(metrics(limited));
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5) << "step " << i + 1;

  // What a plan moves away comes back with the same bytes.
  for (const std::string& target : {std::string("host"), directory.string()}) {
    TrainConfig offloading = limited;
    offloading.memory.offload = target;
    offloading.train.out = (directory / ("offload" + std::to_string(target.size()))).string();
    EXPECT_LE(run(offloading).peak_bytes, limit);
    const auto c = losses(metrics(offloading));
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], c[i], 1e-5) << "step " << i + 1;
  }

  limited.memory.plan = "none";
  limited.train.out = (directory / "none").string();
  EXPECT_THROW(run(limited), MemoryLimitError);
}

TEST_F(TrainingTest, WithDropoutRecomputationIsBitEqualAtTheSameMicroBatch) {
  TrainConfig plain = tiny("plain");
  plain.memory.plan = "micro-batch=3,recompute=0";
  run(plain);
  TrainConfig recomputed = plain;
  recomputed.train.out = (directory / "recomputed").string();
  recomputed.memory.plan = "micro-batch=3,recompute=3";
  recomputed.memory.limit = "100MiB";
  run(recomputed);
  EXPECT_EQ(losses(metrics(plain)), losses(metrics(recomputed)));
}

TEST_F(TrainingTest, AnAutomaticPlanWithDropoutIsBitEqualToPlainTrainingOfItsMicroBatch) {
  TrainConfig automatic = tiny("automatic");
  automatic.model.layers = 6;
  TrainConfig plain = automatic;
  plain.train.out = (directory / "plain").string();
  const TrainOutcome unlimited = run(plain);
  automatic.memory.limit = std::to_string(unlimited.peak_bytes * 2 / 5);
  const TrainOutcome outcome = run(automatic);
  EXPECT_TRUE(outcome.plan.budget || outcome.plan.micro_batches > 1);
  plain.train.out = (directory / "same").string();
  plain.memory.plan = "micro-batch=" + std::to_string(outcome.plan.largest(8)) + ",recompute=0";
  run(plain);
  EXPECT_EQ(losses(metrics(automatic)), losses(metrics(plain)));
}

TEST_F(TrainingTest, PlansCompressAndMeetTheirPredictedPeak) {
  TrainConfig config = tiny("run");
  config.model.layers = 6;
  config.model.width = 64;
  config.model.dropout = 0.2;
  const std::int64_t plain = [&] {
    const TrainOutcome outcome = run(config);
    return outcome.peak_bytes;
  }();
  const auto ids =
      torch::randint(256, {8, 32}, at::make_generator<at::CPUGeneratorImpl>(1), at::kLong);
  for (const char* form : {"lossless", "int8"}) {
    SCOPED_TRACE(form);
    torch::manual_seed(3);
    models::Gpt gpt = make_gpt(config, 256);
    const std::int64_t limit = plain * 6 / 10;
    compress::CompressOptions compression{.min_bytes = 1024};
    compression.lossy = parse_lossy(form);
    compression.allow_lossy = compression.lossy != compress::Lossy::none;
    amp::Amp amp = amp::initialize(*gpt, {.enabled = false});
    StepTrials trials(gpt, amp, {ids, ids}, make_optimizer(config, amp, *gpt, 0.0),
                      {.limit_bytes = limit, .compression = compression});
    const PlanChoice choice =
        choose_plan({.batch = 8,
                     .limit_bytes = limit,
                     .only = Plan{.micro_batches = 1, .budget = true},
                     .compress = true},
                    [&](const TrialRequest& request) { return trials.run(request); });
    EXPECT_TRUE(choice.passes.compress());
    EXPECT_GT(choice.candidates[choice.chosen].compressed.bytes, 0);
    EXPECT_LE(choice.trial_peak_bytes, limit);
    EXPECT_NEAR(static_cast<double>(choice.predicted_peak_bytes),
                static_cast<double>(choice.trial_peak_bytes),
                0.03 * static_cast<double>(choice.trial_peak_bytes));
    if (compression.allow_lossy) continue;
    const auto gradients = [&](bool planned) {
      std::optional<plan::BudgetCompression> encoding;
      std::optional<recompute::MemoryBudget> budget;
      if (planned) {
        encoding.emplace(compression);
        budget.emplace(recompute::MemoryBudgetOptions{.limit_bytes = limit,
                                                      .plan = choice.passes.find(8, false),
                                                      .encoder = encoding->encoder()});
      }
      torch::manual_seed(9);
      language_model_loss(*gpt, ids, ids, 0).backward();
      EXPECT_TRUE(!budget || budget->statistics().encoded > 0);
      std::vector<at::Tensor> result;
      for (const at::Tensor& p : gpt->parameters())
        result.push_back(std::exchange(p.mutable_grad(), at::Tensor()));
      return result;
    };
    const auto exact = gradients(false);
    const auto compressed = gradients(true);
    for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_TRUE(compressed[i].equal(exact[i])) << i;
  }
}

TEST_F(TrainingTest, LossyCompressionTrainsWhereItIsAllowed) {
  TrainConfig plain = tiny("plain");
  plain.model.layers = 6;
  plain.model.dropout = 0.0;
  const TrainOutcome unlimited = run(plain);
  TrainConfig config = plain;
  config.memory.limit = std::to_string(unlimited.peak_bytes / 2);
  config.memory.compress = "int8";
  config.train.out = (directory / "int8").string();
  const TrainOutcome outcome = run(config);
  EXPECT_LE(outcome.peak_bytes, unlimited.peak_bytes / 2);
  const auto a = losses(metrics(plain)), b = losses(metrics(config));
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 0.02) << "step " << i + 1;
  config.memory.plan = "none";
  config.train.out = (directory / "refused").string();
  EXPECT_THROW(run(config), UserError);
}

TEST_F(TrainingTest, ARunUnderABudgetStopsInAStepAndResumesBitForBit) {
  TrainConfig config = tiny("limited");
  TrainConfig plain = config;
  plain.train.out = (directory / "plain").string();
  const std::int64_t limit = run(plain).peak_bytes * 3 / 10;
  config.memory.limit = std::to_string(limit);
  std::ostringstream out;
  // Planning asks too; from the fourth step on, the third question stops the run.
  int asked = 0;
  const TrainOutcome stopped =
      train(config, false, {.out = out, .terminal = {}, .should_stop = [&] {
                              const fs::path file = fs::path(config.train.out) / "metrics.jsonl";
                              return fs::exists(file) && report::read_metrics(file).size() >= 3 &&
                                     ++asked >= 3;
                            }});
  EXPECT_TRUE(stopped.interrupted);
  ASSERT_TRUE(stopped.plan.budget || stopped.plan.micro_batches > 1);
  const TrainOutcome resumed = run(config, true);
  EXPECT_EQ(resumed.plan, stopped.plan);
  EXPECT_EQ(resumed.steps, 8);
  EXPECT_LE(resumed.peak_bytes, limit);
  plain.train.out = (directory / "same").string();
  plain.memory.plan = "micro-batch=" + std::to_string(resumed.plan.largest(8)) + ",recompute=0";
  run(plain);
  EXPECT_EQ(losses(metrics(config)), losses(metrics(plain)));
}

TEST_F(TrainingTest, RefusesALimitBelowTheLeastPossibleAndTheNumberItNamesIsEnough) {
  TrainConfig config = tiny("run");
  config.memory.limit = "700KiB";
  std::string message;
  try {
    run(config);
  } catch (const UserError& error) {
    message = error.what();
  }
  const std::size_t at = message.find("at least ");
  ASSERT_NE(at, std::string::npos) << message;
  config.memory.limit = std::to_string(std::atoll(message.substr(at + 9).c_str()));
  EXPECT_EQ(run(config).steps, 8);
  EXPECT_LE(metrics(config).back().peak_bytes, base::parse_bytes(config.memory.limit));
}

TEST_F(TrainingTest, AnExplanationHoldsThePlansTheirNumbersAndTheTimelineAndTrainsNothing) {
  TrainConfig config = tiny("run");
  const std::int64_t plain = run(config).peak_bytes;
  config.train.out = (directory / "none").string();
  config.memory.limit = std::to_string(plain * 2 / 5);
  std::ostringstream out;
  const PlanExplanation explained = explain_plan(config, {.out = out, .terminal = {}});
  EXPECT_FALSE(fs::exists(config.train.out));
  EXPECT_EQ(out.str(), "");
  const PlanChoice& choice = explained.choice;
  EXPECT_LE(choice.trial_peak_bytes, plain * 2 / 5);
  EXPECT_NEAR(static_cast<double>(choice.plain_peak_bytes), static_cast<double>(plain),
              0.03 * static_cast<double>(plain));
  EXPECT_NEAR(static_cast<double>(choice.predicted_peak_bytes),
              static_cast<double>(choice.trial_peak_bytes),
              0.03 * static_cast<double>(choice.trial_peak_bytes));
  EXPECT_THAT(explained.text, testing::HasSubstr(describe_plan(choice.plan, 8, 3)));
  EXPECT_THAT(explained.text, testing::HasSubstr(choice.reason));
  EXPECT_EQ(explained.page.planned_bytes.size(), explained.page.measured_bytes.size())
      << explained.text;
  std::int64_t worst = 0;
  for (std::size_t i = 0; i < explained.page.planned_bytes.size(); ++i)
    worst = std::max(worst,
                     std::abs(explained.page.planned_bytes[i] - explained.page.measured_bytes[i]));
  EXPECT_LE(worst, plain / 5) << "the timelines are of one pass, moment by moment";
  const auto json = nlohmann::json::parse(explained.json);
  EXPECT_EQ(json.at("candidates").size(), choice.candidates.size());
  EXPECT_EQ(json.at("timeline").at("planned").size(), explained.page.planned_bytes.size());
  config.memory.limit = "";
  EXPECT_THROW(explain_plan(config, {.out = out, .terminal = {}}), UserError);
}

TEST_F(TrainingTest, AStateOfBeforeBudgetsAndPrecisionsHasNone) {
  TrainConfig config = tiny("run");
  config.train.steps = 4;
  run(config);
  const fs::path file = fs::path(config.train.out) / "states" / "step-000000004" / "state.json";
  auto json = nlohmann::json::parse(std::ifstream(file));
  ASSERT_FALSE(json.at("run").at("budget").get<bool>());
  json.at("run").erase("budget");
  json.at("run").erase("optimizer");
  json.at("checksums").erase("precision.safetensors");
  ASSERT_TRUE(fs::remove(file.parent_path() / "precision.safetensors"));
  json.erase("self");
  json["self"] = state::hash_text(state::content_hash(json.dump()));
  std::ofstream(file) << json.dump(2) << '\n';
  const FoundState found = find_training_state(config.train.out);
  ASSERT_TRUE(found.newest.has_value());
  EXPECT_EQ(found.newest->run.step, 4);
  EXPECT_FALSE(found.newest->run.plan.budget);
  EXPECT_TRUE(load_precision(*found.newest).empty());
  EXPECT_FALSE(run(config, true).interrupted);
}

TEST_F(TrainingTest, EveryPrecisionLearnsAndResumesBitForBit) {
  for (const std::string& precision : precision_names()) {
    SCOPED_TRACE(precision);
    TrainConfig config = tiny("whole-" + precision);
    config.train.steps = 10;
    config.train.precision = precision;
    config.memory.plan = "micro-batch=3,recompute=1";
    config.optimizer.lr = 5e-3;
    // AdamW in float16 divides by 0: eps and squares of gradients are too small for it.
    if (precision == "O3") config.optimizer.kind = "sgd";
    run(config);
    const auto whole = metrics(config);
    EXPECT_LT(whole.back().loss, whole.front().loss);
    const auto last_state = [](const TrainConfig& of) {
      return load_precision(*find_training_state(of.train.out).newest);
    };
    const bool scaled = precision == "fp16" || precision == "O1" || precision == "O2";
    EXPECT_EQ(whole.back().loss_scale.has_value(), scaled);
    for (const int stop : {1, 2, 13}) {  // 2: behind the last micro-batch of the first step
      TrainConfig broken = config;
      broken.train.out = (directory / ("broken-" + precision + std::to_string(stop))).string();
      EXPECT_TRUE(run(broken, false, stop).interrupted);
      EXPECT_FALSE(run(broken, true).interrupted);
      EXPECT_EQ(losses(metrics(broken)), losses(whole)) << "stopped after " << stop;
      const auto expected = last_state(config), got = last_state(broken);
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].first, expected[i].first);
        EXPECT_TRUE(got[i].second.equal(expected[i].second)) << got[i].first;
      }
    }
    // Weights load anywhere: float32 under the model's own names.
    models::Gpt gpt = make_gpt(config, 256);
    load_model(*find_training_state(config.train.out).newest, named_tensors(*gpt));
  }
}

TEST_F(TrainingTest, AnOverflowUnderALossScaleIsSkippedAndReported) {
  TrainConfig config = tiny("run");
  config.train.precision = "fp16";
  config.train.loss_scale = "1e9";  // fixed: every gradient of float16 overflows
  run(config);
  const auto steps = metrics(config);
  for (const auto& step : steps) {
    EXPECT_TRUE(step.skipped);
    EXPECT_EQ(step.loss_scale, 1e9);
    EXPECT_TRUE(std::isfinite(step.loss));
  }
  const auto found = find_training_state(config.train.out);
  models::Gpt trained = make_gpt(config, 256);
  load_model(*found.newest, named_tensors(*trained));
  torch::manual_seed(static_cast<std::uint64_t>(config.train.seed));
  models::Gpt fresh = make_gpt(config, 256);
  const auto before = named_tensors(*fresh), after = named_tensors(*trained);
  for (std::size_t i = 0; i < before.size(); ++i)
    EXPECT_TRUE(before[i].second.equal(after[i].second)) << before[i].first;
}

TEST_F(TrainingTest, AnInterruptedStepThatOverflowedIsAbandonedWhole) {
  for (const char* precision : {"fp16", "O2"}) {
    SCOPED_TRACE(precision);
    TrainConfig config = tiny(std::string("run-") + precision);
    config.train.precision = precision;
    config.train.loss_scale = "1e9";
    EXPECT_TRUE(run(config, false, 3).interrupted);
    EXPECT_EQ(find_training_state(config.train.out).newest->run.step, 1);
    EXPECT_EQ(run(config, true).steps, 8);
  }
}

TEST_F(TrainingTest, EveryOptimizerLearns) {
  for (const std::string& kind : optimizer_kinds()) {
    SCOPED_TRACE(kind);
    TrainConfig config = tiny("run-" + kind);
    config.train.steps = 40;
    config.optimizer.kind = kind;
    config.optimizer.clip_value = 0.5;
    const bool plain = kind.starts_with("sgd");
    config.optimizer.lr = kind == "lars" ? 30.0 : plain ? 0.1 : 5e-3;
    run(config);
    const auto steps = metrics(config);
    EXPECT_LT(steps.back().loss, 0.97 * steps.front().loss);
  }
}

TEST_F(TrainingTest, AccumulateFixesTheMicroBatchesOfAnyPlan) {
  TrainConfig config = tiny("plain");
  config.train.accumulate = 4;
  EXPECT_EQ(run(config).plan.micro_batches, 4);
  TrainConfig limited = tiny("limited");
  limited.train.accumulate = 4;
  limited.memory.limit = "64MiB";
  EXPECT_EQ(run(limited).plan.micro_batches, 4);
  EXPECT_EQ(losses(metrics(limited)), losses(metrics(config)));
  limited.train.out = (directory / "small").string();
  // The whole batch at once, where there is hardly room for one sequence.
  limited.train.accumulate = 1;
  models::Gpt gpt = make_gpt(config, 256);
  std::int64_t values = 0;
  for (const auto& p : gpt->parameters()) values += p.numel();
  limited.memory.limit = std::to_string(17 * values);
  try {
    run(limited);
    ADD_FAILURE() << "must be refused";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("--accumulate 0"));
  }
}

TEST_F(TrainingTest, AnAutomaticPlanKeepsItsLimitAtLowerPrecision) {
  for (const char* precision : {"bf16", "fp16", "O2", "O3", "bf16-weights", "bf16-stochastic"}) {
    SCOPED_TRACE(precision);
    TrainConfig plain = tiny(std::string("plain-") + precision);
    plain.train.precision = precision;
    if (plain.train.precision == "O3") plain.optimizer.kind = "sgd";
    const TrainOutcome whole = run(plain);
    TrainConfig config = plain;
    config.train.out = (directory / (std::string("limited-") + precision)).string();
    const std::int64_t limit = whole.peak_bytes * 9 / 10;
    config.memory.limit = std::to_string(limit);
    const TrainOutcome outcome = run(config);
    EXPECT_LE(outcome.peak_bytes, limit);
    EXPECT_NE(outcome.plan, Plan{});
    EXPECT_GT(outcome.plain_peak_bytes, limit);
  }
}

TEST_F(TrainingTest, TheOptimizersStateIsInEightBitsOnlyWhereThatIsAllowed) {
  TrainConfig config = tiny("exact");
  config.model.width = 64;
  models::Gpt gpt = make_gpt(config, 256);
  std::int64_t values = 0;
  for (const auto& p : gpt->parameters()) values += p.numel();
  // Weights, gradients and AdamW's two moments, and nothing for activations.
  config.memory.limit = std::to_string(16 * values);
  EXPECT_THROW(run(config), UserError);
  config.train.out = (directory / "small").string();
  config.memory.optimizer_state = "8bit";
  const TrainOutcome outcome = run(config);
  EXPECT_LE(outcome.peak_bytes, 16 * values);
  const auto found = find_training_state(config.train.out);
  EXPECT_EQ(found.newest->run.optimizer, "adamw8bit");
  EXPECT_THAT(found.newest->run.plan_reason, testing::HasSubstr("in 8 bits"));
  config.train.steps = 12;
  EXPECT_EQ(run(config, true).steps, 12) << "resumed with the state that was saved";
}

TEST_F(TrainingTest, APlanOfOneSequenceIsExplainedByItsOwnCalls) {
  TrainConfig config = tiny("none");
  config.train.accumulate = 8;
  config.memory.limit = "64MiB";
  std::ostringstream out;
  const PlanExplanation explained = explain_plan(config, {.out = out, .terminal = {}});
  EXPECT_EQ(explained.choice.plan, (Plan{.micro_batches = 8}));
  EXPECT_GT(explained.page.planned_bytes.size(), 100u);
  EXPECT_EQ(explained.page.planned_bytes.size(), explained.page.measured_bytes.size());
}

TEST_F(TrainingTest, ANonFiniteLossStopsTheRunBeforeItSpoilsTheWeights) {
  TrainConfig config = tiny("run");
  config.optimizer.lr = 1e5;
  config.optimizer.clip_norm = 0.0;
  config.train.steps = 200;
  EXPECT_THROW(run(config), UserError);
  const FoundState found = find_training_state(config.train.out);
  ASSERT_TRUE(found.newest.has_value());
  EXPECT_EQ(found.newest->run.step, 0);  // saved at the start; nothing after it was
  config.optimizer.lr = 1e-3;
  config.train.steps = 8;
  EXPECT_EQ(run(config, true).steps, 8);
}

TEST_F(TrainingTest, KeepsTheNewestStatesAndPassesOverADamagedOne) {
  TrainConfig config = tiny("run");
  config.train.save_every = 2;
  run(config);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fs::path(config.train.out) / "states")) {
    names.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("step-000000006", "step-000000008"));
  {
    std::fstream file(
        fs::path(config.train.out) / "states" / "step-000000008" / "model.safetensors",
        std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-3, std::ios::end);
    file.put('\x7f');
  }
  const FoundState found = find_training_state(config.train.out);
  ASSERT_TRUE(found.newest.has_value());
  EXPECT_EQ(found.newest->run.step, 6);
  ASSERT_EQ(found.damaged.size(), 1u);
  EXPECT_THAT(found.damaged[0].reason, testing::HasSubstr("model.safetensors is damaged"));
}

TEST_F(TrainingTest, ARunDirectoryInUseIsRefusedWithoutResumeAndAnEmptyOneWithIt) {
  TrainConfig config = tiny("run");
  EXPECT_THROW(run(config, true), UserError);
  run(config);
  EXPECT_THROW(run(config), UserError);
}

TEST_F(TrainingTest, AttributionKnowsParametersGradientsAndActivations) {
  auto& tracker = base::MemoryTracker::install();
  models::Gpt gpt = make_gpt(tiny("x"), 256);
  const auto before = tracker.live();
  const MemoryAttribution attribution(*gpt);
  std::int64_t bytes = 0;
  for (const auto& p : gpt->parameters()) bytes += p.numel() * 4;
  EXPECT_EQ(tracker.live()[MemoryCategory::parameters] - before[MemoryCategory::parameters], bytes);
  const auto ids = torch::randint(256, {2, 32});
  auto loss = language_model_loss(*gpt, ids, ids, 0);
  const auto forward = tracker.live();
  EXPECT_GT(forward[MemoryCategory::activations], before[MemoryCategory::activations] + 100000);
  loss.backward();
  loss.reset();
  const auto after = tracker.live();
  EXPECT_EQ(after[MemoryCategory::activations], before[MemoryCategory::activations]);
  EXPECT_EQ(after[MemoryCategory::gradients] - before[MemoryCategory::gradients], bytes);
}

TEST_F(TrainingTest, RecomputedBlocksHoldFewerActivations) {
  auto& tracker = base::MemoryTracker::install();
  models::Gpt gpt = make_gpt(tiny("x"), 256);
  const MemoryAttribution attribution(*gpt);
  const auto ids = torch::randint(256, {4, 32});
  const auto held = [&](std::int64_t recomputed) {
    const auto before = tracker.live()[MemoryCategory::activations];
    const auto loss = language_model_loss(*gpt, ids, ids, recomputed);
    return tracker.live()[MemoryCategory::activations] - before;
  };
  EXPECT_LT(held(3), held(0) / 3);
  EXPECT_LT(held(2), held(1));
}

TEST_F(TrainingTest, TrialsLeaveWeightsGradientsAndRandomStateAsTheyWere) {
  TrainConfig config = tiny("x");
  models::Gpt gpt = make_gpt(config, 256);
  std::vector<at::Tensor> weights;
  for (const auto& p : gpt->parameters()) weights.push_back(p.detach().clone());
  torch::manual_seed(5);
  const auto expected = torch::rand({3});
  torch::manual_seed(5);
  {
    const auto ids =
        torch::randint(256, {2, 32}, at::make_generator<at::CPUGeneratorImpl>(1), at::kLong);
    amp::Amp amp = amp::initialize(*gpt, {.enabled = false});
    StepTrials trials(gpt, amp, {ids, ids}, make_optimizer(config, amp, *gpt, 0.0), {});
    const auto plain = trials.run({.size = 3, .accumulating = true});
    ASSERT_TRUE(plain.has_value());
    EXPECT_GT(plain->peak_bytes(), 0);
    const auto traced = trials.run({.size = 3, .accumulating = true, .budget = true});
    ASSERT_TRUE(traced.has_value());
    // A budget that drops nothing needs what a plain pass needs, and its trace says so.
    EXPECT_NEAR(static_cast<double>(traced->peak_bytes()), static_cast<double>(plain->peak_bytes()),
                0.01 * static_cast<double>(plain->peak_bytes()));
    for (const MeasuredPass* pass : {&traced->first, &*traced->later}) {
      EXPECT_NEAR(static_cast<double>(plan::simulate(pass->trace, {}, 0).peak_bytes),
                  static_cast<double>(pass->peak_bytes),
                  0.01 * static_cast<double>(pass->peak_bytes));
    }
    const std::int64_t little = base::MemoryTracker::install().live().total() + 1000;
    for (const bool budget : {false, true}) {
      EXPECT_FALSE(
          trials.run({.size = 3, .accumulating = true, .budget = budget, .limit_bytes = little})
              .has_value());
    }
  }
  EXPECT_TRUE(torch::rand({3}).equal(expected));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    EXPECT_TRUE(gpt->parameters()[i].equal(weights[i]));
    EXPECT_FALSE(gpt->parameters()[i].grad().defined());
  }
}

TEST_F(TrainingTest, GenerateIsDeterministicAndLeavesModeAndRandomStateAlone) {
  models::Gpt gpt = make_gpt(tiny("x"), 256);
  const data::ByteTokenizer tokenizer;
  torch::manual_seed(5);
  const auto expected = torch::rand({3});
  torch::manual_seed(5);
  const GenerateOptions options{.prompt = "light", .tokens = 50, .seed = 9};
  const std::string text = generate(*gpt, tokenizer, options);
  EXPECT_EQ(text, generate(*gpt, tokenizer, options));
  EXPECT_EQ(text.size(), 55u);
  EXPECT_TRUE(torch::rand({3}).equal(expected));
  EXPECT_TRUE(gpt->is_training());
  EXPECT_THROW(generate(*gpt, tokenizer, {.prompt = ""}), UserError);
}

}  // namespace
}  // namespace gradus::train
