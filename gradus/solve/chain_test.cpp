#include <gradus/solve/chain.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::solve {
namespace {

using Kind = ChainOperationKind;

std::int64_t draw(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

Chain random_chain(std::mt19937_64& random, std::int64_t count) {
  Chain chain;
  chain.input_bytes = draw(random, 0, 4);
  chain.input_gradient_bytes = draw(random, 0, 1) * chain.input_bytes;
  std::int64_t made_gradient = chain.input_gradient_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    ChainStage stage;
    stage.forward_ms = static_cast<double>(draw(random, 0, 9));
    stage.backward_ms = static_cast<double>(draw(random, 0, 9));
    stage.output_bytes = draw(random, 0, 5);
    stage.saved_bytes = stage.output_bytes + draw(random, 0, 6);
    stage.forward_transient_bytes = draw(random, 0, 3);
    if (draw(random, 0, 1)) stage.saving_transient_bytes = draw(random, 0, 3);
    stage.backward_transient_bytes = draw(random, -made_gradient, 4);
    if (draw(random, 0, 2) == 0) stage.gradient_bytes = draw(random, 0, 5);
    made_gradient = stage.gradient_bytes.value_or(stage.output_bytes);
    chain.stages.push_back(stage);
  }
  return chain;
}

// Dijkstra's search over all memory contents that operations can reach within a limit, knowing
// nothing of the dynamic program: the oracle. A value that was read by an operation that keeps it
// stays until its backward (the persistence of Theorem 1).
class Exhaustive {
 public:
  // With `hasty`, a value just made by a forward is read by the next operation: that loses nothing
  // (making it can be put off until then) and makes chains of 10 stages affordable.
  Exhaustive(const Chain& chain, std::int64_t limit, bool hasty)
      : chain_(chain), limit_(limit), hasty_(hasty), count_(chain.stages.size()) {}

  double least_time() {
    using Entry = std::pair<double, std::uint64_t>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open;
    std::unordered_map<std::uint64_t, double> best;
    const auto reach = [&](double time, const State& state) {
      const std::uint64_t key = pack(state);
      const auto [entry, added] = best.try_emplace(key, time);
      if (!added && entry->second <= time) return;
      entry->second = time;
      open.emplace(time, key);
    };
    State start;
    start.value[0] = kPinned;
    start.gradient = count_;
    if (live(start) <= limit_) reach(0.0, start);
    while (!open.empty()) {
      const auto [time, key] = open.top();
      open.pop();
      if (best[key] < time) continue;
      const State state = unpack(key);
      if (state.gradient == 0) return time;
      expand(state, [&](double cost, const State& next) { reach(time + cost, next); });
    }
    return std::numeric_limits<double>::infinity();
  }

 private:
  static constexpr int kAbsent = 0, kFresh = 1, kPinned = 2;
  struct State {
    std::array<int, 11> value{};  // Plain output i, 0 the input.
    std::array<bool, 11> saved{};
    std::size_t gradient = 0;
  };

  std::int64_t gradient_bytes(std::size_t i) const {
    if (i == 0) return chain_.input_gradient_bytes;
    return chain_.stages[i - 1].gradient_bytes.value_or(chain_.stages[i - 1].output_bytes);
  }
  std::int64_t live(const State& state) const {
    std::int64_t bytes = chain_.input_bytes + gradient_bytes(state.gradient);
    for (std::size_t i = 1; i <= count_; ++i) {
      if (state.value[i]) bytes += chain_.stages[i - 1].output_bytes;
      if (state.saved[i]) bytes += chain_.stages[i - 1].saved_bytes;
    }
    return bytes;
  }

