// Passes written down by MemoryBudget::trace(), and budgets that follow a plan.

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/recompute/random_program.h>

namespace gradus::recompute {
namespace {

using testing::ElementsAre;
using testing::Gt;

constexpr std::int64_t kSide = 64;
constexpr std::int64_t kBytes = kSide * kSide * 4;

// Copies into host memory.
class HostStash final : public Stash {
 public:
  std::shared_ptr<void> put(const c10::Storage& storage) override {
    if (full) return nullptr;
    const base::ArenaScope host(base::Arena::host);
    ++puts;
    return std::make_shared<at::Tensor>(over(storage).clone());
  }
  c10::Storage get(const std::shared_ptr<void>& handle) override {
    ++gets;
    const auto& bytes = *std::static_pointer_cast<at::Tensor>(handle);
    at::Tensor back = at::empty_like(bytes);
    back.copy_(bytes);
    return back.storage();
  }
  bool full = false;
  int puts = 0;
  int gets = 0;

 private:
  static at::Tensor over(const c10::Storage& storage) {
    at::Tensor bytes = at::empty({0}, at::kByte);
    bytes.set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
    return bytes;
  }
};

class PlannedBudgetTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(5);
    leaf_ = torch::randn({kSide, kSide}).requires_grad_();
    leaf_.mutable_grad() = torch::zeros_like(leaf_);
  }

  // tanh and sin in turn: each saves its result or its argument.
  void chain(int pairs) {
    at::Tensor y = leaf_;
    for (int i = 0; i < pairs; ++i) y = y.tanh().sin();
    y = y.sum();
    y.backward();
  }

  void zero_gradient() {
    const at::NoGradGuard no_grad;
    leaf_.mutable_grad().zero_();
  }

  // The trace of the second of three passes.
  StepTrace trace_of(const std::function<void()>& pass, std::int64_t limit_bytes = 0) {
    MemoryBudget budget({.limit_bytes = limit_bytes});
    std::vector<StepTrace> traces;
    budget.trace([&](const StepTrace& trace) { traces.push_back(trace); });
    for (int i = 0; i < 3; ++i) pass();
    // The third ends with the next call under gradient recording.
    EXPECT_GE(traces.size(), 2);
    return traces.at(1);
  }

  static std::shared_ptr<EvictionPlan> keep_all(const StepTrace& trace) {
    auto plan = std::make_shared<EvictionPlan>();
    for (const TracedCall& call : trace.calls) {
      plan->calls.push_back({.op = call.op, .bytes = call.bytes, .reads = call.reads});
    }
    return plan;
  }

  // Most memory live at any moment, says the trace, if nothing is dropped.
  static std::int64_t traced_peak(const StepTrace& trace) {
    std::int64_t peak = 0;
    for (std::size_t m = 0; m < trace.moments.size(); ++m) {
      std::int64_t bytes = trace.moments[m].other_bytes;
      for (const TracedCall& call : trace.calls) {
        const auto now = static_cast<std::int64_t>(m);
        if (call.moment <= now && now <= std::max(call.held_until, call.released_after))
          bytes += call.bytes;
      }
      peak = std::max(peak, bytes);
    }
    return peak;
  }

  base::MemoryTracker& tracker_ = base::MemoryTracker::install();
  at::Tensor leaf_;
};

TEST_F(PlannedBudgetTest, ATraceSaysWhatWasMadeAndWhenItIsWanted) {
  const StepTrace trace = trace_of([this] { chain(3); });
  ASSERT_EQ(trace.calls.size(), 8);  // the last makes the gradient of the sum
  for (std::size_t i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    const TracedCall& call = trace.calls[i];
    EXPECT_EQ(call.op, i % 2 == 0 ? "aten::tanh" : "aten::sin");
    EXPECT_EQ(call.moment, static_cast<std::int64_t>(i));
    EXPECT_EQ(call.bytes, kBytes);
    EXPECT_TRUE(call.can_run_again);
    EXPECT_GT(call.seconds, 0.0);
    if (i == 0) {
      EXPECT_TRUE(call.inputs.empty());
    } else {
      EXPECT_THAT(call.inputs, ElementsAre(static_cast<std::int64_t>(i) - 1));
    }
    // tanh saves its result, and sin its argument, which is the same; sin's result is saved by
    // nobody: the next tanh saves its own.
    EXPECT_EQ(call.saved, i % 2 == 0);
    EXPECT_EQ(call.saved_bytes, call.saved ? kBytes : 0);
    if (call.saved) {
      EXPECT_THAT(call.saved_by, ElementsAre("aten::tanh", "aten::sin"));
      EXPECT_EQ(call.reads.size(), 2);
      EXPECT_THAT(call.reads, testing::Each(Gt(6)));
      EXPECT_GE(call.released_after, call.reads.back());
    } else {
      EXPECT_EQ(call.released_after, -1);
    }
    // tanh's is a temporary, sin's is y until the next sin has run.
    EXPECT_EQ(call.held_until, static_cast<std::int64_t>(i) + (i % 2 == 1 && i < 5 ? 2 : 1));
  }
  EXPECT_EQ(trace.calls[6].op, "aten::sum");
  EXPECT_GT(trace.calls[0].reads.front(), trace.calls[4].reads.back());
  EXPECT_GT(trace.seconds, trace.recording_seconds);
  EXPECT_EQ(trace.replay_seconds, 0.0);
}

