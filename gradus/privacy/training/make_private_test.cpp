#include <gradus/privacy/training/make_private.h>

#include <cmath>
#include <sstream>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/batch_norm.h>
#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/sgd.h>
#include <gradus/privacy/training/internal/private_problem.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using namespace gradus::privacy::testing;  // NOLINT: a test's own problem
using ::testing::HasSubstr;
using tests::message_of;

constexpr std::int64_t kExamples = 60;

// A run over 60 rows with AdamW.
struct Private {
  explicit Private(PrivacyOptions options = {},
                   DataDescription data = {.examples = kExamples, .batch_size = 12, .steps = 8})
      : training(make_private(model.ptr(), adam, data, options)) {}

  std::optional<DPStep> step(std::int64_t micro_batch = 4) {
    return training.step(
        loss_of(model), [&](const auto& at) { return rows_at(rows, at); }, micro_batch);
  }
  std::vector<at::Tensor> parameters() const { return copies_of(model->parameters()); }

  torch::nn::Sequential model = small_model();
  persample::Batch rows = small_rows(kExamples);
  optim::AdamW adam{model->parameters(), {.lr = 0.05}};
  PrivateTraining training;
};

PrivacyOptions seeded(double noise = 1.0) { return {.noise_multiplier = noise, .seed = 5}; }

class MakePrivateTest : public ::testing::Test {
 protected:
  MakePrivateTest() { at::set_num_threads(1); }
};

// The trap: a rate of 1 / batches would be 0.5.
TEST_F(MakePrivateTest, TheSampleRateIsTheBatchOverTheExamples) {
  Private run(seeded(), {.examples = 100, .batch_size = 64, .epochs = 3.2});
  EXPECT_EQ(run.training.sampler().options().sample_rate, 0.64);
  EXPECT_EQ(run.training.sampler().options().steps, 5);
  EXPECT_EQ(run.training.optimizer().options().expected_batch_size, 64.0);
}

TEST_F(MakePrivateTest, RefusesADescriptionThatSaysTooLittleOrTooMuch) {
  const auto refusal = [](DataDescription data) {
    return message_of([&] { Private run(seeded(), data); });
  };
  EXPECT_THAT(refusal({.examples = 10, .steps = 1}), HasSubstr("batch_size or sample_rate must be "
                                                               "given; got neither"));
  EXPECT_THAT(refusal({.examples = 10, .batch_size = 2, .sample_rate = 0.2, .steps = 1}),
              HasSubstr("got both"));
  EXPECT_THAT(refusal({.examples = 10, .batch_size = 2}), HasSubstr("epochs or steps"));
  EXPECT_THAT(refusal({.examples = 10, .batch_size = 11, .steps = 1}), HasSubstr("[1, 10]"));
  EXPECT_THAT(refusal({.batch_size = 1, .steps = 1}), HasSubstr("examples must be >= 1; got 0"));
  EXPECT_THAT(refusal({.examples = 10, .batch_size = 2, .epochs = 1e300}),
              HasSubstr("must be < 2^53 steps; got 5e+300"));
}

TEST_F(MakePrivateTest, TrainsAllStepsAndSpendsTheFinalEpsilon) {
  PrivacyOptions options = seeded();
  options.accountant.kind = AccountantKind::kRdp;
  Private run(options);
  const double final_epsilon = run.training.final_epsilon(1e-5);
  double before = 0.0;
  std::int64_t steps = 0;
  while (const auto done = run.step()) {
    EXPECT_EQ(done->step, ++steps);
    EXPECT_EQ(
        run.training.epsilon(1e-5),
        epsilon_of(History({{.sample_rate = 0.2, .steps = steps}}), 1e-5, options.accountant));
    EXPECT_GT(run.training.epsilon(1e-5), before);
    before = run.training.epsilon(1e-5);
  }
  EXPECT_EQ(steps, 8);
  EXPECT_EQ(before, final_epsilon);
  // PLD unless another is asked for.
  const Private by_default(seeded());
  EXPECT_EQ(by_default.training.accountant().options().kind, AccountantKind::kPld);
  EXPECT_LT(by_default.training.final_epsilon(1e-5), final_epsilon);
  options.accountant.kind = AccountantKind::kGaussian;
  EXPECT_THAT(message_of([&] { Private run(options); }),
              HasSubstr("needs sample_rate 1 (full batches); got 0.2"));
}

TEST_F(MakePrivateTest, MicroBatchesOfAnySizeTrainAlike) {
  Private whole(seeded(0.7)), pieces(seeded(0.7));
  while (whole.step(100)) pieces.step(1);
  EXPECT_LT(difference(pieces.parameters(), whole.parameters()), 1e-9);
  EXPECT_EQ(pieces.training.accountant().history(), whole.training.accountant().history());
}

