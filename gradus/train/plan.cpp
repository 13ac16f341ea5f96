#include <gradus/train/plan.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <set>
#include <string_view>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>

namespace gradus::train {
namespace {

std::int64_t highest(const base::MemoryTimeline& timeline) {
  std::int64_t peak = 0;
  for (const auto& point : timeline) peak = std::max(peak, point.live.total());
  return peak;
}

std::int64_t along_line(std::int64_t y1, std::int64_t x1, std::int64_t y2, std::int64_t x2, std::int64_t x) {
  return y1 + static_cast<std::int64_t>(std::llround(static_cast<double>(y2 - y1) / static_cast<double>(x2 - x1) *
                                                     static_cast<double>(x - x1)));
}

std::int64_t predict_timeline(const base::MemoryTimeline& small, std::int64_t small_size,
                              const base::MemoryTimeline& large, std::int64_t large_size, std::int64_t size) {
  if (small.size() != large.size()) {
    return along_line(highest(small), small_size, highest(large), large_size, size);
  }
  std::int64_t peak = 0;
  for (std::size_t i = 0; i < small.size(); ++i) {
    peak = std::max(peak, along_line(small[i].live.total(), small_size, large[i].live.total(), large_size, size));
  }
  return peak;
}

// Numbers of recomputed segments worth measuring: all of few, evenly spread over many.
std::vector<std::int64_t> measured_segments(std::int64_t segments) {
  constexpr std::int64_t kMost = 9;
  std::set<std::int64_t> chosen;
  const std::int64_t count = std::min(segments + 1, kMost);
  for (std::int64_t i = 0; i < count; ++i) {
    chosen.insert(count == 1 ? 0 : (segments * i + (count - 1) / 2) / (count - 1));
  }
  return {chosen.begin(), chosen.end()};
}

struct Measured {
  Trial small, large;
  std::int64_t small_size, large_size;

  std::int64_t peak(std::int64_t size, bool accumulating) const {
    if (large_size == small_size) return small.peak_bytes();
    return predict_peak(small, small_size, large, large_size, size, accumulating);
  }
  // Seconds of one micro-batch of `size`; a noisy slope must not make more work cheaper.
  double seconds(std::int64_t size) const {
    const double per_sequence = large.seconds / static_cast<double>(large_size);
    const double slope = large_size == small_size
                             ? per_sequence
                             : (large.seconds - small.seconds) / static_cast<double>(large_size - small_size);
    return large.seconds + std::clamp(slope, 0.5 * per_sequence, per_sequence) * static_cast<double>(size - large_size);
  }
};

}  // namespace

std::vector<std::int64_t> Plan::sizes(std::int64_t batch) const {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    const std::int64_t size = batch / micro_batches + (i < batch % micro_batches ? 1 : 0);
    if (size > 0) result.push_back(size);
  }
  return result;
}

PlanRequest parse_plan_request(const std::string& text, std::int64_t batch, std::int64_t segments) {
  if (text == "auto") return {.automatic = true, .plan = {}};
  if (text == "none") return {};
  const auto refuse = [&] {
    throw UserError(base::join("[plan] a plan is auto, none, or micro-batch=N,recompute=N with N between 1 and ", batch,
                               " (the batch) and between 0 and ", segments, " (the blocks); got '", text, "'"));
  };
  std::map<std::string_view, std::int64_t> values;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) refuse();
    std::int64_t value = 0;
    const std::string_view number = part.substr(equals + 1);
    const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (status != std::errc{} || end != number.data() + number.size()) refuse();
    if (!values.emplace(part.substr(0, equals), value).second) refuse();
  }
  if (values.size() != 2 || !values.contains("micro-batch") || !values.contains("recompute")) refuse();
  const std::int64_t size = values["micro-batch"], recomputed = values["recompute"];
  if (size < 1 || size > batch || recomputed < 0 || recomputed > segments) refuse();
  return {.automatic = false, .plan = {.micro_batches = (batch + size - 1) / size, .recomputed = recomputed}};
}

std::string describe_plan(const Plan& plan, std::int64_t batch, std::int64_t segments) {
  return base::join("micro-batch ", plan.largest(batch), " (", plan.micro_batches, " a step), ", plan.recomputed, " of ",
                    segments, " blocks recomputed");
}

std::int64_t Trial::peak_bytes() const {
  return std::max({highest(first), highest(second), optimizer_peak_bytes});
}

std::int64_t predict_peak(const Trial& small, std::int64_t small_size, const Trial& large, std::int64_t large_size,
                          std::int64_t size, bool accumulating) {
  GRADUS_CHECK("plan", small_size != large_size, "two different sizes are needed; got ", small_size, " twice");
  std::int64_t peak = std::max(small.optimizer_peak_bytes, large.optimizer_peak_bytes);
  peak = std::max(peak, predict_timeline(small.first, small_size, large.first, large_size, size));
  if (accumulating) peak = std::max(peak, predict_timeline(small.second, small_size, large.second, large_size, size));
  return peak;
}

