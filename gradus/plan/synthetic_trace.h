#pragma once

// Traces of programs that are easy to reason about, for tests.

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <gradus/recompute/step_trace.h>

namespace gradus::plan::testing {

/// One call of a program: what it reads, and whether autograd saves its result.
struct Step {
  std::int64_t bytes = 1;
  double seconds = 1.0;
  std::vector<std::int64_t> inputs{};
  bool saved = true;
  bool can_run_again = true;
};

/// Runs the steps, then backward in reverse: the backward of a call reads its saved inputs and
/// itself, if saved, then lets its result go. @p other is alive throughout.
inline recompute::StepTrace trace_of(const std::vector<Step>& steps, std::int64_t other = 0,
                                     std::int64_t workspace = 0) {
  recompute::StepTrace trace;
  const auto n = static_cast<std::int64_t>(steps.size());
  for (std::int64_t i = 0; i < n; ++i) {
    recompute::TracedCall call;
    call.op = "test::step";
    call.moment = call.held_until = i;
    call.seconds = steps[i].seconds;
    call.bytes = steps[i].bytes;
    call.can_run_again = steps[i].can_run_again;
    call.inputs = steps[i].inputs;
    call.saved = steps[i].saved;
    trace.calls.push_back(call);
    trace.seconds += 3.0 * steps[i].seconds;
    for (const std::int64_t input : steps[i].inputs) trace.calls[input].held_until = i;
  }
  for (std::int64_t m = 0; m < 2 * n; ++m)
    trace.moments.push_back({other + workspace, other, 0, m >= n});
  for (std::int64_t i = n - 1; i >= 0; --i) {
    const std::int64_t moment = 2 * n - 1 - i;
    const auto read = [&](std::int64_t c) {
      if (!trace.calls[c].saved) return;
      trace.calls[c].reads.push_back(moment);
      trace.calls[c].released_after = moment;
    };
    read(i);
    for (const std::int64_t input : steps[i].inputs)
      if (trace.calls[input].reads.empty() || trace.calls[input].reads.back() != moment)
        read(input);
  }
  return trace;
}

/// A chain: each call reads the one before, and backward of a call reads its result alone.
inline recompute::StepTrace chain_trace(const std::vector<std::int64_t>& bytes,
                                        const std::vector<double>& seconds) {
  recompute::StepTrace trace;
  const auto n = static_cast<std::int64_t>(bytes.size());
  for (std::int64_t i = 0; i < n; ++i) {
    recompute::TracedCall call;
    call.op = "test::step";
    call.moment = i;
    call.held_until = std::min(i + 1, n - 1);
    call.seconds = seconds[i];
    call.bytes = bytes[i];
    call.can_run_again = call.saved = true;
    if (i > 0) call.inputs = {i - 1};
    call.reads = {2 * n - 1 - i};
    call.released_after = 2 * n - 1 - i;
    trace.calls.push_back(call);
    trace.seconds += 3.0 * seconds[i];
  }
  for (std::int64_t m = 0; m < 2 * n; ++m) trace.moments.push_back({0, 0, 0, m >= n});
  return trace;
}

/// Blocks of attention and feed-forward of a transformer; 14 calls each, the additions unsaved.
inline recompute::StepTrace transformer_trace(std::int64_t blocks, std::int64_t unit = 1 << 20) {
  std::vector<Step> steps{{unit, 1e-4, {}}};
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto at = [&] { return static_cast<std::int64_t>(steps.size()) - 1; };
    const auto add = [&](Step step) {
      steps.push_back(std::move(step));
      return at();
    };
    const std::int64_t x = at();
    const std::int64_t norm = add({unit, 4e-4, {x}});
    const std::int64_t qkv = add({3 * unit, 6e-3, {norm}});
    const std::int64_t attention = add({unit, 5e-3, {qkv}});
    const std::int64_t mixed = add({unit, 2e-3, {attention}, false});
    const std::int64_t dropped = add({unit, 5e-4, {mixed}, false});
    const std::int64_t mask = add({unit / 4, 5e-4, {dropped}});
    const std::int64_t middle = add({unit, 3e-4, {x, dropped, mask}});
    const std::int64_t norm2 = add({unit, 4e-4, {middle}});
    const std::int64_t wide = add({4 * unit, 8e-3, {norm2}});
    const std::int64_t gelu = add({4 * unit, 3e-3, {wide}});
    const std::int64_t narrow = add({unit, 8e-3, {gelu}, false});
    const std::int64_t view = add({0, 1e-6, {narrow}, false});
    add({unit, 3e-4, {middle, view}});
  }
  return trace_of(steps, 20 * unit, unit / 2);
}

/// An encoder whose outputs a decoder reads again, in reverse.
inline recompute::StepTrace unet_trace(std::int64_t depth, std::int64_t unit = 1 << 20) {
  std::vector<Step> steps;
  std::vector<std::int64_t> skips;
  const auto add = [&](Step step) {
    steps.push_back(std::move(step));
    return static_cast<std::int64_t>(steps.size()) - 1;
  };
  std::int64_t last = add({unit << depth, 1e-3, {}});
  for (std::int64_t d = depth; d > 0; --d) {
    const std::int64_t bytes = unit << d;
    last = add({bytes, 8e-3, {last}});
    last = add({bytes, 1e-3, {last}});
    last = add({bytes, 8e-3, {last}});
    skips.push_back(last);
    last = add({bytes / 4, 5e-4, {last}});
  }
  for (std::int64_t d = 1; d <= depth; ++d) {
    const std::int64_t bytes = unit << d;
    const std::int64_t up = add({bytes, 2e-3, {last}, false});
    const std::int64_t joined = add({2 * bytes, 1e-3, {up, skips.back()}});
    skips.pop_back();
    last = add({bytes, 1.2e-2, {joined}});
    last = add({bytes, 1e-3, {last}});
    last = add({bytes, 8e-3, {last}});
  }
  return trace_of(steps, unit, unit / 4);
}

/// Any graph: calls that cannot run again, views, results that the program holds for long, several
/// reads.
inline recompute::StepTrace random_trace(std::mt19937_64& random, std::int64_t calls) {
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  std::vector<Step> steps;
  for (std::int64_t c = 0; c < calls; ++c) {
    Step step;
    step.bytes = below(6) == 0 ? 0 : 1 + below(20);
    step.seconds = static_cast<double>(1 + below(50)) * 1e-3;
    for (std::int64_t k = below(3) + (c > 0 ? 1 : 0); k-- > 0 && c > 0;) {
      const std::int64_t input = std::max<std::int64_t>(0, c - 1 - below(4));
      if (std::find(step.inputs.begin(), step.inputs.end(), input) == step.inputs.end())
        step.inputs.push_back(input);
    }
    step.saved = below(10) < 7 && step.bytes > 0;
    step.can_run_again = below(12) > 0;
    steps.push_back(step);
  }
  recompute::StepTrace trace = trace_of(steps, below(10), below(5));
  for (auto& call : trace.calls) {
    if (below(8) == 0)
      call.held_until = std::min<std::int64_t>(call.held_until + below(6), 2 * calls - 1);
    if (below(10) == 0) call.copied_bytes = call.bytes;
    if (call.saved && call.released_after >= 0 && below(6) == 0)
      call.released_after = std::min<std::int64_t>(call.released_after + below(20), 2 * calls - 1);
  }
  return trace;
}

}  // namespace gradus::plan::testing