TEST_F(MakePrivateTest, AKilledAndResumedRunEqualsTheUninterruptedBitForBit) {
  for (const Sampling sampling : {Sampling::poisson, Sampling::uniform}) {
    PrivacyOptions options = seeded();
    options.sampling = sampling;
    options.clipping.policy = Clipping::adaptive;
    options.accountant.kind = AccountantKind::kRdp;
    options.spent = History({{.noise_multiplier = 3.0, .sample_rate = 0.1, .steps = 7}});
    Private straight(options), killed(options), resumed(options);
    while (straight.step()) {
    }
    for (int i = 0; i < 3; ++i) killed.step();
    // Through bytes, as a training state on disk.
    std::stringstream file;
    {
      torch::serialize::OutputArchive archive;
      for (const auto& [name, tensor] : killed.training.state()) archive.write(name, tensor);
      archive.save_to(file);
    }
    StateEntries entries;
    {
      torch::serialize::InputArchive archive;
      archive.load_from(file);
      for (const auto& [name, unused] : killed.training.state())
        archive.read(name, entries.emplace_back(name, at::Tensor()).second);
    }
    resumed.training.load_state(entries);
    {
      torch::NoGradGuard no_grad;
      for (std::size_t p = 0; p < resumed.model->parameters().size(); ++p)
        resumed.model->parameters()[p].copy_(killed.model->parameters()[p]);
    }
    EXPECT_EQ(resumed.training.epsilon(1e-5), killed.training.epsilon(1e-5));
    std::int64_t steps = 3;
    while (resumed.step()) ++steps;
    EXPECT_EQ(steps, 8);
    EXPECT_TRUE(identical(resumed.parameters(), straight.parameters()));
    EXPECT_EQ(resumed.training.accountant().history(), straight.training.accountant().history());
  }
}

TEST_F(MakePrivateTest, RefusesTheStateOfAnotherRunByNameAndChangesNothing) {
  Private run(seeded());
  run.step();
  const StateEntries mine = run.training.state();
  const auto refusal = [&](PrivacyOptions options, DataDescription data) {
    Private other(options, data);
    return message_of([&] { run.training.load_state(other.training.state()); });
  };
  const DataDescription data{.examples = kExamples, .batch_size = 12, .steps = 8};
  DataDescription rate = data, examples = data;
  rate.batch_size = 15;
  examples.examples = 80;
  examples.batch_size = 16;
  EXPECT_THAT(refusal(seeded(), rate), HasSubstr("the sample rate of the state"));
  EXPECT_THAT(refusal(seeded(), examples), HasSubstr("the number of examples of the state"));
  EXPECT_THAT(refusal(seeded(1.1), data), HasSubstr("the noise multiplier of the state"));
  const StateEntries after = run.training.state();
  ASSERT_EQ(after.size(), mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_EQ(after[i].first, mine[i].first);
    EXPECT_TRUE(torch::equal(after[i].second, mine[i].second)) << mine[i].first;
  }
}

TEST_F(MakePrivateTest, AnExceptionReleasesTheStepOfAnEmptyBatchAndTheNextStepIsRight) {
  Private run(seeded()), twin(seeded());
  int calls = 0;
  const auto broken = [&](const std::vector<std::int64_t>& at) {
    if (++calls == 2) throw std::runtime_error("the disk broke");
    return rows_at(run.rows, at);
  };
  EXPECT_THROW(run.training.step(loss_of(run.model), broken, 4), std::runtime_error);
  // Noise alone, counted, and nothing of the rows that were accumulated before it.
  twin.training.sampler().next();
  twin.training.optimizer().step_empty();
  EXPECT_TRUE(identical(run.parameters(), twin.parameters()));
  EXPECT_EQ(run.training.accountant().history().steps(), 1);
  EXPECT_EQ(run.training.optimizer().examples(), 0);
  run.step();
  twin.step();
  EXPECT_TRUE(identical(run.parameters(), twin.parameters()));
  const auto few = [&](const std::vector<std::int64_t>&) { return rows_at(run.rows, {0}); };
  EXPECT_THAT(message_of([&] { run.training.step(loss_of(run.model), few, 100); }),
              HasSubstr("fetch must give one row for each of"));
}

