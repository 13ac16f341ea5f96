#include <gradus/privacy/accountant/noise_search.h>

#include <cmath>
#include <ctime>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::privacy {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(NoiseSearchTest, GivesThePublishedMultipliers) {
  const PrivacyBudget budget{.epsilon = 8.0, .delta = 1e-5};
  const GaussianSteps steps{.sample_rate = 0.04, .steps = 2000};
  EXPECT_NEAR(find_noise_multiplier(budget, steps, {.accountant = {.kind = AccountantKind::kRdp}})
                  .noise_multiplier,
              1.3562, 5e-5);
  // Opacus stops within 0.01 of the target, which is 0.001 in the multiplier.
  const double prv =
      find_noise_multiplier(budget, steps, {.accountant = {.kind = AccountantKind::kPrv}})
          .noise_multiplier;
  EXPECT_NEAR(prv, 1.2915, 1e-3);
  const double published =
      epsilon_of(History({{.noise_multiplier = 1.2915, .sample_rate = 0.04, .steps = 2000}}), 1e-5,
                 {.kind = AccountantKind::kPrv});
  EXPECT_LE(published, 8.0);
  EXPECT_GE(published, 7.99);
}

TEST(NoiseSearchTest, NeverOvershootsAndIsCloseOnRandomBudgets) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < 120; ++i) {
    const PrivacyBudget budget{.epsilon = 0.05 * std::pow(400.0, uniform(random)),
                               .delta = std::pow(10.0, -3.0 - 6.0 * uniform(random))};
    const GaussianSteps steps{
        .sample_rate = std::pow(10.0, -4.0 * uniform(random)),
        .steps = 1 + static_cast<std::int64_t>(std::pow(10.0, 4.0 * uniform(random)))};
    // The slower kinds on a few.
    const AccountantKind kind =
        i % 30 == 0 ? AccountantKind::kPld
                    : (i % 2 == 0 ? AccountantKind::kGdpApproximation : AccountantKind::kRdp);
    SCOPED_TRACE(::testing::Message()
                 << name(kind) << " epsilon " << budget.epsilon << " delta " << budget.delta
                 << " q " << steps.sample_rate << " steps " << steps.steps);
    const AccountantOptions accountant{.kind = kind, .pld = {.max_interval = 1e-3}};
    const NoiseFound found = find_noise_multiplier(budget, steps, {.accountant = accountant});
    GaussianSteps used = steps;
    used.noise_multiplier = found.noise_multiplier;
    EXPECT_EQ(epsilon_of(History({used}), budget.delta, accountant), found.epsilon);
    EXPECT_LE(found.epsilon, budget.epsilon);
    used.noise_multiplier *= 1.0 - 3e-4;
    EXPECT_GT(epsilon_of(History({used}), budget.delta, accountant), budget.epsilon);
  }
}

TEST(NoiseSearchTest, CountsWhatWasSpentAndRefusesWhatCannotBeKept) {
  const PrivacyBudget budget{.epsilon = 3.0, .delta = 1e-5};
  const GaussianSteps steps{.sample_rate = 0.01, .steps = 500};
  const AccountantOptions rdp{.kind = AccountantKind::kRdp};
  const double alone = find_noise_multiplier(budget, steps, {.accountant = rdp}).noise_multiplier;
  History spent({{.noise_multiplier = 1.0, .sample_rate = 0.01, .steps = 500}});
  const NoiseFound after =
      find_noise_multiplier(budget, steps, {.accountant = rdp, .spent = spent});
  EXPECT_GT(after.noise_multiplier, alone);
  History both = spent;
  both.add({.noise_multiplier = after.noise_multiplier, .sample_rate = 0.01, .steps = 500});
  EXPECT_LE(epsilon_of(both, 1e-5, rdp), 3.0);

  spent.add({.noise_multiplier = 0.5, .sample_rate = 0.01, .steps = 500});
  EXPECT_THAT([&] { find_noise_multiplier(budget, steps, {.accountant = rdp, .spent = spent}); },
              ThrowsMessage<UserError>(
                  HasSubstr("the steps already taken must keep epsilon <= 3 at delta 1e-05")));
  EXPECT_THAT(
      [&] {
        find_noise_multiplier({.epsilon = 1e-3, .delta = 1e-9}, {.sample_rate = 1.0, .steps = 1000},
                              {.accountant = rdp, .max_noise_multiplier = 10.0});
      },
      ThrowsMessage<UserError>(HasSubstr("noise must be able to keep epsilon <= 0.001")));
  // A limit on batches that costs more than delta, whatever the noise.
  const GaussianSteps cut{
      .sample_rate = 0.5, .steps = 10, .dataset_size = 100, .max_batch_size = 50};
  for (const AccountantKind kind : {AccountantKind::kRdp, AccountantKind::kPld})
    EXPECT_THROW(find_noise_multiplier(budget, cut, {.accountant = {.kind = kind}}), UserError);
}