  template <typename Visit>
  void expand(const State& state, Visit&& visit) const {
    std::size_t only = 0;
    if (hasty_)
      for (std::size_t i = 1; i <= count_; ++i)
        if (state.value[i] == kFresh) only = i + 1;
    for (std::size_t i = 1; i <= state.gradient; ++i) {
      if (only && i != only) continue;
      if (!state.value[i - 1] && !state.saved[i - 1]) continue;
      const ChainStage& stage = chain_.stages[i - 1];
      if (i == state.gradient && state.saved[i]) {
        const std::int64_t peak =
            live(state) + gradient_bytes(i - 1) + stage.backward_transient_bytes;
        State next = state;
        next.saved[i] = false;
        next.gradient = i - 1;
        if (i > 1) next.value[i - 1] = kAbsent;
        if (peak <= limit_ && live(next) <= limit_) visit(stage.backward_ms, next);
      }
      if (state.value[i] || state.saved[i]) continue;
      State keep = state;
      if (keep.value[i - 1]) keep.value[i - 1] = kPinned;
      State save = keep;
      keep.value[i] = kFresh;
      save.saved[i] = true;
      if (live(save) + stage.saving_transient_bytes.value_or(stage.forward_transient_bytes) <=
          limit_)
        visit(stage.forward_ms, save);
      if (live(keep) + stage.forward_transient_bytes > limit_) continue;
      visit(stage.forward_ms, keep);
      if (state.value[i - 1] != kFresh) continue;
      keep.value[i - 1] = kAbsent;
      visit(stage.forward_ms, keep);
    }
  }

  std::uint64_t pack(const State& state) const {
    std::uint64_t key = state.gradient;
    for (std::size_t i = 0; i <= count_; ++i)
      key = key * 8 + static_cast<std::uint64_t>(state.value[i] * 2 + state.saved[i]);
    return key;
  }
  State unpack(std::uint64_t key) const {
    State state;
    for (std::size_t i = count_ + 1; i-- > 0; key /= 8) {
      state.value[i] = static_cast<int>(key % 8 / 2);
      state.saved[i] = key % 2 != 0;
    }
    state.gradient = key;
    return state;
  }