TEST_F(PlannedBudgetTest, ATraceTellsResultsThatAreSavedFromThoseThatAreNot) {
  torch::nn::GroupNorm norm(torch::nn::GroupNormOptions(4, kSide));
  const StepTrace trace = trace_of([&] { norm(leaf_ * 2).relu().sum().backward(); });
  const auto call = std::ranges::find(trace.calls, "aten::native_group_norm", &TracedCall::op);
  ASSERT_NE(call, trace.calls.end());
  EXPECT_FALSE(call->saved);
  EXPECT_EQ(call->bytes, kBytes);
  // Its statistics are small, and stand for themselves.
  const TracedCall& statistics = *std::next(call);
  EXPECT_EQ(statistics.op, call->op);
  EXPECT_EQ(statistics.moment, call->moment);
  EXPECT_EQ(statistics.inputs, call->inputs);
  EXPECT_TRUE(statistics.saved);
  EXPECT_EQ(statistics.bytes, 2 * kSide * 4 * 4);  // of each example and group
  EXPECT_EQ(statistics.saved_bytes, statistics.bytes);
}

TEST_F(PlannedBudgetTest, ATraceTellsSavedResultsOfACallFromOthersOfTheirSize) {
  const StepTrace trace = trace_of([&] {
    const auto values = std::get<0>(leaf_.t().contiguous().t().sort(1));
    values.relu().sum().backward();
  });
  const auto call = std::ranges::find(trace.calls, "aten::sort", &TracedCall::op);
  ASSERT_NE(call, trace.calls.end());
  EXPECT_EQ(call->saved_bytes, 2 * kBytes);  // the indices
  EXPECT_EQ(call->bytes, 3 * kBytes);
}

TEST_F(PlannedBudgetTest, ASmallResultThatTheProgramHoldsDoesNotHoldItsCall) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 8));
  const StepTrace trace = trace_of([&] {
    const auto [output, state] = lstm(leaf_.view({kSide, 8, 8}));  // the state until the end
    output.cos().sum().backward();
  });
  const auto call = std::ranges::find(trace.calls, "aten::mkldnn_rnn_layer", &TracedCall::op);
  if (call == trace.calls.end()) GTEST_SKIP() << "no oneDNN on this machine";
  EXPECT_LT(call->held_until, static_cast<std::int64_t>(trace.calls.size()));
}

TEST_F(PlannedBudgetTest, ACallMayChangeTwoViewsOfOneStorage) {
  const auto forward = [this] {
    at::Tensor y = leaf_.tanh();
    const at::Tensor scale = leaf_.detach() * 0 + 1;
    at::_foreach_mul_({scale.narrow(0, 0, 8), scale.narrow(0, 8, 8)}, 2.0);
    for (int i = 0; i < 6; ++i) y = (y * scale).sin();
    return y.sum();
  };
  const auto pass = [&] { forward().backward(); };
  zero_gradient();
  pass();
  const at::Tensor plain = leaf_.grad().clone();
  const StepTrace trace = trace_of(pass);
  const auto plan = keep_all(trace);
  for (auto& call : plan->calls) {
    if (call.op == "aten::_foreach_mul_") call.disposition = Disposition::recompute;
  }
  std::int64_t replayed = 0;
  for (int maps = 14; maps > 5; --maps) {
    MemoryBudget budget({.limit_bytes = tracker_.live().total() + maps * kBytes, .plan = plan});
    zero_gradient();
    try {
      pass();
    } catch (const MemoryLimitError&) {
      break;
    }
    EXPECT_TRUE(leaf_.grad().equal(plain)) << maps;
    EXPECT_EQ(budget.statistics().strayed_passes, 0);
    replayed += budget.statistics().replayed;
  }
  EXPECT_GT(replayed, 0);
}

