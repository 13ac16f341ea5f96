#include <gradus/plan/planner.h>

#include <algorithm>
#include <queue>
#include <random>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <gradus/base/error.h>
#include <gradus/plan/describe.h>
#include <gradus/plan/internal/contract.h>
#include <gradus/plan/synthetic_trace.h>
#include <gradus/solve/chain.h>

namespace gradus::plan {
namespace {

using recompute::Disposition;
using recompute::StepTrace;
using testing::Step;

double forward_seconds(const StepTrace& trace) {
  double sum = 0.0;
  for (const auto& call : trace.calls) sum += call.seconds;
  return sum;
}

// The fastest of all ways to run a chain's pass: Dijkstra over (moment, results in memory), where
// between two calls of the program any result may be dropped, and any made again whose input is
// there.
double least_replay_seconds(const StepTrace& trace, std::int64_t limit) {
  const auto n = static_cast<int>(trace.calls.size());
  const auto moments = static_cast<int>(trace.moments.size());
  const auto bytes = [&](unsigned set) {
    std::int64_t sum = 0;
    for (int c = 0; c < n; ++c)
      if ((set >> c & 1U) != 0) sum += trace.calls[c].bytes;
    return sum;
  };
  std::vector<double> best(static_cast<std::size_t>(moments + 1) << n, 1e9);
  using Node = std::pair<double, std::size_t>;
  std::priority_queue<Node, std::vector<Node>, std::greater<>> open;
  const auto reach = [&](int moment, unsigned set, double seconds) {
    const std::size_t node = (static_cast<std::size_t>(moment) << n) | set;
    if (seconds >= best[node]) return;
    best[node] = seconds;
    open.emplace(seconds, node);
  };
  reach(0, 0, 0.0);
  while (!open.empty()) {
    const auto [seconds, node] = open.top();
    open.pop();
    if (seconds > best[node]) continue;
    const auto moment = static_cast<int>(node >> n);
    const auto set = static_cast<unsigned>(node & ((std::size_t{1} << n) - 1));
    if (moment == moments) return seconds;
    const auto held = [&](int c) {  // by the program, between the call before and this one
      return trace.calls[c].moment < moment && trace.calls[c].held_until >= moment;
    };
    for (int c = 0; c < n; ++c) {
      if ((set >> c & 1U) != 0) {
        if (!held(c)) reach(moment, set & ~(1U << c), seconds);
        continue;
      }
      if (trace.calls[c].moment >= moment) continue;
      if (c > 0 && (set >> (c - 1) & 1U) == 0) continue;
      const unsigned after = set | 1U << c;
      if (bytes(after) <= limit) reach(moment, after, seconds + trace.calls[c].seconds);
    }
    unsigned during = set;
    bool ready = true;
    for (int c = 0; c < n; ++c) {
      const auto& call = trace.calls[c];
      if (call.moment == moment) during |= 1U << c;
      const bool read = std::find(call.reads.begin(), call.reads.end(), moment) != call.reads.end();
      if ((read || held(c)) && (set >> c & 1U) == 0) ready = false;
    }
    if (ready && bytes(during) <= limit) reach(moment + 1, during, seconds);
  }
  return 1e9;
}

StepTrace random_chain(std::mt19937_64& random, std::size_t longest) {
  std::vector<Step> steps;
  const std::size_t n = 2 + random() % (longest - 1);
  for (std::size_t i = 0; i < n; ++i) {
    Step step{.bytes = 1 + static_cast<std::int64_t>(random() % 5),
              .seconds = 1e-3 * static_cast<double>(1 + random() % 9)};
    if (i > 0) step.inputs = {static_cast<std::int64_t>(i) - 1};
    steps.push_back(step);
  }
  return testing::trace_of(steps);
}

TEST(PlannerTest, PlansChainsAtLeastAsFastAsTheChainProgram) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 25; ++round) {
    SCOPED_TRACE(round);
    const StepTrace trace = random_chain(random, 10);
    const internal::Contracted graph = internal::contract(trace, {}, {}, true);
    ASSERT_TRUE(internal::is_chain(graph));
    const solve::ChainPlanner planner(internal::chain_of(graph), 1000);
    const std::int64_t least = planner.least_bytes(), plain = planner.plain_bytes();
    for (const std::int64_t limit : {least, (3 * least + plain) / 4, (least + plain) / 2}) {
      const double optimum = planner.plan(limit).time_ms * 1e-3 - forward_seconds(trace);
      const MemoryPlan plan = make_plan(trace, {.limit_bytes = limit, .time_limit_s = 0.1});
      EXPECT_LE(plan.simulation.replay_seconds, optimum + 1e-9) << limit << " of " << plain;
      EXPECT_LE(plan.predicted_peak_bytes, limit);
    }
  }
}