  const Chain& chain_;
  std::int64_t limit_;
  bool hasty_;
  std::size_t count_;
};

void expect_equals_exhaustive_search(std::uint64_t seed, std::int64_t chains, std::int64_t shortest,
                                     std::int64_t longest, bool hasty) {
  std::mt19937_64 random(seed);
  for (std::int64_t trial = 0; trial < chains; ++trial) {
    SCOPED_TRACE(trial);
    const Chain chain = random_chain(random, draw(random, shortest, longest));
    const ChainPlanner planner(chain, 1000);
    ASSERT_EQ(planner.slot_bytes(), 1);
    const std::int64_t limit = draw(random, planner.least_bytes(), planner.plain_bytes());
    for (const std::int64_t bytes : {planner.least_bytes(), limit}) {
      const ChainPlan plan = planner.plan(bytes);
      ASSERT_TRUE(plan.feasible);
      ASSERT_LE(plan.peak_bytes, bytes);
      ASSERT_EQ(plan.time_ms, Exhaustive(chain, bytes, hasty).least_time()) << "limit " << bytes;
    }
    ASSERT_FALSE(planner.plan(planner.least_bytes() - 1).feasible);
    ASSERT_TRUE(std::isinf(Exhaustive(chain, planner.least_bytes() - 1, hasty).least_time()));
  }
}

TEST(ChainTest, EqualsExhaustiveSearchOverAllSchedulesOfShortChains) {
  expect_equals_exhaustive_search(1, 300, 1, 5, false);
}

TEST(ChainTest, EqualsExhaustiveSearchUpToTenStages) {
  expect_equals_exhaustive_search(2, 200, 6, 10, true);
}

// beta(c, r) = (c + r)! / c! r!
double binomial(std::int64_t c, std::int64_t r) {
  double value = 1.0;
  for (std::int64_t i = 1; i <= r; ++i)
    value = value * static_cast<double>(c + i) / static_cast<double>(i);
  return std::round(value);
}

TEST(ChainTest, MatchesTheBinomialFormulaOnUniformChains) {
  // Griewank & Walther 2000 (Algorithm 799: revolve), proposition 1: with c checkpoints, the input
  // among them, l steps take r l - beta(c + 1, r - 1) forwards beside the one of each backward,
  // where beta(c, r - 1) < l <= beta(c, r).
  for (const std::int64_t steps : {1, 2, 3, 7, 20, 45, 60}) {
    Chain chain;
    chain.input_bytes = 1;
    // Memory for what one stage saves, and no second; one more value for that stage's input, which
    // revolve counts as the current state and not as a checkpoint.
    chain.stages.assign(steps, {.forward_ms = 1.0,
                                .backward_ms = 2.0,
                                .output_bytes = 1,
                                .saved_bytes = 1000,
                                .gradient_bytes = 0});
    for (std::int64_t checkpoints = 1; checkpoints <= 8; ++checkpoints) {
      SCOPED_TRACE(::testing::Message() << steps << " steps, " << checkpoints << " checkpoints");
      std::int64_t r = 0;
      while (binomial(checkpoints, r) < static_cast<double>(steps)) ++r;
      const double count = static_cast<double>(steps);
      const double forwards =
          r == 0 ? 0.0 : static_cast<double>(r) * count - binomial(checkpoints + 1, r - 1);
      const ChainPlan plan = plan_chain(chain, 1001 + checkpoints, {.max_slots = 2000});
      ASSERT_TRUE(plan.feasible);
      EXPECT_EQ(plan.time_ms, forwards + 3.0 * count);
    }
  }
}

TEST(ChainTest, KeepsEverythingWhereItFits) {
  std::mt19937_64 random(3);
  const Chain chain = random_chain(random, 20);
  const ChainPlanner planner(chain, 1 << 20);
  const ChainPlan plan = planner.plan(planner.plain_bytes());
  EXPECT_EQ(plan.sequence, keep_everything(chain));
  EXPECT_EQ(plan.peak_bytes, planner.plain_bytes());
}

TEST(ChainTest, StaysUnderEveryLimitFromTheLeastOnWhateverTheSlots) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 20; ++trial) {
    Chain chain = random_chain(random, 30);
    for (ChainStage& stage : chain.stages) {
      stage.output_bytes = draw(random, 1'000'000, 9'000'000);
      stage.saved_bytes = stage.output_bytes + draw(random, 0, 20'000'000);
    }
    const ChainPlanner exact(chain, 1LL << 40, {.max_slots = 3000});
    const std::int64_t least = exact.least_bytes();
    for (const std::int64_t slots : {1, 7, 100, 500}) {
      const ChainPlanner planner(chain, 1LL << 40, {.max_slots = slots});
      EXPECT_EQ(planner.least_bytes(), least);
      EXPECT_FALSE(planner.plan(least - 1).feasible);
      EXPECT_EQ(planner.plan(least - 1).least_bytes, least);
      for (int step = 0; step <= 10; ++step) {
        const std::int64_t limit = least + (planner.plain_bytes() - least) * step / 10;
        const ChainPlan plan = planner.plan(limit);
        ASSERT_TRUE(plan.feasible);
        EXPECT_LE(plan.peak_bytes, limit);
        if (slots < 500) continue;
        // Near the least limit a slot counts most: a planner for that limit alone has finer ones.
        const double best = exact.plan(limit).time_ms;
        EXPECT_LE(plan.time_ms, (step ? 1.03 : 1.2) * best);
        EXPECT_LE(plan_chain(chain, limit, {.max_slots = slots}).time_ms, 1.02 * best);
      }
    }
  }
}