TEST_F(PlannedBudgetTest, ATraceAccountsForAllMemory) {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(kSide, 4 * kSide));
    net->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(true)));
    net->push_back(torch::nn::Dropout(0.1));
    net->push_back(torch::nn::Linear(4 * kSide, kSide));
    net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kSide})));
  }
  const auto pass = [&] { net->forward(leaf_).pow(2).mean().backward(); };
  pass();
  tracker_.reset_peak();
  pass();
  const std::int64_t plain = tracker_.peak().total();
  const StepTrace trace = trace_of(pass);
  EXPECT_EQ(trace.peak_bytes, plain);
  EXPECT_NEAR(static_cast<double>(traced_peak(trace)), static_cast<double>(plain),
              0.01 * static_cast<double>(plain));
  // Under a limit the program looks the same.
  const std::int64_t live = tracker_.live().total();
  const StepTrace limited = trace_of(pass, live + (plain - live) / 2);
  EXPECT_GT(limited.replay_seconds, 0.0);
  ASSERT_EQ(limited.calls.size(), trace.calls.size());
  for (std::size_t i = 0; i < trace.calls.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(limited.calls[i].op, trace.calls[i].op);
    EXPECT_EQ(limited.calls[i].bytes, trace.calls[i].bytes);
    EXPECT_EQ(limited.calls[i].inputs, trace.calls[i].inputs);
    EXPECT_EQ(limited.calls[i].reads, trace.calls[i].reads);
    EXPECT_EQ(limited.calls[i].released_after, trace.calls[i].released_after);
    EXPECT_EQ(limited.calls[i].held_until, trace.calls[i].held_until);
  }
  EXPECT_NEAR(static_cast<double>(traced_peak(limited)), static_cast<double>(plain),
              0.03 * static_cast<double>(plain));
}

TEST_F(PlannedBudgetTest, DropsWhatThePlanSaysAndKeepsTheRest) {
  const StepTrace trace = trace_of([this] { chain(12); });
  const auto plan = keep_all(trace);
  for (std::size_t i = 8; i < 16; ++i) plan->calls[i].disposition = Disposition::recompute;
  zero_gradient();
  chain(12);
  const at::Tensor plain = leaf_.grad().clone();
  // Twelve results are saved; four of them are in the plan, and two have to go.
  const std::int64_t live = tracker_.live().total();
  MemoryBudget budget({.limit_bytes = live + 12 * kBytes + kBytes / 2, .plan = plan});
  for (int i = 0; i < 3; ++i) {
    const auto before = budget.statistics();
    zero_gradient();
    chain(12);
    EXPECT_TRUE(leaf_.grad().equal(plain));
    const auto after = budget.statistics();
    EXPECT_GT(after.evicted, before.evicted);
    // From the result kept before: sin, tanh, sin, tanh ...
    EXPECT_LE(after.replayed - before.replayed, 8);
    EXPECT_EQ(after.planned_passes, i);
  }
  EXPECT_EQ(budget.statistics().strayed_passes, 0);
}

TEST_F(PlannedBudgetTest, WhatATraceIsGivenToIsNoPartOfAnyPass) {
  MemoryBudget budget({});
  std::vector<StepTrace> traces;
  budget.trace([&](const StepTrace& trace) {
    traces.push_back(trace);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  });
  for (int i = 0; i < 4; ++i) chain(3);
  ASSERT_EQ(traces.size(), 3);
  for (const StepTrace& trace : traces) {
    EXPECT_LT(trace.seconds, 0.3);
    EXPECT_LT(trace.recording_seconds, trace.seconds);
  }
}

TEST_F(PlannedBudgetTest, APassThatStraysGoesOnWithoutThePlan) {
  const StepTrace trace = trace_of([this] { chain(12); });
  const std::int64_t live = tracker_.live().total();
  MemoryBudget budget({.limit_bytes = live + 9 * kBytes, .plan = keep_all(trace)});
  int passes = 0;
  budget.on_pass([&](const EvictionPlan*) { ++passes; });
  zero_gradient();
  at::Tensor y = leaf_;
  for (int i = 0; i < 12; ++i) y = i == 5 ? y.tanh().cos() : y.tanh().sin();
  y.sum().backward();
  EXPECT_GT(budget.statistics().replayed, 0);
  EXPECT_EQ(budget.statistics().strayed_passes, 1);
  chain(12);  // the next pass follows it again
  chain(12);
  EXPECT_EQ(budget.statistics().planned_passes, 1);
  EXPECT_EQ(budget.statistics().strayed_passes, 1);
  EXPECT_EQ(passes, 2);  // the last has not ended yet
}