// P20.
TEST_F(MakePrivateTest, TheModelsStateIsThePlainModules) {
  Private run(seeded());
  run.step();
  std::stringstream file;
  torch::save(run.model, file);
  torch::nn::Sequential plain = small_model(3);
  torch::load(plain, file);
  EXPECT_EQ(run.model->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_EQ(run.model->named_modules().keys(), plain->named_modules().keys());
  EXPECT_TRUE(identical(run.parameters(), copies_of(plain->parameters())));
}

// P21.
TEST_F(MakePrivateTest, ValidatesTheModelFirst) {
  torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
  const DataDescription data{.examples = kExamples, .batch_size = 12, .steps = 8};
  {
    optim::SGD sgd(model->parameters(), {});
    EXPECT_THAT(message_of([&] { make_private(model.ptr(), sgd, data, seeded()); }),
                HasSubstr("1 (BatchNorm1d)"));
  }
  fix(*model);
  optim::SGD sgd(model->parameters(), {});
  auto training = make_private(model.ptr(), sgd, data, seeded());
  const persample::Batch rows{torch::randn({kExamples, 6})};
  const auto loss = [&](const persample::Batch& batch) {
    return model->forward(batch[0]).square().sum(1);
  };
  EXPECT_TRUE(
      training.step(loss, [&](const auto& at) { return persample::examples_at(rows, at); }, 4));
}

// P24.
TEST_F(MakePrivateTest, EpsilonIsNeverNegative) {
  for (const AccountantKind kind : {AccountantKind::kPld, AccountantKind::kPrv,
                                    AccountantKind::kRdp, AccountantKind::kGdpApproximation}) {
    PrivacyOptions options = seeded(20.0);
    options.accountant.kind = kind;
    Private run(options, {.examples = 100, .batch_size = 1, .steps = 10});
    EXPECT_EQ(run.training.epsilon(0.01), 0.0);
    EXPECT_GE(run.training.final_epsilon(0.01), 0.0);
    if (kind != AccountantKind::kPrv) {
      EXPECT_EQ(run.training.final_epsilon(0.01), 0.0);
    }
  }
}

// P25.
TEST_F(MakePrivateTest, ATargetEpsilonIsKeptAndNotWasted) {
  for (const Sampling sampling : {Sampling::poisson, Sampling::uniform}) {
    for (const AccountantKind kind : {AccountantKind::kPld, AccountantKind::kRdp}) {
      for (const double target : {0.5, 3.0}) {
        if (kind == AccountantKind::kPld && target < 1.0) continue;  // seconds
        Private run;                                                 // for its model and optimizer
        PrivacyOptions options;
        options.sampling = sampling;
        options.accountant.kind = kind;
        const auto training = make_private_with_epsilon(
            run.model.ptr(), run.adam, {.examples = 1000, .batch_size = 50, .epochs = 2}, target,
            1e-5, options);
        EXPECT_LE(training.final_epsilon(1e-5), target);
        EXPECT_GE(training.final_epsilon(1e-5), 0.995 * target);
      }
    }
  }
}

TEST_F(MakePrivateTest, ATargetCoversSchedulesTruncationAndWhatWasSpent) {
  Private run;
  PrivacyOptions options;
  options.accountant.kind = AccountantKind::kRdp;
  options.noise_schedule = optim::step_schedule(1.0, 10, 0.9);
  options.spent = History({{.noise_multiplier = 4.0, .sample_rate = 0.05, .steps = 20}});
  const DataDescription data{
      .examples = 1000, .batch_size = 50, .steps = 30, .max_batch_size = 110};
  const auto training =
      make_private_with_epsilon(run.model.ptr(), run.adam, data, 2.0, 1e-5, options);
  EXPECT_GT(training.epsilon(1e-5), 0.0);
  EXPECT_LE(training.final_epsilon(1e-5), 2.0);
  EXPECT_GE(training.final_epsilon(1e-5), 1.99);
  const auto plain = make_private_with_epsilon(run.model.ptr(), run.adam,
                                               {.examples = 1000, .batch_size = 50, .steps = 30},
                                               2.0, 1e-5, {.accountant = options.accountant});
  auto& with = const_cast<PrivateTraining&>(training).optimizer();
  auto& without = const_cast<PrivateTraining&>(plain).optimizer();
  EXPECT_GT(with.options().noise_multiplier, 1.1 * without.options().noise_multiplier);
  options.spent = History({{.noise_multiplier = 0.6, .sample_rate = 0.2, .steps = 50}});
  EXPECT_THAT(message_of([&] {
                make_private_with_epsilon(run.model.ptr(), run.adam, data, 2.0, 1e-5, options);
              }),
              HasSubstr("Raise the budget"));
}

TEST_F(MakePrivateTest, LearnsWhatPlainTrainingLearns) {
  Private run(seeded(0.0), {.examples = kExamples, .batch_size = 30, .steps = 60});
  const auto accuracy = [&] {
    return run.model->forward(run.rows[0])
        .argmax(1)
        .eq(run.rows[1])
        .to(torch::kDouble)
        .mean()
        .item<double>();
  };
  const double before = accuracy();
  while (run.step(30)) {
  }
  EXPECT_GT(accuracy(), before + 0.3);
}

}  // namespace
}  // namespace gradus::privacy
