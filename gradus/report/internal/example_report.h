#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include <gradus/report/html_report.h>

namespace gradus::report::internal {

/// For tests: the report of an invented run in every detail, with the shapes a real one has (a
/// warm-up, noise, one spike, one step without a finite loss; a step of four micro-batches whose
/// activations rise and fall).
inline ReportData example_report(std::int64_t step_count = 600) {
  constexpr std::int64_t kMiB = 1 << 20;
  constexpr double kPi = 3.14159265358979;
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal;
  ReportData data;
  data.title = "GPT on the King James Bible";
  data.status = "finished";
  data.created = "2026-11-29 20:00 UTC";
  data.model = "GPT, 6 layers, width 384, 6 heads, context 256, vocabulary 4,000";
  data.parameter_count = 12281856;
  data.plan = "micro-batch 8, recompute 4 of 6 segments";
  data.plan_reason =
      "the fastest of 14 plans that stay below the limit: predicted peak 561.3 MiB, 9% slower than "
      "without recomputation";
  data.precision = "bf16";
  data.optimizer = "adamw";
  data.effective_batch = 32;
  data.microbatch_size = 8;
  data.microbatches_per_step = 4;
  data.recomputed_segments = 4;
  data.segments = 6;
  data.limit_bytes = 600 * kMiB;
  data.plain_peak_bytes = 1740 * kMiB;
  data.plain_source = "predicted from one measured step";
  for (std::int64_t step = 1; step <= step_count; ++step) {
    const double share = static_cast<double>(step) / static_cast<double>(step_count);
    StepMetrics m;
    m.step = step;
    m.elapsed_s = 0.62 * static_cast<double>(step);
    m.loss = 2.9 + 5.4 * std::exp(-share * 7.0) + 0.09 * normal(random);
    m.lr = 6e-4 * std::min(1.0, share * 12.0) * (0.1 + 0.9 * 0.5 * (1.0 + std::cos(kPi * share)));
    m.tokens = 8192;
    m.tokens_per_s = 13200.0 + 420.0 * normal(random) - (step % 100 == 0 ? 3000.0 : 0.0);
    m.grad_norm = 0.6 + 3.0 * std::exp(-share * 20.0) + 0.05 * std::abs(normal(random));
    m.peak_bytes =
        571 * kMiB - (step == 1 ? 60 * kMiB : 0) + static_cast<std::int64_t>(2e5 * normal(random));
    if (step % (step_count / 6) == 0) m.validation_loss = m.loss + 0.12;
    if (step == step_count * 2 / 5) m.loss = m.grad_norm = std::numeric_limits<double>::quiet_NaN();
    if (step == step_count * 3 / 5) m.grad_norm = 30.0;
    data.steps.push_back(m);
  }
  data.timeline_label = "step 3";
  const auto add = [&](double time_s, double activations, double workspace, double gradients) {
    base::MemoryPoint point{.time_s = 12.5 + time_s, .live = {}};
    using Category = base::MemoryCategory;
    point.live[Category::parameters] = 47 * kMiB;
    point.live[Category::optimizer_state] = 94 * kMiB;
    point.live[Category::inputs] = kMiB / 8;
    point.live[Category::gradients] = static_cast<std::int64_t>(gradients * kMiB);
    point.live[Category::activations] = static_cast<std::int64_t>(activations * kMiB);
    point.live[Category::workspace] = static_cast<std::int64_t>(workspace * kMiB);
    data.step_timeline.push_back(point);
  };
  double time_s = 0.0;
  for (int micro = 0; micro < 4; ++micro) {
    const double base_gradients = micro == 0 ? 0.0 : 47.0;
    const double start_s = time_s;
    for (int i = 0; i < 300; ++i) {
      const double share = i / 300.0;
      add(time_s, 200.0 * share + (i % 50) * 0.9, 20.0 + (i % 7) * 9.0, base_gradients);
      time_s += 0.00018;
    }
    data.phases.push_back({"forward", 12.5 + start_s, 12.5 + time_s});
    const double middle_s = time_s;
    for (int i = 0; i < 500; ++i) {
      const double share = i / 500.0;
      add(time_s, 200.0 * (1.0 - share) + 45.0 * std::abs(std::sin(share * 4.0 * kPi)),
          30.0 + (i % 9) * 16.5, std::max(base_gradients, 47.0 * share));
      time_s += 0.00018;
    }
    data.phases.push_back({"backward", 12.5 + middle_s, 12.5 + time_s});
  }
  const double end_s = time_s;
  for (int i = 0; i < 60; ++i) {
    add(time_s, 0.0, 2.0, 47.0);
    time_s += 0.0005;
  }
  data.phases.push_back({"optimizer", 12.5 + end_s, 12.5 + time_s});
  add(time_s, 0.0, 0.0, 0.0);
  for (const auto& point : data.step_timeline)
    data.peak_bytes = std::max(data.peak_bytes, point.live.total());
  data.configuration = {
      {"data.corpus", "bible-kjv"},
      {"data.tokenizer", "sentencepiece"},
      {"data.vocabulary", "4000"},
      {"model.layers", "6"},
      {"model.width", "384"},
      {"model.heads", "6"},
      {"model.context", "256"},
      {"model.dropout", "0.1"},
      {"optim.lr", "6e-4"},
      {"optim.betas", "[0.9, 0.95]"},
      {"optim.weight_decay", "0.1"},
      {"train.batch", "32"},
      {"train.memory", "600MiB"},
      {"train.plan", "auto"},
      {"train.seed", "1"},
      {"train.output", "runs/main-with-a-rather-long-name/2026-11-29T20-00-00/output"}};
  data.environment = {{"gradus", "0.1.0"},        {"LibTorch", "2.13.0+cpu"},
                      {"device", "cpu"},          {"threads", "2"},
                      {"compiler", "clang 19.1"}, {"host memory limit", "none"}};
  data.sample_prompt = "And God said unto ";
  data.sample_text =
      "Moses, Go thou unto the children of Israel, and say unto them, Thus saith the LORD, the God "
      "of your fathers:\n"
      "And it came to pass, when the people were gathered together, that the king of Babylon came "
      "up against them, and "
      "took the city, and the gold and the silver that was found therein.";
  return data;
}

}  // namespace gradus::report::internal