TEST(PlannerTest, ChainPlansEqualTheFastestScheduleOfAny) {
  std::mt19937_64 random(8);
  int plans = 0, equal = 0;
  for (int round = 0; round < 25; ++round) {
    SCOPED_TRACE(round);
    const StepTrace trace = random_chain(random, 8);
    const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
    const std::int64_t least = least_bytes(trace, {.limit_bytes = plain, .time_limit_s = 0.1});
    for (const std::int64_t limit : {least, (least + plain) / 2}) {
      const double optimum = least_replay_seconds(trace, limit);
      const MemoryPlan plan = make_plan(trace, {.limit_bytes = limit, .time_limit_s = 0.1});
      const double got = plan.simulation.replay_seconds;
      EXPECT_GE(got, optimum - 1e-9);  // or the simulator is wrong
      EXPECT_LE(plan.bound_seconds, optimum + 1e-9) << plan.bound_name;
      ++plans;
      if (got <= optimum + 1e-9) ++equal;
    }
  }
  EXPECT_EQ(equal, plans);
}

TEST(PlannerTest, IsWithinFivePerCentOfTheExactProgramOnRandomGraphs) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 100; ++round) {
    SCOPED_TRACE(round);
    const auto n = 4 + random() % 11;  // up to 14
    std::vector<Step> steps;
    for (std::size_t i = 0; i < n; ++i) {
      Step step{.bytes = 1 + static_cast<std::int64_t>(random() % 9),
                .seconds = 1e-3 * static_cast<double>(1 + random() % 20)};
      for (std::size_t k = 0; k < 1 + random() % 2 && i > 0; ++k) {
        const auto input =
            static_cast<std::int64_t>(i - 1 - random() % std::min<std::size_t>(i, 4));
        if (std::find(step.inputs.begin(), step.inputs.end(), input) == step.inputs.end())
          step.inputs.push_back(input);
      }
      steps.push_back(step);
    }
    const StepTrace trace = testing::trace_of(steps, 2);
    const internal::Contracted graph = internal::contract(trace, {}, {}, true);
    ASSERT_EQ(graph.graph.values.size(), n);
    const std::int64_t least = solve::least_peak(graph.graph, {.time_limit_s = 5.0}).peak_bytes;
    const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
    const std::int64_t limit = least + (plain - least) * (round % 3) * 3 / 10;
    const solve::KeepPlan exact =
        solve::choose_kept(graph.graph, {.budget_bytes = limit, .time_limit_s = 10.0});
    ASSERT_TRUE(exact.proven);
    const MemoryPlan plan = make_plan(trace, {.limit_bytes = limit, .time_limit_s = 0.1});
    EXPECT_LE(plan.simulation.replay_seconds * 1e3, 1.05 * exact.recompute_ms + 1e-9);
  }
}

TEST(PlannerTest, IsFasterThanOnlineEvictionOnModels) {
  for (const StepTrace& trace : {testing::transformer_trace(12), testing::unet_trace(6)}) {
    const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
    const MemoryPlan plan = make_plan(trace, {.limit_bytes = plain / 2, .time_limit_s = 0.3});
    EXPECT_LE(plan.predicted_peak_bytes, plain / 2);
    EXPECT_EQ(plan.plain_peak_bytes, plain);
    const Simulation online = Simulator(trace).run({}, plain / 2);
    EXPECT_LT(plan.simulation.replay_seconds, 0.99 * online.replay_seconds);
    EXPECT_LE(plan.bound_seconds, plan.simulation.replay_seconds + 1e-9);
    // What is handed to the budget is what was simulated.
    const Simulation again = simulate(trace, plan.eviction, plain / 2);
    EXPECT_EQ(again.peak_bytes, plan.predicted_peak_bytes);
    EXPECT_EQ(again.replay_seconds, plan.simulation.replay_seconds);
  }
}

TEST(PlannerTest, CountsRecordingInTheTimeAndNotInThePlainOne) {
  StepTrace trace = testing::transformer_trace(4);
  trace.recording_seconds = 0.1 * trace.seconds;
  const MemoryPlan plan = make_plan(trace, {.limit_bytes = std::int64_t{1} << 40});
  EXPECT_EQ(plan.predicted_seconds, trace.seconds);
  EXPECT_NEAR(plan.predicted_ratio, 1.0 / 0.9, 1e-9);
  EXPECT_EQ(plan.predicted_peak_bytes, plan.plain_peak_bytes);
}