PlanChoice choose_plan(std::int64_t batch, std::int64_t segments, std::int64_t limit_bytes, const TrialRunner& run) {
  PlanChoice choice;
  std::map<std::int64_t, Measured> measured;  // by recomputed segments
  const std::vector<std::int64_t> levels = measured_segments(segments);
  // From everything recomputed (least memory) to nothing: what does not fit stays out.
  for (auto level = levels.rbegin(); level != levels.rend(); ++level) {
    std::optional<Trial> small = run(1, *level, batch > 1);
    if (!small) break;
    std::optional<Trial> large = batch > 1 ? run(2, *level, true) : std::nullopt;
    const std::int64_t large_size = large ? 2 : 1;
    Trial large_trial = large ? std::move(*large) : *small;
    measured.emplace(*level, Measured{std::move(*small), std::move(large_trial), 1, large_size});
  }
  if (measured.empty()) {
    throw UserError(base::join("[plan] the memory limit of ", base::format_bytes(limit_bytes),
                               " is below what this model needs for one sequence with every block recomputed; raise "
                               "--memory, shorten --context, or make the model smaller"));
  }
  const auto plain = measured.find(0);
  if (plain != measured.end() && plain->second.large_size > 1) {
    choice.plain_peak_bytes = plain->second.peak(batch, false);
  } else if (plain != measured.end() && batch == 1) {
    choice.plain_peak_bytes = plain->second.small.peak_bytes();
  }

  for (const auto& [recomputed, trials] : measured) {
    std::int64_t last_size = 0;
    for (std::int64_t count = 1; count <= batch; ++count) {
      const Plan plan{count, recomputed};
      const std::int64_t size = plan.largest(batch);
      if (size == last_size) continue;  // more micro-batches, none of them smaller
      last_size = size;
      if (size > 1 && trials.large_size == 1) continue;
      const std::int64_t peak = trials.peak(size, count > 1);
      if (limit_bytes > 0 && peak > limit_bytes) continue;
      double seconds = 0.0;
      for (const std::int64_t part : plan.sizes(batch)) seconds += trials.seconds(part);
      choice.candidates.push_back({plan, peak, seconds});
    }
  }
  // Timing noise must not decide between equals: within 3% the plan that recomputes less, then the one with
  // fewer micro-batches, counts as the faster.
  std::sort(choice.candidates.begin(), choice.candidates.end(), [](const PlanCandidate& l, const PlanCandidate& r) {
    return l.seconds != r.seconds ? l.seconds < r.seconds : l.peak_bytes < r.peak_bytes;
  });
  if (!choice.candidates.empty()) {
    const double bound = 1.03 * choice.candidates.front().seconds;
    const auto end = std::find_if(choice.candidates.begin(), choice.candidates.end(),
                                  [&](const PlanCandidate& c) { return c.seconds > bound; });
    std::sort(choice.candidates.begin(), end, [](const PlanCandidate& l, const PlanCandidate& r) {
      return l.plan.recomputed != r.plan.recomputed ? l.plan.recomputed < r.plan.recomputed
                                                    : l.plan.micro_batches < r.plan.micro_batches;
    });
  }
  // Predictions choose, a trial under the limit proves.
  std::int64_t refused = 0;
  for (const PlanCandidate& candidate : choice.candidates) {
    const std::int64_t count = candidate.plan.micro_batches;
    const std::optional<Trial> proof = run(candidate.plan.largest(batch), candidate.plan.recomputed, count > 1);
    if (!proof || (limit_bytes > 0 && proof->peak_bytes() > limit_bytes)) {
      ++refused;
      continue;
    }
    choice.plan = candidate.plan;
    choice.predicted_peak_bytes = candidate.peak_bytes;
    choice.trial_peak_bytes = proof->peak_bytes();
    choice.reason = base::join("the fastest of ", choice.candidates.size(), " plans that fit by prediction",
                               refused > 0 ? base::join(" (", refused, " failed their trial)") : "", "; a trial step took ",
                               base::format_bytes(choice.trial_peak_bytes));
    if (count == 1 && candidate.plan.recomputed == 0) choice.reason = "plain training fits; " + choice.reason;
    return choice;
  }
  throw UserError(base::join("[plan] no plan fits the memory limit of ", base::format_bytes(limit_bytes),
                             " though one sequence with every block recomputed does not fail; raise --memory by a few "
                             "per cent"));
}

}  // namespace gradus::train