TEST(NoiseSearchTest, ScalesSchedules) {
  const PrivacyBudget budget{.epsilon = 2.0, .delta = 1e-5};
  const auto schedule = [](double scale) {
    History history;
    for (int epoch = 0; epoch < 5; ++epoch)
      history.add({.noise_multiplier = scale * (1.0 + 0.1 * epoch),
                   .sample_rate = 0.01 * (1 + epoch),
                   .steps = 50});
    return history;
  };
  const AccountantOptions rdp{.kind = AccountantKind::kRdp};
  const NoiseFound found = find_noise_multiplier(budget, schedule, {.accountant = rdp});
  EXPECT_EQ(epsilon_of(schedule(found.noise_multiplier), 1e-5, rdp), found.epsilon);
  EXPECT_LE(found.epsilon, 2.0);
  EXPECT_GE(found.epsilon, 1.99);
}

TEST(NoiseSearchTest, FindsTheLastStepThatKeepsTheBudget) {
  const PrivacyBudget budget{.epsilon = 3.0, .delta = 1e-5};
  const GaussianSteps step{.noise_multiplier = 1.1, .sample_rate = 0.01};
  for (const AccountantKind kind : {AccountantKind::kRdp, AccountantKind::kGdpApproximation}) {
    const AccountantOptions options{.kind = kind};
    const std::int64_t steps = find_steps(budget, step, {.accountant = options});
    EXPECT_GT(steps, 1000);
    GaussianSteps all = step;
    all.steps = steps;
    EXPECT_LE(epsilon_of(History({all}), 1e-5, options), 3.0);
    const History spent({all});
    EXPECT_EQ(find_steps(budget, step, {.accountant = options, .spent = spent}), 0);
  }
  EXPECT_EQ(find_steps(budget, {.noise_multiplier = 0.0, .sample_rate = 0.01}), 0);
  EXPECT_EQ(find_steps(budget, {.noise_multiplier = 1.0, .sample_rate = 0.0}),
            std::int64_t{1} << 40);
}

// Each of these took from eight seconds to minutes.
TEST(NoiseSearchTest, IsQuickAndKeepsTheBudgetAtTheEndsOfItsArguments) {
  struct Row {
    double epsilon = 0.0, delta = 0.0, q = 0.0;
    std::int64_t steps = 0, examples = 0, limit = 0;
    double expected = 0.0;
  };
  for (const Row& row : {Row{3.0, 1e-5, 1e-5, 2, 0, 0, 0.17989},   // hardly ever drawn
                         Row{3.0, 1e-5, 1e-7, 2, 0, 0, 1e-3},      // any noise will do
                         Row{3.0, 1e-5, 1e-12, 1000, 0, 0, 1e-3},  //
                         Row{3.0, 1e-5, 0.5, 5, 20, 20, 4.927},    // a step in epsilon
                         Row{0.9, 1e-5, 0.5, 5, 20, 20, 5.4795},   //
                         Row{0.114249, 7.96e-9, 2.92e-5, 175, 0, 0, 0.62157}}) {
    SCOPED_TRACE(::testing::Message() << "q " << row.q << " steps " << row.steps << " limit "
                                      << row.limit << " epsilon " << row.epsilon);
    GaussianSteps steps{.sample_rate = row.q,
                        .steps = row.steps,
                        .dataset_size = row.examples,
                        .max_batch_size = row.limit};
    const std::clock_t start = std::clock();
    const NoiseFound found =
        find_noise_multiplier({.epsilon = row.epsilon, .delta = row.delta}, steps);
    // Generous, for slow machines; it is about half a second at most.
    EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 6.0);
    EXPECT_LE(found.epsilon, row.epsilon);
    EXPECT_NEAR(found.noise_multiplier / row.expected, 1.0, 2e-3);
    steps.noise_multiplier = found.noise_multiplier;
    EXPECT_EQ(epsilon_of(History({steps}), row.delta), found.epsilon);
    if (row.expected == 1e-3) continue;
    steps.noise_multiplier *= 1.0 - 2e-4;
    EXPECT_GT(epsilon_of(History({steps}), row.delta), row.epsilon);
  }
}

TEST(NoiseSearchTest, FindsTheLastStepByPrivacyLossesToo) {
  const PrivacyBudget budget{.epsilon = 1.0, .delta = 1e-5};
  GaussianSteps step{.noise_multiplier = 1.0, .sample_rate = 0.02};
  const std::int64_t steps = find_steps(budget, step);
  step.steps = steps;
  EXPECT_LE(epsilon_of(History({step}), 1e-5), 1.0);
  ++step.steps;
  EXPECT_GT(epsilon_of(History({step}), 1e-5), 1.0);
}

TEST(NoiseSearchTest, RefusesValuesOutsideTheirRanges) {
  const GaussianSteps steps{.sample_rate = 0.01};
  EXPECT_THROW(find_noise_multiplier({.epsilon = 0.0, .delta = 1e-5}, steps), UserError);
  EXPECT_THROW(find_noise_multiplier({.epsilon = 1.0, .delta = 0.0}, steps), UserError);
  EXPECT_THROW(
      find_noise_multiplier({.epsilon = 1.0, .delta = 1e-5}, steps, {.relative_tolerance = 0.0}),
      UserError);
  EXPECT_THROW(
      find_noise_multiplier({.epsilon = 1.0, .delta = 1e-5}, steps, {.max_noise_multiplier = 0.0}),
      UserError);
}

}  // namespace
}  // namespace gradus::privacy