TEST(PlannerTest, RefusesALimitBelowTheLeastAndNamesIt) {
  const StepTrace trace = testing::unet_trace(4);
  const std::int64_t least = least_bytes(trace, {.limit_bytes = 1, .time_limit_s = 0.3});
  EXPECT_NO_THROW(make_plan(trace, {.limit_bytes = least, .time_limit_s = 0.3}));
  try {
    make_plan(trace, {.limit_bytes = least * 9 / 10, .time_limit_s = 0.3});
    FAIL() << "a limit below the least was accepted";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("[plan] a pass of this program needs at least "),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(make_plan(trace, {.limit_bytes = 0}), UserError);
}

TEST(PlannerTest, MovesWhatIsCheaperToMoveThanToMakeAgain) {
  const StepTrace trace = testing::transformer_trace(6);
  const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
  const offload::Bandwidth fast{.write_bytes_per_s = 1e12, .read_bytes_per_s = 1e12};
  const offload::Bandwidth slow{.write_bytes_per_s = 1e7, .read_bytes_per_s = 1e7};
  const MemoryPlan none = make_plan(trace, {.limit_bytes = plain / 2, .time_limit_s = 0.3});
  const MemoryPlan moved =
      make_plan(trace, {.limit_bytes = plain / 2, .offload = fast, .time_limit_s = 0.3});
  EXPECT_GT(moved.simulation.moved_bytes, 0);
  EXPECT_LT(moved.predicted_seconds, none.predicted_seconds);
  const MemoryPlan stays =
      make_plan(trace, {.limit_bytes = plain / 2, .offload = slow, .time_limit_s = 0.3});
  EXPECT_EQ(stays.simulation.moved_bytes, 0);
  const MemoryPlan only = make_plan(
      trace, {.limit_bytes = plain / 2, .recompute = false, .offload = fast, .time_limit_s = 0.3});
  EXPECT_EQ(only.simulation.replay_seconds, 0.0);
  EXPECT_GT(only.simulation.moved_bytes, 0);
}

TEST(PlannerTest, LeavesToCompressionWhatShrinksForLittleTime) {
  const StepTrace trace = testing::transformer_trace(6);
  const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
  std::vector<CompressedResult> small(trace.calls.size());
  for (std::size_t c = 0; c < small.size(); ++c)
    if (trace.calls[c].bytes >= 4 << 20) small[c] = {trace.calls[c].bytes / 8, 1e-5, 1e-5};
  const MemoryPlan none = make_plan(trace, {.limit_bytes = plain / 2, .time_limit_s = 0.3});
  const MemoryPlan plan =
      make_plan(trace, {.limit_bytes = plain / 2, .compressed = small, .time_limit_s = 0.3});
  EXPECT_LT(plan.predicted_seconds, none.predicted_seconds);
  EXPECT_TRUE(std::find(plan.dispositions.begin(), plan.dispositions.end(), Disposition::leave) !=
              plan.dispositions.end());
}

TEST(PlannerTest, PlansAThousandCallsInSeconds) {
  const StepTrace trace = testing::transformer_trace(77);  // 1,002 calls
  const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
  const MemoryPlan plan = make_plan(trace, {.limit_bytes = plain / 2, .time_limit_s = 0.3});
  EXPECT_LE(plan.planning_seconds, 5.0);
  EXPECT_FALSE(plan.bound_name.empty());
}

TEST(DescribeTest, SaysWhatIsDroppedWhyAndWhatCannotBe) {
  StepTrace trace = testing::transformer_trace(3);
  for (auto& call : trace.calls) call.op = call.bytes > 2 << 20 ? "aten::gelu" : "aten::addmm";
  trace.calls[2].can_run_again = false;
  trace.calls[2].op = "custom::op";
  const std::int64_t plain = Simulator(trace).run({}, 0).peak_bytes;
  const MemoryPlan plan = make_plan(trace, {.limit_bytes = plain * 6 / 10, .time_limit_s = 0.1});
  const std::string text = describe(trace, plan, 4);
  for (const std::string& part :
       std::vector<std::string>{"Limit ", "Chosen: " + plan.method, "because it is the fastest",
                                "aten::gelu", "Cannot be made again, and is kept:", "custom::op",
                                " ms", " MiB", "recomputed", "slower ones that fit"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  std::int64_t dropped = 0;
  for (const auto& sum : summarise(trace, plan)) dropped += sum.dropped_bytes;
  EXPECT_GT(dropped, 0);
  const auto page = nlohmann::json::parse(to_json(trace, plan));
  EXPECT_EQ(page["predicted"]["peak_bytes"].get<std::int64_t>(), plan.predicted_peak_bytes);
  EXPECT_EQ(page["candidates"].size(), plan.candidates.size());
  EXPECT_EQ(page["timeline"]["planned_bytes"].size(), trace.moments.size());
  EXPECT_EQ(page["least_bytes"].get<std::int64_t>(), plan.least_bytes);
}

}  // namespace
}  // namespace gradus::plan