TEST_F(PlannedBudgetTest, WhatIsOffloadedComesBackWithoutARun) {
  const StepTrace trace = trace_of([this] { chain(12); });
  zero_gradient();
  chain(12);
  const at::Tensor plain = leaf_.grad().clone();
  const auto plan = keep_all(trace);
  for (auto& call : plan->calls) call.disposition = Disposition::offload;
  const auto stash = std::make_shared<HostStash>();
  const std::int64_t live = tracker_.live().total();
  MemoryBudget budget({.limit_bytes = live + 8 * kBytes, .plan = plan, .stash = stash});
  for (const bool full : {false, true}) {
    stash->full = full;
    zero_gradient();
    const auto before = budget.statistics();
    chain(12);
    EXPECT_TRUE(leaf_.grad().equal(plain));
    const auto after = budget.statistics();
    // A full stash leaves replaying.
    EXPECT_EQ(after.replayed > before.replayed, full);
    EXPECT_EQ(after.offloaded > before.offloaded, !full);
    EXPECT_EQ(after.fetched - before.fetched, after.offloaded - before.offloaded);
  }
  EXPECT_EQ(stash->gets, stash->puts);
  EXPECT_EQ(tracker_.live(base::Arena::host).total(), 0);
}

TEST_F(PlannedBudgetTest, WhatIsLeftToOthersIsNotTaken) {
  const StepTrace trace = trace_of([this] { chain(6); });
  const auto plan = keep_all(trace);
  for (auto& call : plan->calls) call.disposition = Disposition::leave;
  const MemoryBudget budget({.plan = plan});
  const std::int64_t live = tracker_.live().total();
  at::Tensor y = leaf_;
  for (int i = 0; i < 6; ++i) y = y.tanh().sin();
  EXPECT_GE(tracker_.live().total() - live, 6 * kBytes);
  y.sum().backward();
  EXPECT_EQ(budget.statistics().evicted, 0);
}

// Whole numbers in a byte each.
class ByteEncoder final : public Encoder {
 public:
  std::optional<plane::saved::Packed> encode(const plane::saved::Value& value,
                                             double max_ratio) override {
    ++asked;
    if (value.tensor.scalar_type() != at::kFloat || max_ratio < 0.25) return std::nullopt;
    at::Tensor small = value.tensor.to(at::kChar);
    if (!small.to(at::kFloat).equal(value.tensor)) return std::nullopt;
    return plane::saved::Packed{
        .payload = {std::move(small)},
        .restore = [](std::vector<at::Tensor> payload) { return payload[0].to(at::kFloat); }};
  }
  int asked = 0;
};

TEST_F(PlannedBudgetTest, SmallerFormsServeBackwardAndGoWhereMemoryIsShortAllTheSame) {
  const at::Tensor w =
      torch::randint(0, 2, {1 << 16}).mul(2).sub(1).to(at::kFloat).requires_grad_();
  const at::Tensor start = torch::randint(-100, 100, {1 << 16}).to(at::kFloat);
  const auto step = [&] {
    at::Tensor y = start;
    for (int i = 0; i < 16; ++i) y = y * w;
    y.sum().backward();
    return std::exchange(w.mutable_grad(), at::Tensor());
  };
  const at::Tensor plain = step();
  const auto bytes = static_cast<std::int64_t>(start.nbytes());
  const auto run = [&](MemoryBudget& budget) {
    StepTrace trace;
    budget.trace([&](const StepTrace& pass) { trace = pass; });
    std::vector<at::Tensor> got;
    for (int i = 0; i < 2; ++i) got.push_back(step());
    for (const at::Tensor& gradient : got) EXPECT_TRUE(gradient.equal(plain));
    return trace;
  };
  StepTrace whole;
  {
    MemoryBudget recorder({});
    whole = run(recorder);
  }
  struct Case {
    std::int64_t values;  // that there is room for: all in smaller form, or few of those
    bool planned, replays;
  };
  for (const Case& c : {Case{14, false, false}, Case{9, false, true}, Case{14, true, false}}) {
    SCOPED_TRACE(testing::Message() << c.values << " " << c.planned);
    MemoryBudget budget({.limit_bytes = tracker_.live().total() + c.values * bytes,
                         .encoder = std::make_shared<ByteEncoder>(),
                         .encode_unplanned = !c.planned});
    if (c.planned) {
      const auto plan = keep_all(whole);
      for (auto& call : plan->calls)
        if (call.bytes > 0) call.disposition = Disposition::leave;
      budget.set_plan(plan);
    }
    const StepTrace trace = run(budget);
    const auto statistics = budget.statistics();
    EXPECT_EQ(statistics.encoded, 2 * 15);  // the first factor is from outside
    EXPECT_EQ(statistics.replayed > 0, c.replays);
    EXPECT_EQ(statistics.strayed_passes, 0);
    if (!c.replays) EXPECT_EQ(statistics.decoded, statistics.encoded);
    // The trace is that of the plain program, whatever form values had.
    ASSERT_EQ(trace.calls.size(), whole.calls.size());
    for (std::size_t i = 0; i < whole.calls.size(); ++i) {
      EXPECT_EQ(trace.calls[i].saved, whole.calls[i].saved) << i;
      EXPECT_EQ(trace.calls[i].saved_bytes, whole.calls[i].saved_bytes) << i;
      EXPECT_EQ(trace.calls[i].reads, whole.calls[i].reads) << i;
      EXPECT_EQ(trace.calls[i].released_after, whole.calls[i].released_after) << i;
    }
    ASSERT_EQ(trace.moments.size(), whole.moments.size());
    const std::int64_t more = trace.moments[0].rest_bytes - whole.moments[0].rest_bytes;
    for (std::size_t i = 0; i < whole.moments.size(); ++i) {
      EXPECT_LE(std::abs(trace.moments[i].rest_bytes - whole.moments[i].rest_bytes - more),
                bytes / 64)
          << i;
    }
  }
}

