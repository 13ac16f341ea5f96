// What was released stays released, and counts once, whatever state is loaded.

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/sgd.h>
#include <gradus/privacy/training/internal/private_problem.h>
#include <gradus/privacy/training/make_private.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using namespace gradus::privacy::testing;  // NOLINT: a test's own problem
using ::testing::HasSubstr;
using tests::message_of;

// As a process of its own: nothing but a state goes from one to another.
struct Process {
  explicit Process(History spent = {}, double noise = 1.0, std::int64_t steps = 100)
      : training(make_private(model.ptr(), sgd, {.examples = 60, .batch_size = 6, .steps = steps},
                              {.noise_multiplier = noise,
                               .accountant = {.kind = AccountantKind::kRdp},
                               .spent = std::move(spent)})) {}

  void take(int steps) {
    for (int i = 0; i < steps; ++i)
      training.step(loss_of(model), [&](const auto& at) { return rows_at(rows, at); }, 64);
  }
  std::int64_t counted() const { return training.accountant().history().steps(); }

  torch::nn::Sequential model = small_model();
  persample::Batch rows = small_rows(60);
  optim::SGD sgd{model->parameters(), {.lr = 0.1}};
  PrivateTraining training;
};

GaussianSteps steps_of(std::int64_t steps, double noise = 1.0) {
  return {.noise_multiplier = noise, .sample_rate = 0.1, .steps = steps};
}

class ReleasesTest : public ::testing::Test {
 protected:
  ReleasesTest() { at::set_num_threads(1); }
};

TEST_F(ReleasesTest, ARunResumedFromItsOwnStateCountsAsOneWithoutABreak) {
  Process first;
  first.take(4);
  const StateEntries saved = first.training.state();
  Process second;
  second.training.load_state(saved);
  EXPECT_EQ(second.counted(), 4);
  second.training.load_state(saved);
  EXPECT_EQ(second.counted(), 4);
  second.take(3);
  const StateEntries later = second.training.state();
  Process third;
  third.training.load_state(later);
  third.take(2);
  EXPECT_EQ(third.training.accountant().history(), History({steps_of(9)}));
  Process whole;
  whole.take(9);
  EXPECT_EQ(third.training.epsilon(1e-5), whole.training.epsilon(1e-5));
  EXPECT_EQ(third.training.final_epsilon(1e-5), whole.training.final_epsilon(1e-5));
}

TEST_F(ReleasesTest, StepsAfterAnEarlierStateStayCountedWhereTheyAreKnown) {
  Process run;
  run.take(3);
  const StateEntries early = run.training.state();
  run.take(4);
  run.training.load_state(early);
  EXPECT_EQ(run.counted(), 7);
  EXPECT_EQ(run.training.optimizer().steps(), 3);
  run.take(2);
  EXPECT_EQ(run.counted(), 9);
  // A fresh process knows of what the state tells, and of nothing else.
  Process fresh;
  fresh.training.load_state(early);
  fresh.take(2);
  EXPECT_EQ(fresh.counted(), 5);
  // Where both lines meet again, 3 steps are common to them.
  fresh.training.load_state(run.training.state());
  EXPECT_EQ(fresh.counted(), 11);
}

TEST_F(ReleasesTest, TheStateOfAnotherRunAddsThoughAllItsSettingsAreEqual) {
  Process a, b;
  a.take(4);
  b.take(4);
  const StateEntries of_a = a.training.state();
  b.training.load_state(of_a);
  EXPECT_EQ(b.training.accountant().history(), History({steps_of(8)}));
  b.training.load_state(of_a);
  EXPECT_EQ(b.counted(), 8);
  // And it stays in what is saved then.
  Process c;
  c.training.load_state(b.training.state());
  EXPECT_EQ(c.counted(), 8);
}

TEST_F(ReleasesTest, SpentStaysWhateverIsLoaded) {
  Process a, b;
  a.take(4);
  b.take(4);
  Process c(b.training.accountant().history());
  c.training.load_state(a.training.state());
  EXPECT_EQ(c.training.accountant().history(), History({steps_of(8)}));
}

