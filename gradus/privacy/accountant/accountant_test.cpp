#include <gradus/privacy/accountant/accountant.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/gaussian.h>

namespace gradus::privacy {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const std::vector<AccountantKind> kSampledKinds = {AccountantKind::kPld, AccountantKind::kPrv,
                                                   AccountantKind::kRdp,
                                                   AccountantKind::kGdpApproximation};

TEST(AccountantTest, EpsilonIsNeverNegative) {
  const History history({{.noise_multiplier = 20.0, .sample_rate = 0.01, .steps = 10}});
  for (const AccountantKind kind : kSampledKinds) {
    EXPECT_EQ(epsilon_of(history, 0.01, {.kind = kind}), 0.0) << name(kind);
    EXPECT_EQ(epsilon_of(History(), 1e-5, {.kind = kind}), 0.0) << name(kind);
    EXPECT_EQ(delta_of(History(), 1.0, {.kind = kind}), 0.0) << name(kind);
  }
}

TEST(AccountantTest, NoNoiseIsAnInfiniteEpsilonUnlessNothingWasSampled) {
  const History bare({{.noise_multiplier = 0.0, .sample_rate = 0.01},
                      {.noise_multiplier = 5.0, .sample_rate = 0.01}});
  const History unsampled({{.noise_multiplier = 0.0, .sample_rate = 0.0, .steps = 9}});
  for (const AccountantKind kind : kSampledKinds) {
    EXPECT_EQ(epsilon_of(bare, 1e-5, {.kind = kind}), kInfinity) << name(kind);
    EXPECT_EQ(delta_of(bare, 3.0, {.kind = kind}), 1.0) << name(kind);
    EXPECT_EQ(epsilon_of(unsampled, 1e-5, {.kind = kind}), 0.0) << name(kind);
  }
}

TEST(AccountantTest, OnlyGdpIsNoBoundAndItsNameSaysSo) {
  EXPECT_NE(AccountantOptions{}.kind, AccountantKind::kGdpApproximation);
  std::set<std::string> names;
  for (const AccountantKind kind : kSampledKinds) {
    EXPECT_EQ(is_upper_bound(kind), kind != AccountantKind::kGdpApproximation);
    names.insert(name(kind));
  }
  names.insert(name(AccountantKind::kGaussian));
  EXPECT_THAT(names, ::testing::ElementsAre("gaussian", "gdp-approximation", "pld", "prv", "rdp"));
  // Here it falls below the true value, which PRV bounds from below.
  const History history({{.noise_multiplier = 0.7, .sample_rate = 0.01, .steps = 120}});
  EXPECT_LT(epsilon_of(history, 1e-5, {.kind = AccountantKind::kGdpApproximation}),
            prv_epsilon(history, 1e-5).lower);
}

TEST(AccountantTest, DeltaOfItsEpsilonIsWithinDelta) {
  const History history({{.noise_multiplier = 1.1, .sample_rate = 0.02, .steps = 300}});
  for (const AccountantKind kind : kSampledKinds) {
    const double epsilon = epsilon_of(history, 1e-5, {.kind = kind});
    EXPECT_LE(delta_of(history, epsilon, {.kind = kind}), 1e-5 * (1.0 + 1e-5)) << name(kind);
  }
}

// Neither rounding nor another grid for the way back may bring delta above what was asked for.
TEST(AccountantTest, DeltaOfItsEpsilonIsWithinDeltaAtRandomAndExtremeArguments) {
  struct Row {
    double q = 0.0, sigma = 0.0;
    std::int64_t steps = 0;
    double delta = 0.0;
  };
  std::vector<Row> rows = {{1.81688e-6, 0.366682, 5, 3.00993e-13},
                           {1e-6, 0.4, 1, 1e-12},
                           {9.01258e-7, 1.729, 1, 1.5e-45},
                           {1e-3, 1.0, 10, 1e-290},
                           {1e-3, 1.0, 10, 1e-250},
                           {0.3, 2.0, 3, 0.9}};
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < 12; ++i)
    rows.push_back({std::pow(10.0, -6.0 * uniform(random)), 0.6 * std::pow(20.0, uniform(random)),
                    static_cast<std::int64_t>(std::pow(10.0, 4.0 * uniform(random))),
                    std::pow(10.0, -0.1 - (i % 4 == 0 ? 200.0 : 12.0) * uniform(random))});
  for (const Row& row : rows) {
    for (const AccountantKind kind :
         {AccountantKind::kPld, AccountantKind::kRdp, AccountantKind::kGdpApproximation}) {
      SCOPED_TRACE(::testing::Message() << name(kind) << " q " << row.q << " sigma " << row.sigma
                                        << " steps " << row.steps << " delta " << row.delta);
      const AccountantOptions options{.kind = kind, .pld = {.max_interval = 1e-3}};
      const History history(
          {{.noise_multiplier = row.sigma, .sample_rate = row.q, .steps = row.steps}});
      EXPECT_LE(delta_of(history, epsilon_of(history, row.delta, options), options), row.delta);
    }
  }
  const History history({{.noise_multiplier = 0.9, .sample_rate = 0.05, .steps = 40}});
  for (const double delta : {1e-3, 1e-9}) {
    const AccountantOptions prv{.kind = AccountantKind::kPrv};
    EXPECT_LE(delta_of(history, epsilon_of(history, delta, prv), prv), delta);
  }
}

