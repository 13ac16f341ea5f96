#include <gradus/plan/simulate.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/plan/synthetic_trace.h>

namespace gradus::plan {
namespace {

using recompute::Disposition;
using recompute::StepTrace;
using testing::chain_trace;

constexpr auto kKeep = Disposition::keep;
constexpr auto kDrop = Disposition::recompute;

// The same rules, written as they are stated: sets, recursion, and sums over everything at each
// question.
class Plainly {
 public:
  Plainly(const StepTrace& trace, const std::vector<Disposition>& plan, std::int64_t limit)
      : t_(trace), plan_(plan), limit_(limit), runs(trace.calls.size(), 0) {}

  bool run() {
    try {
      for (now_ = 0; now_ < size(t_.moments); ++now_) {
        for (std::int64_t c = 0; c < size(t_.calls); ++c)
          if (reads_now(c)) read(c);
        for (std::int64_t c = 0; c < size(t_.calls); ++c) {
          if (t_.calls[c].moment != now_) continue;
          used_[c] = ++clock_;
          for (const std::int64_t i : inputs(c)) used_[i] = clock_;
          memory_.insert(c);
          if (t_.calls[c].saved && t_.calls[c].can_run_again) kept_.insert(c);
        }
        room(0, t_.moments[now_].other_bytes);
        ends_.push_back(now_);
        for (std::int64_t c = 0; c < size(t_.calls); ++c)
          if (memory_.contains(c) && !wanted_after(c)) memory_.erase(c), kept_.erase(c);
        std::erase_if(in_use_, [&](const auto& use) { return use.second <= now_; });
      }
    } catch (int) {
      return false;
    }
    return true;
  }

 private:
  template <typename T>
  static std::int64_t size(const T& t) {
    return static_cast<std::int64_t>(t.size());
  }
  const StepTrace& t_;
  const std::vector<Disposition>& plan_;
  const std::int64_t limit_;
  std::set<std::int64_t> memory_, kept_;
  std::map<std::int64_t, std::int64_t> used_;
  std::multimap<std::int64_t, std::int64_t> in_use_;  // call, until
  std::multiset<std::int64_t> pinned_;
  std::vector<std::int64_t> ends_;
  std::int64_t now_ = 0, clock_ = 0;

 public:
  std::vector<std::int32_t> runs;
  double seconds = 0.0;
  std::int64_t peak = 0;