TEST_F(ReleasesTest, WhatWasGivenAsSpentToAnInterruptedRunCountsOnceWhenItIsResumed) {
  const History spent({steps_of(50, 2.0), steps_of(4)});
  Process first(spent);
  first.take(4);
  const StateEntries saved = first.training.state();
  for (const History& given : {spent, History()}) {
    Process resumed(given);
    resumed.training.load_state(saved);
    EXPECT_EQ(resumed.training.accountant().history(), History({steps_of(50, 2.0), steps_of(8)}));
  }
  Process other(History({steps_of(1)}));  // spent by others than the first knew
  other.training.load_state(saved);
  EXPECT_EQ(other.counted(), 59);
}

TEST_F(ReleasesTest, WhatIsAddedToASharedAccountantIsKept) {
  const torch::nn::Sequential model = small_model();
  optim::SGD sgd(model->parameters(), {.lr = 0.1});
  const DPOptimizerOptions options{.noise_multiplier = 1.0, .expected_batch_size = 6.0};
  const auto shared = std::make_shared<Accountant>();
  DPOptimizer one(sgd, model.ptr(), shared, options), two(sgd, model.ptr(), shared, options);
  one.step_empty();
  two.step_empty();
  shared->add({.noise_multiplier = 3.0, .sample_rate = 0.5, .steps = 7});
  const StateEntries of_one = one.state(), of_two = two.state();
  const auto again = std::make_shared<Accountant>();
  DPOptimizer third(sgd, model.ptr(), again, options), fourth(sgd, model.ptr(), again, options);
  third.load_state(of_one);
  fourth.load_state(of_two);
  EXPECT_EQ(again->history(), shared->history());
  EXPECT_EQ(again->history().steps(), 9);
}

TEST_F(ReleasesTest, ARefusedStateCountsNothing) {
  Process a, b;
  a.take(2);
  b.take(3);
  StateEntries broken = a.training.state();
  for (auto& [name, tensor] : broken)
    if (name == "private.releases.counts") tensor = tensor.neg();
  EXPECT_THROW(b.training.load_state(broken), UserError);
  Process other({}, 1.5);
  other.take(1);
  EXPECT_THROW(b.training.load_state(other.training.state()), UserError);
  EXPECT_EQ(b.counted(), 3);
}

TEST_F(ReleasesTest, AStateThatDoesNotTellWhoReleasedIsRefusedByName) {
  Process a;
  a.take(2);
  StateEntries old;
  for (const auto& [name, tensor] : a.training.state())
    if (!name.starts_with("private.releases.")) old.emplace_back(name, tensor);
  EXPECT_THAT(message_of([&] { Process().training.load_state(old); }),
              HasSubstr("'releases.runs'"));
  old.emplace_back("private.history.numbers", torch::tensor({{1.0, 0.1}}, torch::kDouble));
  old.emplace_back("private.history.counts", torch::tensor({{2, 0, 0}}, torch::kLong));
  EXPECT_THAT(message_of([&] { Process().training.load_state(old); }),
              HasSubstr("give that history as spent"));
}

TEST_F(ReleasesTest, RanksOfOneRunLoadEachOthersStatesAsTheirOwn) {
  // Both ranks' contributions are the empty ones, so that a sum is rank 0's tensors.
  std::vector<at::Tensor> of_rank0;
  const auto optimizer_of = [&](std::int64_t rank, const torch::nn::Sequential& model,
                                optim::SGD& sgd, const std::shared_ptr<Accountant>& accountant) {
    DPOptimizerOptions options{.noise_multiplier = 1.0, .expected_batch_size = 6.0};
    options.reduction = {
        .rank = rank, .ranks = 2, .sum = [&of_rank0, rank](const std::vector<at::Tensor>& tensors) {
          if (rank == 0) of_rank0 = copies_of(tensors);
          for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(of_rank0.at(i));
        }};
    return std::make_unique<DPOptimizer>(sgd, model.ptr(), accountant, options);
  };
  const torch::nn::Sequential model = small_model();
  optim::SGD sgd(model->parameters(), {.lr = 0.1});
  const auto a0 = std::make_shared<Accountant>(), a1 = std::make_shared<Accountant>();
  const auto zero = optimizer_of(0, model, sgd, a0), one = optimizer_of(1, model, sgd, a1);
  const auto step = [&] {
    zero->step_empty();
    one->step_empty();
  };
  step();
  step();
  const StateEntries of_zero = zero->state();  // as one rank alone saves
  step();
  for (const auto& rank : {zero.get(), one.get()}) rank->load_state(of_zero);
  step();
  EXPECT_EQ(a0->history().steps(), 4);
  EXPECT_EQ(a1->history(), a0->history());
}

}  // namespace
}  // namespace gradus::privacy
