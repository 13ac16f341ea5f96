#include <gradus/privacy/accountant/ledger.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/accountant.h>

namespace gradus::privacy {
namespace {

GaussianSteps steps_of(std::int64_t steps, double noise = 1.0) {
  return {.noise_multiplier = noise, .sample_rate = 0.1, .steps = steps};
}

TEST(LedgerTest, ResumedFromItsOwnRecordsCountsEachReleaseOnce) {
  Ledger first;
  first.add(steps_of(30));
  const std::vector<Releases> saved = first.records();
  Ledger second;
  second.merge(saved);
  second.merge(saved);
  EXPECT_EQ(second.total(), History({steps_of(30)}));
  second.add(steps_of(10));
  const std::vector<Releases> later = second.records();
  Ledger third;
  third.merge(saved);
  third.merge(later);
  third.merge(saved);
  EXPECT_EQ(third.total(), History({steps_of(40)}));
  // Going back to an earlier state in one process forgets nothing either.
  second.merge(saved);
  second.add(steps_of(5));
  EXPECT_EQ(second.total(), History({steps_of(45)}));
}

TEST(LedgerTest, RunsOfOthersAddUpThoughTheirStepsAreAlike) {
  Ledger a, b;
  a.add(steps_of(40));
  b.add(steps_of(40));
  b.merge(a.records());
  EXPECT_EQ(b.total(), History({steps_of(80)}));
  // Two that went on from one state.
  Ledger c, d;
  c.merge(a.records());
  d.merge(a.records());
  c.add(steps_of(3));
  d.add(steps_of(4));
  c.merge(d.records());
  d.merge(c.records());
  EXPECT_EQ(c.total(), History({steps_of(47)}));
  EXPECT_EQ(d.total(), c.total());
}

TEST(LedgerTest, WhatWasGivenStaysAndIsOneWhereItIsEqual) {
  Ledger run{History({steps_of(40)})};
  Ledger other;
  other.add(steps_of(40));
  run.merge(other.records());
  EXPECT_EQ(run.total(), History({steps_of(80)}));

  Ledger first{History({steps_of(7, 2.0)})};
  first.add(steps_of(30));
  Ledger resumed{History({steps_of(7, 2.0)})};
  resumed.merge(first.records());
  EXPECT_EQ(resumed.total(), History({steps_of(7, 2.0), steps_of(30)}));
  Ledger bare;  // what was given is in the records
  bare.merge(first.records());
  EXPECT_EQ(bare.total(), resumed.total());
  Ledger more{History({steps_of(8, 2.0)})};  // other releases than those given to the first
  more.merge(first.records());
  EXPECT_EQ(more.total(), History({steps_of(15, 2.0), steps_of(30)}));
}

TEST(LedgerTest, CopiesCountUnderAnIdOfTheirOwn) {
  Ledger original;
  original.add(steps_of(10));
  Ledger copy = original;
  Ledger assigned;
  assigned = original;
  original.add(steps_of(1));
  copy.add(steps_of(2));
  assigned.add(steps_of(4));
  original.merge(copy.records());
  original.merge(assigned.records());
  EXPECT_EQ(original.total(), History({steps_of(17)}));
  const RunId before = copy.run();
  const Ledger moved = std::move(copy);
  EXPECT_EQ(moved.run(), before);
  EXPECT_NE(moved.run(), original.run());
}

TEST(LedgerTest, AForkedProcessCountsUnderAnIdOfItsOwn) {
  Ledger ledger;
  ledger.add(steps_of(10));
  const RunId parent = ledger.run();
  int ends[2] = {};
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ledger.add(steps_of(1));
    const RunId id = ledger.run();
    const bool sent = ::write(ends[1], &id, sizeof(id)) == sizeof(id);
    ::_exit(sent && ledger.total() == History({steps_of(11)}) ? 0 : 1);
  }
  ASSERT_GT(child, 0);
  RunId of_child;
  EXPECT_EQ(::read(ends[0], &of_child, sizeof(of_child)), ssize_t{sizeof(of_child)});
  int status = 1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_TRUE(of_child.known());
  EXPECT_NE(of_child, parent);
}

TEST(LedgerTest, IdsAreRandomAndDrawnOnTheFirstCount) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (int i = 0; i < 200; ++i) {
    Ledger ledger;
    EXPECT_FALSE(ledger.run().known());
    ledger.add(steps_of(1));
    seen.emplace(ledger.run().high, ledger.run().low);
  }
  EXPECT_EQ(seen.size(), 200U);
}

TEST(LedgerTest, RanksThatReleaseTogetherAreOneRun) {
  Ledger zero, one;
  zero.add(steps_of(1));
  one.add(steps_of(1));
  one.rename_run(zero.run());
  for (Ledger* ledger : {&zero, &one}) ledger->add(steps_of(9));
  one.merge(zero.records());
  EXPECT_EQ(one.total(), History({steps_of(10)}));
  EXPECT_EQ(one.run(), zero.run());
}

TEST(LedgerTest, CountsAtMostTwoToThe62AndNothingOfWhatIsRefused) {
  Ledger full;
  full.add(steps_of(std::int64_t{1} << 62));
  EXPECT_THROW(full.add(steps_of(1, 2.0)), UserError);
  Ledger other;
  other.add(steps_of(1, 3.0));
  Ledger both;
  both.add(steps_of(5));
  EXPECT_THROW(both.merge({other.records()[0], full.records()[0]}), UserError);
  EXPECT_EQ(both.total(), History({steps_of(5)}));
  EXPECT_EQ(both.records().size(), 1U);
  EXPECT_THROW(both.add({.noise_multiplier = -1.0}), UserError);
  EXPECT_EQ(both.total(), History({steps_of(5)}));
}

TEST(LedgerTest, AnAccountantMergesWithoutLosingWhatItCountedItself) {
  Accountant a({.kind = AccountantKind::kRdp}), b({.kind = AccountantKind::kRdp});
  a.add(steps_of(40));
  b.add(steps_of(40));
  b.merge(a.ledger().records());
  EXPECT_EQ(b.epsilon(1e-5),
            epsilon_of(History({steps_of(80)}), 1e-5, {.kind = AccountantKind::kRdp}));
}

}  // namespace
}  // namespace gradus::privacy