TEST(ChainTest, TakesFewerSlotsToKeepTheTableInItsBound) {
  std::mt19937_64 random(5);
  Chain chain = random_chain(random, 50);
  for (ChainStage& stage : chain.stages) stage.saved_bytes += 1'000'000;
  const ChainPlanner planner(chain, 20'000'000, {.max_table_bytes = 100'000});
  EXPECT_GT(planner.table_bytes(), 50'000);
  EXPECT_LE(planner.table_bytes(), 100'000);
  EXPECT_LE(planner.plan(20'000'000).peak_bytes, 20'000'000);
  EXPECT_THROW(ChainPlanner(chain, 20'000'000, {.max_table_bytes = 10'000}), UserError);
}

TEST(ChainTest, TheSimulatorCountsAPlanByHand) {
  Chain chain;
  chain.input_bytes = 10;
  chain.input_gradient_bytes = 10;
  chain.stages = {{.forward_ms = 1,
                   .backward_ms = 2,
                   .output_bytes = 4,
                   .saved_bytes = 6,
                   .forward_transient_bytes = 1,
                   .backward_transient_bytes = 3},
                  {.forward_ms = 5,
                   .backward_ms = 7,
                   .output_bytes = 2,
                   .saved_bytes = 9,
                   .forward_transient_bytes = 2,
                   .saving_transient_bytes = 8,
                   .gradient_bytes = 1}};
  const ChainRun run = simulate({{Kind::forward_keep, 0},
                                 {Kind::forward_save, 1},
                                 {Kind::backward, 1},
                                 {Kind::forward_save, 0},
                                 {Kind::backward, 0}},
                                chain);
  // Input 10 and gradient 1; output 4 + 1; saved 9 + 8; gradient 4; then 10 + 4 held, 6 + 1; and
  // the input's gradient 10 + 3.
  EXPECT_THAT(run.operation_peak_bytes, ::testing::ElementsAre(16, 32, 28, 21, 33));
  EXPECT_EQ(run.peak_bytes, 33);
  EXPECT_EQ(run.time_ms, 16.0);
}

TEST(ChainTest, TheSimulatorRefusesWhatCannotRun) {
  std::mt19937_64 random(6);
  const Chain chain = random_chain(random, 3);
  const auto refuses = [&](const ChainSequence& sequence) {
    return tests::message_of([&] { simulate(sequence, chain); });
  };
  EXPECT_THAT(refuses({{Kind::forward_save, 1}}), ::testing::HasSubstr("its input must be in"));
  EXPECT_THAT(refuses({{Kind::forward_save, 0}, {Kind::forward_keep, 0}}),
              ::testing::HasSubstr("must not be in memory already"));
  EXPECT_THAT(refuses({{Kind::forward_keep, 0},
                       {Kind::forward_drop, 1},
                       {Kind::forward_save, 2},
                       {Kind::backward, 2},
                       {Kind::forward_save, 1}}),
              ::testing::HasSubstr("operation 4, forward_save of stage 1: its input"));
  EXPECT_THAT(refuses({{Kind::forward_save, 0}, {Kind::backward, 0}}),
              ::testing::HasSubstr("the gradient of its output"));
  EXPECT_THAT(refuses({{Kind::forward_keep, 0},
                       {Kind::forward_keep, 1},
                       {Kind::forward_keep, 2},
                       {Kind::backward, 2}}),
              ::testing::HasSubstr("its forward_save must have run"));
  EXPECT_THAT(refuses({{Kind::forward_save, 0}, {Kind::forward_drop, 1}}),
              ::testing::HasSubstr("cannot be dropped"));
  EXPECT_THAT(refuses({{Kind::forward_save, 3}}), ::testing::HasSubstr("the stage must exist"));
  ChainSequence unfinished = keep_everything(chain);
  unfinished.pop_back();
  EXPECT_THAT(refuses(unfinished), ::testing::HasSubstr("that of stage 0 did not"));
}

TEST(ChainTest, RefusesInvalidChainsAndLimits) {
  EXPECT_THAT(tests::message_of([] { ChainPlanner({}, 1); }),
              ::testing::HasSubstr("at least one stage"));
  const auto refuses = [](const ChainStage& stage) {
    return tests::message_of([&] { ChainPlanner({.stages = {stage}}, 100); });
  };
  EXPECT_THAT(refuses({.forward_ms = NAN}), ::testing::HasSubstr("finite"));
  EXPECT_THAT(refuses({.output_bytes = 3, .saved_bytes = 2}),
              ::testing::HasSubstr("stage 0 has 2 < 3"));
  EXPECT_THAT(refuses({.output_bytes = -1}), ::testing::HasSubstr("negative one in stage 0"));
  EXPECT_THAT(refuses({.backward_transient_bytes = -1}), ::testing::HasSubstr("-1 < -0"));
  const ChainPlanner planner({.stages = {{.output_bytes = 4, .saved_bytes = 4}}}, 100);
  EXPECT_THAT(tests::message_of([&] { planner.plan(101); }),
              ::testing::HasSubstr("at most 100 bytes"));
}

}  // namespace
}  // namespace gradus::solve