TEST(AccountantTest, WhoIsHardlyEverDrawnNeedsNoNoise) {
  // The chance to be in a batch at all, 2e-7, bounds what can be learned.
  const History rare({{.noise_multiplier = 0.1, .sample_rate = 1e-7, .steps = 2}});
  for (const AccountantKind kind :
       {AccountantKind::kPld, AccountantKind::kPrv, AccountantKind::kRdp}) {
    EXPECT_EQ(epsilon_of(rare, 3e-7, {.kind = kind}), 0.0) << name(kind);
    EXPECT_GT(epsilon_of(rare, 1e-7, {.kind = kind}), 1.0) << name(kind);
    if (kind == AccountantKind::kPrv) continue;  // its delta is the smaller of this and another
    EXPECT_LE(delta_of(rare, 0.5, {.kind = kind}), 2e-7) << name(kind);
  }
}

TEST(AccountantTest, FullBatchesAreExactUnderPld) {
  const History history({{.noise_multiplier = 10.0, .sample_rate = 1.0, .steps = 100}});
  for (const AccountantKind kind : {AccountantKind::kPld, AccountantKind::kGaussian}) {
    EXPECT_NEAR(epsilon_of(history, 1e-5, {.kind = kind}), 4.3771781, 5e-8);
    EXPECT_NEAR(delta_of(history, 4.3771781, {.kind = kind}), 1e-5, 1e-11);
  }
}

TEST(AccountantTest, AResumedRunSpendsWhatAnUnbrokenOneDoes) {
  for (const AccountantKind kind : kSampledKinds) {
    Accountant whole({.kind = kind});
    Accountant first({.kind = kind});
    for (int step = 0; step < 40; ++step) {
      const GaussianSteps steps{.noise_multiplier = step < 25 ? 1.0 : 1.3, .sample_rate = 0.02};
      whole.add(steps);
      if (step < 30) first.add(steps);
    }
    const std::vector<GaussianSteps> saved = first.history().entries();
    Accountant resumed({.kind = kind}, History(saved));
    for (int step = 30; step < 40; ++step)
      resumed.add({.noise_multiplier = 1.3, .sample_rate = 0.02});
    EXPECT_EQ(resumed.history(), whole.history());
    EXPECT_EQ(resumed.epsilon(1e-5), whole.epsilon(1e-5)) << name(kind);
    EXPECT_EQ(whole.history().entries().size(), 2u);
  }
}

TEST(AccountantTest, StepsThatCannotReleaseAnythingAreFree) {
  Accountant accountant({.kind = AccountantKind::kPld},
                        History({{.noise_multiplier = 1.0, .sample_rate = 0.01, .steps = 50}}));
  const double before = accountant.epsilon(1e-5);
  accountant.add({.noise_multiplier = 1.0, .sample_rate = 0.0, .steps = 1000});
  EXPECT_EQ(accountant.epsilon(1e-5), before);
}

TEST(AccountantTest, LimitedBatchesCostWhatTheirTruncationMayCost) {
  GaussianSteps steps{.noise_multiplier = 1.1, .sample_rate = 256.0 / 60000.0, .steps = 2340};
  for (const AccountantKind kind : kSampledKinds) {
    const AccountantOptions options{.kind = kind};
    const double free = epsilon_of(History({steps}), 1e-5, options);
    GaussianSteps limited = steps;
    limited.dataset_size = 60000;
    double previous = free;
    for (const std::int64_t limit : {500, 380, 370}) {
      limited.max_batch_size = limit;
      const double epsilon = epsilon_of(History({limited}), 1e-5, options);
      EXPECT_GE(epsilon, previous * (1.0 - 1e-8)) << name(kind) << " " << limit;
      EXPECT_LE(epsilon, free * 1.3) << name(kind) << " " << limit;
      EXPECT_LE(delta_of(History({limited}), epsilon, options), 1e-5 * (1.0 + 1e-4))
          << name(kind) << " " << limit;
      previous = epsilon;
    }
    limited.max_batch_size = 300;  // cut all the time
    EXPECT_EQ(epsilon_of(History({limited}), 1e-5, options), kInfinity) << name(kind);
    EXPECT_GT(delta_of(History({limited}), 1.0, options), 1e-5) << name(kind);
  }
}

TEST(AccountantTest, ThreadsMayAskAtOnce) {
  const Accountant accountant(
      {.kind = AccountantKind::kPld},
      History({{.noise_multiplier = 1.5, .sample_rate = 0.05, .steps = 100}}));
  const double expected = accountant.epsilon(1e-6);
  std::vector<double> found(4, 0.0);
  std::vector<std::thread> threads;
  for (double& epsilon : found)
    threads.emplace_back([&accountant, &epsilon] { epsilon = accountant.epsilon(1e-6); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(found, ::testing::Each(expected));
}

TEST(AccountantTest, RefusesWhatIsOutsideItsRanges) {
  const History history({{.noise_multiplier = 1.0, .sample_rate = 0.5}});
  for (const AccountantKind kind : kSampledKinds)
    for (const double delta : {0.0, 1.0, -1.0, std::nan("")})
      EXPECT_THAT([&] { epsilon_of(history, delta, {.kind = kind}); },
                  ThrowsMessage<UserError>(
                      HasSubstr("[privacy_accountant] delta must be in (0, 1); got ")));
  EXPECT_THROW(delta_of(history, -0.5), UserError);
  EXPECT_THROW(epsilon_of(history, 1e-5, {.kind = AccountantKind::kGaussian}), UserError);
  EXPECT_THROW(Accountant({.kind = AccountantKind::kRdp, .rdp_orders = {2.0, 1.0}}), UserError);
}

}  // namespace
}  // namespace gradus::privacy