TEST_F(PlannedBudgetTest, APassFollowsThePlanThatHasItsCalls) {
  const auto branch = [this](int n) {
    at::Tensor y = leaf_;
    for (int i = 0; i < 3; ++i) y = y.tanh();
    for (int i = 0; i < n; ++i) y = y.sin();
    y.sum().backward();
  };
  const auto wave = [this] { leaf_.tanh().cos().sum().backward(); };
  std::vector<ProgramPlan> plans;
  for (const int n : {4, 2}) plans.push_back({.plan = keep_all(trace_of([&] { branch(n); }))});
  plans.push_back({.plan = keep_all(trace_of(wave)), .online = true});
  MemoryBudget budget({});
  std::vector<const EvictionPlan*> followed;
  budget.on_pass([&](const EvictionPlan* plan) { followed.push_back(plan); });
  budget.set_plans(plans);
  branch(4);
  branch(2);  // ends where the first goes on
  wave();
  branch(3);  // of none
  branch(4);
  wave();
  const std::vector<const EvictionPlan*> expected{
      plans[0].plan.get(), plans[1].plan.get(), plans[2].plan.get(), nullptr, plans[0].plan.get()};
  EXPECT_EQ(followed, expected);
  EXPECT_EQ(budget.statistics().strayed_passes, 1);
  EXPECT_EQ(budget.statistics().planned_passes, 4);
}

TEST_F(PlannedBudgetTest, RandomProgramsEqualPlainUnderRandomPlans) {
  std::mt19937 random(9);
  int refused = 0;
  std::int64_t offloaded = 0, replayed = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    tracker_.reset_peak();
    const std::int64_t live = tracker_.live().total();
    const auto plain = random_program(seed);
    const at::Tensor next = torch::rand({3});
    const std::int64_t peak = tracker_.peak().total() - live;
    const double share = 0.35 + 0.5 * static_cast<double>(random() % 1000) / 1000.0;
    const auto stash = std::make_shared<HostStash>();
    MemoryBudget budget(
        {.limit_bytes =
             live + peak / 8 + static_cast<std::int64_t>(share * static_cast<double>(peak)),
         .stash = stash});
    std::vector<at::Tensor> limited;
    try {
      random_program(seed);
      budget.trace([&](const StepTrace& trace) {
        const auto plan = keep_all(trace);
        for (auto& call : plan->calls) call.disposition = static_cast<Disposition>(random() % 4);
        budget.set_plan(plan);
        budget.trace(nullptr);
      });
      random_program(seed);
      limited = random_program(seed);
    } catch (const MemoryLimitError&) {
      ++refused;
      continue;
    }
    for (std::size_t i = 0; i < plain.size(); ++i)
      ASSERT_TRUE(same_bits(plain[i], limited[i])) << i;
    ASSERT_TRUE(torch::rand({3}).equal(next));
    ASSERT_EQ(budget.statistics().strayed_passes, 0);
    offloaded += budget.statistics().offloaded;
    replayed += budget.statistics().replayed;
  }
  EXPECT_LT(refused, 20);
  EXPECT_GT(offloaded, 0);
  EXPECT_GT(replayed, 0);
}

}  // namespace
}  // namespace gradus::recompute
