#include <gradus/plan/scale_trace.h>

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/simulate.h>
#include <gradus/plan/synthetic_trace.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus::plan {
namespace {

using recompute::StepTrace;
using ::testing::HasSubstr;

StepTrace sized(std::int64_t size) {
  StepTrace trace = testing::transformer_trace(2, 1 << 10);
  for (auto& call : trace.calls) {
    call.bytes *= size;
    call.seconds *= 1.0 + 0.5 * static_cast<double>(size);
  }
  for (auto& moment : trace.moments) {
    moment.rest_bytes += 100 * size;
    moment.other_bytes += 300 * size;
  }
  trace.recording_seconds = 1e-3;
  trace.seconds = 1e-3 + 0.2 + 0.1 * static_cast<double>(size);
  return trace;
}

TEST(ScaleTraceTest, BytesOfAThirdSizeAreThoseThatItHas) {
  const StepTrace scaled = scale_trace(sized(2), 2, sized(3), 3, 32), real = sized(32);
  EXPECT_EQ(program_difference(scaled, real), "");
  for (std::size_t i = 0; i < real.calls.size(); ++i) {
    EXPECT_EQ(scaled.calls[i].bytes, real.calls[i].bytes) << i;
    EXPECT_NEAR(scaled.calls[i].seconds, real.calls[i].seconds, 1e-9) << i;
  }
  for (std::size_t i = 0; i < real.moments.size(); ++i) {
    EXPECT_EQ(scaled.moments[i].other_bytes, real.moments[i].other_bytes) << i;
    EXPECT_EQ(scaled.moments[i].rest_bytes, real.moments[i].rest_bytes) << i;
  }
  EXPECT_NEAR(scaled.seconds, real.seconds, 1e-9);
  EXPECT_EQ(scaled.recording_seconds, real.recording_seconds);
}

TEST(ScaleTraceTest, NoiseMakesWorkNeitherFreeNorDearerThanMeasured) {
  StepTrace small = sized(2), large = sized(3);
  small.calls[1].seconds = 2.0 * large.calls[1].seconds;  // a slope below zero
  small.calls[2].seconds = 0.0;                           // one above the time of an example
  const StepTrace scaled = scale_trace(small, 2, large, 3, 12);
  EXPECT_NEAR(scaled.calls[1].seconds, large.calls[1].seconds * (1.0 + 0.1 * 3.0), 1e-12);
  EXPECT_NEAR(scaled.calls[2].seconds, large.calls[2].seconds * 4.0, 1e-12);
}

TEST(ScaleTraceTest, OneSizeServesForItselfOnly) {
  const StepTrace one = sized(1);
  EXPECT_EQ(scale_trace(one, 1, one, 1, 1).calls[3].bytes, one.calls[3].bytes);
  EXPECT_THROW(scale_trace(one, 1, one, 1, 2), UserError);
  EXPECT_THROW(scale_trace(one, 0, one, 1, 2), UserError);
}

TEST(ScaleTraceTest, WhatCompressionMakesOfResultsGrowsWithThem) {
  const std::vector<CompressedResult> two{
      {.bytes = 40, .encode_seconds = 2.0, .decode_seconds = 1.0}, {}, {.bytes = 8}};
  const std::vector<CompressedResult> three{
      {.bytes = 60, .encode_seconds = 3.0, .decode_seconds = 1.5}, {.bytes = 9}, {.bytes = 8}};
  const auto ten = scale_compressed(two, 2, three, 3, 10);
  ASSERT_EQ(ten.size(), 3u);
  EXPECT_EQ(ten[0].bytes, 200);
  EXPECT_DOUBLE_EQ(ten[0].encode_seconds, 10.0);
  EXPECT_DOUBLE_EQ(ten[0].decode_seconds, 5.0);
  EXPECT_EQ(ten[1].bytes, 0);  // too small to be compressed at one size
  EXPECT_EQ(ten[2].bytes, 8);
  EXPECT_TRUE(scale_compressed({}, 2, three, 3, 10).empty());
  EXPECT_THROW(scale_compressed({{}}, 2, three, 3, 10), UserError);
  EXPECT_THROW(scale_compressed(two, 2, two, 2, 10), UserError);
}

TEST(ScaleTraceTest, RefusesTracesOfTwoPrograms) {
  const StepTrace small = sized(2);
  const auto refusal = [&](const std::function<void(StepTrace&)>& change) -> std::string {
    StepTrace large = sized(3);
    change(large);
    try {
      scale_trace(small, 2, large, 3, 4);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal([](StepTrace&) {}), "");
  EXPECT_THAT(refusal([](StepTrace& t) { t.calls.pop_back(); }), HasSubstr("calls"));
  EXPECT_THAT(refusal([](StepTrace& t) { t.moments.pop_back(); }), HasSubstr("moments"));
  EXPECT_THAT(refusal([](StepTrace& t) { t.calls[4].op = "aten::bmm"; }),
              HasSubstr("call 4 is test::step in one and aten::bmm in the other"));
  EXPECT_THAT(refusal([](StepTrace& t) { t.calls[4].inputs.clear(); }), HasSubstr("what it reads"));
  EXPECT_THAT(refusal([](StepTrace& t) { t.calls[5].reads.push_back(70); }),
              HasSubstr("when backward reads it"));
  EXPECT_THAT(refusal([](StepTrace& t) { t.moments[9].backward = true; }), HasSubstr("moment 9"));
}

// A pass of a small network over `size` examples, traced without a limit.
StepTrace real_trace(torch::nn::Sequential& network, std::int64_t size) {
  std::vector<StepTrace> traces;
  recompute::MemoryBudget budget({});
  budget.trace([&](const StepTrace& trace) { traces.push_back(trace); });
  for (int i = 0; i < 3; ++i) {
    network->zero_grad(/*set_to_none=*/false);
    network->forward(torch::ones({size, 24})).square().mean().backward();
  }
  return traces.at(1);
}

TEST(ScaleTraceTest, PredictsWhatARealProgramOfAnotherSizeIsMeasuredToNeed) {
  at::set_num_threads(1);
  base::MemoryTracker::install();
  torch::manual_seed(1);
  torch::nn::Sequential network(torch::nn::Linear(24, 96), torch::nn::Tanh(),
                                torch::nn::Linear(96, 96), torch::nn::GELU(),
                                torch::nn::Linear(96, 8));
  const StepTrace scaled = scale_trace(real_trace(network, 2), 2, real_trace(network, 3), 3, 64);
  const StepTrace real = real_trace(network, 64);
  ASSERT_EQ(program_difference(scaled, real), "");
  for (std::size_t i = 0; i < real.calls.size(); ++i)
    EXPECT_EQ(scaled.calls[i].bytes, real.calls[i].bytes) << real.calls[i].op;
  const std::int64_t predicted = simulate(scaled, {}, 0).peak_bytes;
  EXPECT_NEAR(static_cast<double>(predicted), static_cast<double>(real.peak_bytes),
              0.02 * static_cast<double>(real.peak_bytes));
}

}  // namespace
}  // namespace gradus::plan