 private:
  std::vector<std::int64_t> inputs(std::int64_t c) const {
    std::vector<std::int64_t> result;
    for (const std::int64_t i : t_.calls[c].inputs) {
      const std::vector<std::int64_t> more = t_.calls[i].bytes > 0 ? std::vector{i} : inputs(i);
      for (const std::int64_t j : more)
        if (std::find(result.begin(), result.end(), j) == result.end()) result.push_back(j);
    }
    return result;
  }
  bool reads_now(std::int64_t c) const {
    const auto& reads = t_.calls[c].reads;
    return t_.calls[c].saved && std::find(reads.begin(), reads.end(), now_) != reads.end();
  }
  bool held(std::int64_t c) const {
    return t_.calls[c].moment <= now_ &&
           std::max(t_.calls[c].held_until, t_.calls[c].moment) >= now_ &&
           !(size(ends_) > now_ && t_.calls[c].held_until <= now_);
  }
  std::int64_t life(std::int64_t c) const {
    std::int64_t end = t_.calls[c].saved ? t_.calls[c].released_after : -1;
    for (std::int64_t d = c + 1; d < size(t_.calls); ++d) {
      if (!t_.calls[d].can_run_again) continue;
      const auto in = inputs(d);
      if (std::find(in.begin(), in.end(), c) != in.end()) end = std::max(end, life(d));
    }
    return end;
  }
  bool saved(std::int64_t c) const {
    return t_.calls[c].saved && t_.calls[c].released_after >= now_ &&
           !(size(ends_) > now_ && t_.calls[c].released_after == now_);
  }
  // At the end of a moment: does anybody keep it?
  bool wanted_after(std::int64_t c) const {
    if (t_.calls[c].held_until > now_) return true;
    const std::int64_t released = t_.calls[c].saved ? t_.calls[c].released_after : -1;
    if (!t_.calls[c].can_run_again) return std::max(released, life(c)) > now_;
    if (!kept_.contains(c)) return false;
    if (released > now_) return true;
    return released < now_ && life(c) > now_;  // made again for another one; a release drops it
  }
  void materialise(std::int64_t c) {
    if (memory_.contains(c)) {
      if (t_.calls[c].can_run_again) kept_.insert(c);
      return;
    }
    if (!t_.calls[c].can_run_again) throw 1;
    for (;;) {
      std::vector<std::int64_t> present;
      std::int64_t missing = -1;
      for (const std::int64_t i : inputs(c)) {
        if (memory_.contains(i)) {
          if (t_.calls[i].can_run_again) kept_.insert(i);
          present.push_back(i);
        } else if (missing < 0) {
          missing = i;
        }
      }
      for (const std::int64_t i : present) pinned_.insert(i);
      if (missing >= 0) {
        materialise(missing);
      } else {
        const auto& call = t_.calls[c];
        const std::int64_t before =
            call.moment > 0 ? t_.moments[call.moment - 1].rest_bytes : t_.moments[0].other_bytes;
        const std::int64_t workspace =
            std::max<std::int64_t>(0, t_.moments[call.moment].other_bytes -
                                          std::max(before, t_.moments[call.moment].rest_bytes));
        room(call.bytes + call.copied_bytes + workspace, t_.moments[now_ - 1].rest_bytes);
        memory_.insert(c);
        kept_.insert(c);
        used_[c] = clock_;
        ++runs[c];
        seconds += call.seconds;
      }
      for (const std::int64_t i : present) pinned_.erase(pinned_.find(i));
      if (missing < 0) return;
    }
  }
  void read(std::int64_t c) {
    used_[c] = ++clock_;
    materialise(c);
    const auto& call = t_.calls[c];
    const bool last = call.reads.back() == now_;
    in_use_.emplace(
        c, last && call.released_after - now_ <= 16 ? std::max(now_, call.released_after) : now_);
  }
  std::int64_t live() const {
    std::int64_t sum = 0;
    for (const std::int64_t c : memory_) sum += t_.calls[c].bytes;
    return sum;
  }
  double cost(std::int64_t c) const {
    double sum = t_.calls[c].seconds;
    for (const std::int64_t i : inputs(c))
      if (!memory_.contains(i) && t_.calls[i].can_run_again) sum += cost(i);
    return sum;
  }
  std::int64_t next(std::int64_t c) const {
    // What was read at this moment already waits for the next one.
    for (const std::int64_t read : t_.calls[c].reads)
      if (read > now_ || (read == now_ && used_.at(c) < clock_ && !in_use_.contains(c)))
        return read;
    return size(t_.moments);
  }
  double wait_of(std::int64_t c) const {
    return next(c) < size(t_.moments) ? static_cast<double>(next(c) - now_) : 9223372036854775807.0;
  }
  void room(std::int64_t more, std::int64_t other) {
    bool first = true;
    std::vector<std::tuple<int, double, std::int64_t>> order;
    while (limit_ > 0 && live() + more + other > limit_) {
      if (first) {
        for (const std::int64_t c : memory_) {
          if (!kept_.contains(c) || held(c) || pinned_.contains(c) || in_use_.contains(c)) continue;
          if (t_.calls[c].bytes == 0) continue;
          if (!saved(c)) {
            order.emplace_back(0, 0.0, c);
          } else if (!plan_.empty() && plan_[c] == kDrop) {
            order.emplace_back(1, -static_cast<double>(next(c)), c);
          } else {
            const double wait = plan_.empty() ? static_cast<double>(clock_ - used_[c]) : wait_of(c);
            order.emplace_back(
                2, (cost(c) + 1e-7) / (static_cast<double>(t_.calls[c].bytes) * (wait + 1.0)), c);
          }
        }
        // Costs of what is kept are asked once, after all else went.
        std::sort(order.begin(), order.end());
        first = false;
      }
      if (order.empty()) throw 1;
      const std::int64_t c = std::get<2>(order.front());
      if (std::get<0>(order.front()) == 2 && !recosted_) {
        for (auto& [kind, score, call] : order) {
          const double wait =
              plan_.empty() ? static_cast<double>(clock_ - used_[call]) : wait_of(call);
          score = (cost(call) + 1e-7) / (static_cast<double>(t_.calls[call].bytes) * (wait + 1.0));
        }
        std::sort(order.begin(), order.end());
        recosted_ = true;
        continue;
      }
      order.erase(order.begin());
      memory_.erase(c);
      kept_.erase(c);
    }
    recosted_ = false;
    peak = std::max(peak, live() + more + other);
  }
  bool recosted_ = false;
};

TEST(SimulateTest, KeepsEverythingWithoutALimit) {
  const StepTrace trace = chain_trace({4, 3, 2, 1}, {1, 1, 1, 1});
  const Simulation result = Simulator(trace).run({}, 0);
  EXPECT_TRUE(result.feasible);
  EXPECT_EQ(result.peak_bytes, 10);
  EXPECT_EQ(result.replay_seconds, 0.0);
  EXPECT_EQ(result.moment_bytes, (std::vector<std::int64_t>{4, 7, 9, 10, 10, 9, 7, 4}));
}

TEST(SimulateTest, RunsAChainAgainFromWhatIsKept) {
  // Four equal steps, room for three results: 1 is dropped for 3, and is made again from 0.
  const StepTrace trace = chain_trace({1, 1, 1, 1}, {1, 2, 4, 8});
  const Simulation result = Simulator(trace).run({kKeep, kDrop, kKeep, kKeep}, 3);
  EXPECT_TRUE(result.feasible);
  EXPECT_EQ(result.runs_again, (std::vector<std::int32_t>{0, 1, 0, 0}));
  EXPECT_EQ(result.replay_seconds, 2.0);
  EXPECT_EQ(result.peak_bytes, 3);
}

TEST(SimulateTest, SaysWhichMomentDoesNotFit) {
  const StepTrace trace = chain_trace({1, 1, 1, 1}, {1, 1, 1, 1});
  const Simulation result = Simulator(trace).run({}, 1);
  EXPECT_FALSE(result.feasible);
  EXPECT_EQ(result.failed_moment, 1);  // input and result of the second call
}

TEST(SimulateTest, MovedResultsNeedNoReplay) {
  const StepTrace trace = chain_trace({1, 1, 1, 1}, {1, 2, 4, 8});
  const Simulation result = Simulator(trace, {.stash = {.write_bytes_per_s = 2.0,
                                                        .write_latency_s = 0.25,
                                                        .read_bytes_per_s = 4.0,
                                                        .read_latency_s = 0.5}})
                                .run({kKeep, Disposition::offload, kKeep, kKeep}, 3);
  EXPECT_TRUE(result.feasible);
  EXPECT_EQ(result.replay_seconds, 0.0);
  EXPECT_EQ(result.moved_bytes, 1);
  EXPECT_DOUBLE_EQ(result.move_seconds, 0.75 + 0.75);
}

TEST(SimulateTest, LeftResultsTakeTheirCompressedSize) {
  StepTrace trace = chain_trace({8, 8, 8, 8}, {1, 1, 1, 1});
  std::vector<CompressedResult> small(4);
  small[1] = {2, 0.125, 0.5};
  const Simulation result =
      Simulator(trace, {.compressed = small}).run({kKeep, Disposition::leave, kKeep, kKeep}, 0);
  // While the program holds it both forms are there: at moments 1 and 2.
  EXPECT_EQ(result.moment_bytes, (std::vector<std::int64_t>{8, 18, 26, 26, 26, 18, 18, 8}));
  EXPECT_DOUBLE_EQ(result.move_seconds, 0.625);
}

TEST(SimulateTest, ResultsThatNobodyKeepsAreMadeAgainOnTheWay) {
  // 1 is not saved: making 2 again needs it first.
  StepTrace trace = chain_trace({1, 1, 1, 1}, {1, 2, 4, 8});
  trace.calls[1].saved = false;
  trace.calls[1].reads.clear();
  trace.calls[1].released_after = -1;
  trace.moments[4].other_bytes = 1;  // room for two results: 2 goes
  const Simulation result = Simulator(trace).run({kKeep, kKeep, kDrop, kKeep}, 3);
  EXPECT_TRUE(result.feasible);
  EXPECT_EQ(result.runs_again, (std::vector<std::int32_t>{0, 1, 1, 0}));
  EXPECT_EQ(result.replay_seconds, 6.0);
}

TEST(SimulateTest, FollowsTheRulesAsStatedOnRandomTraces) {
  std::mt19937_64 random(11);
  std::int64_t feasible = 0, replays = 0;
  for (int round = 0; round < 600; ++round) {
    SCOPED_TRACE(round);
    const StepTrace trace =
        testing::random_trace(random, 3 + static_cast<std::int64_t>(random() % 14));
    std::vector<Disposition> plan;
    if (round % 3 != 0)
      for (std::size_t c = 0; c < trace.calls.size(); ++c)
        plan.push_back(random() % 2 == 0 ? kKeep : kDrop);
    const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
    const std::int64_t limit = 1 + plain * static_cast<std::int64_t>(40 + random() % 60) / 100;
    const Simulation result = Simulator(trace).run(plan, limit);
    Plainly plainly(trace, plan, limit);
    EXPECT_EQ(plainly.run(), result.feasible);
    if (!result.feasible) continue;
    ++feasible;
    EXPECT_EQ(result.runs_again, plainly.runs);
    EXPECT_NEAR(result.replay_seconds, plainly.seconds, 1e-9);
    EXPECT_EQ(result.peak_bytes, plainly.peak);
    EXPECT_LE(result.peak_bytes, limit);
    for (const std::int32_t n : result.runs_again) replays += n;
  }
  EXPECT_GE(feasible, 150);
  EXPECT_GE(replays, 150);
}

TEST(SimulateTest, ThousandsOfCallsTakeMilliseconds) {
  const StepTrace trace = testing::transformer_trace(300);  // 3,901 calls
  const Simulator simulator(trace);
  const std::vector<Disposition> plan(trace.calls.size(), kDrop);
  const std::int64_t limit = simulator.run(plan, 0).peak_bytes / 2;
  double best = 1.0;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    ASSERT_TRUE(simulator.run(plan, limit).feasible);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  EXPECT_LT(best, 0.02);
}

TEST(SimulateTest, RefusesATraceThatContradictsItself) {
  StepTrace trace = chain_trace({1, 1}, {1, 1});
  trace.calls[1].inputs = {1};
  EXPECT_THROW(Simulator{trace}, UserError);
  trace = chain_trace({1, 1}, {1, 1});
  trace.calls[0].reads = {9};
  EXPECT_THROW(Simulator{trace}, UserError);
  trace = chain_trace({1, 1}, {1, 1});
  EXPECT_THROW(Simulator(trace).run({kKeep}, 5), UserError);
}

}  // namespace
}  // namespace gradus::plan
