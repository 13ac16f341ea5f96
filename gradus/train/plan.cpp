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

std::int64_t along_line(std::int64_t y1, std::int64_t x1, std::int64_t y2, std::int64_t x2,
                        std::int64_t x) {
  return y1 + static_cast<std::int64_t>(
                  std::llround(static_cast<double>(y2 - y1) / static_cast<double>(x2 - x1) *
                               static_cast<double>(x - x1)));
}

std::int64_t predict_timeline(const base::MemoryTimeline& small, std::int64_t small_size,
                              const base::MemoryTimeline& large, std::int64_t large_size,
                              std::int64_t size) {
  if (small.size() != large.size()) {
    return along_line(highest(small), small_size, highest(large), large_size, size);
  }
  std::int64_t peak = 0;
  for (std::size_t i = 0; i < small.size(); ++i) {
    peak = std::max(peak, along_line(small[i].live.total(), small_size, large[i].live.total(),
                                     large_size, size));
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

// Trials of one number of recomputed segments: of two sizes, or of the one that fits.
struct Measured {
  Trial small, large;
  std::int64_t small_size = 0, large_size = 0;

  bool knows(std::int64_t size) const { return small_size != large_size || size == large_size; }
  std::int64_t peak(std::int64_t size, bool accumulating) const {
    if (small_size == large_size) return large.peak_bytes();
    return predict_peak(small, small_size, large, large_size, size, accumulating);
  }
  // Seconds of one micro-batch of `size`; a noisy slope must not make more work nearly free, or
  // dearer than it was measured.
  double seconds(std::int64_t size) const {
    const double per_sequence = large.seconds / static_cast<double>(large_size);
    const double slope =
        small_size == large_size
            ? per_sequence
            : (large.seconds - small.seconds) / static_cast<double>(large_size - small_size);
    return large.seconds + std::clamp(slope, 0.1 * per_sequence, per_sequence) *
                               static_cast<double>(size - large_size);
  }
};

// Two small sizes whose programs allocate alike: tensors with a dimension of 1 take other paths.
std::optional<Measured> measure(std::int64_t batch, std::int64_t recomputed,
                                const TrialRunner& run) {
  const std::int64_t small_size = batch >= 3 ? 2 : 1,
                     large_size = std::min<std::int64_t>(batch, small_size + 1);
  const bool accumulating = batch > 1;
  Measured measured;
  if (auto small = run(small_size, recomputed, accumulating)) {
    measured.small = measured.large = std::move(*small);
    measured.small_size = measured.large_size = small_size;
    if (large_size == small_size) return measured;
    if (auto large = run(large_size, recomputed, accumulating)) {
      measured.large = std::move(*large);
      measured.large_size = large_size;
    }
    return measured;
  }
  if (small_size == 1) return std::nullopt;
  auto one = run(1, recomputed, accumulating);
  if (!one) return std::nullopt;
  measured.small = measured.large = std::move(*one);
  measured.small_size = measured.large_size = 1;
  return measured;
}

constexpr double kTimingNoise = 1.05;  // plans closer than this count as equally fast

// Candidates by time; among equally fast ones those that recompute less, then those of fewer
// micro-batches.
void sort_by_time(std::vector<PlanCandidate>& candidates) {
  std::sort(candidates.begin(), candidates.end(),
            [](const PlanCandidate& l, const PlanCandidate& r) {
              return l.seconds != r.seconds ? l.seconds < r.seconds : l.peak_bytes < r.peak_bytes;
            });
  if (candidates.empty()) return;
  const double bound = kTimingNoise * candidates.front().seconds;
  const auto end =
      std::find_if(candidates.begin(), candidates.end(),
                   [&](const PlanCandidate& candidate) { return candidate.seconds > bound; });
  std::sort(candidates.begin(), end, [](const PlanCandidate& l, const PlanCandidate& r) {
    return l.plan.recomputed != r.plan.recomputed ? l.plan.recomputed < r.plan.recomputed
                                                  : l.plan.micro_batches < r.plan.micro_batches;
  });
}

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
    throw UserError(base::join(
        "[plan] a plan is auto, none, or micro-batch=N,recompute=N with N between 1 and ", batch,
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
  if (values.size() != 2 || !values.contains("micro-batch") || !values.contains("recompute"))
    refuse();
  const std::int64_t size = values["micro-batch"], recomputed = values["recompute"];
  if (size < 1 || size > batch || recomputed < 0 || recomputed > segments) refuse();
  return {.automatic = false,
          .plan = {.micro_batches = (batch + size - 1) / size, .recomputed = recomputed}};
}

std::string describe_plan(const Plan& plan, std::int64_t batch, std::int64_t segments) {
  return base::join("micro-batch ", plan.largest(batch), " (", plan.micro_batches, " a step), ",
                    plan.recomputed, " of ", segments, " blocks recomputed");
}

std::int64_t Trial::peak_bytes() const {
  return std::max({highest(first), highest(second), optimizer_peak_bytes});
}

std::int64_t predict_peak(const Trial& small, std::int64_t small_size, const Trial& large,
                          std::int64_t large_size, std::int64_t size, bool accumulating) {
  GRADUS_CHECK("plan", small_size != large_size, "two different sizes are needed; got ", small_size,
               " twice");
  std::int64_t peak = std::max(small.optimizer_peak_bytes, large.optimizer_peak_bytes);
  peak = std::max(peak, predict_timeline(small.first, small_size, large.first, large_size, size));
  if (accumulating)
    peak =
        std::max(peak, predict_timeline(small.second, small_size, large.second, large_size, size));
  return peak;
}

namespace {

// The whole batch at once, nothing recomputed; 0 if too little is known. Where even two sequences
// of that do not fit, continues the line through the two smallest numbers of recomputed segments
// that do: each segment holds its activations at the peak, at the end of the forward pass.
std::int64_t predict_plain_peak(const std::map<std::int64_t, Measured>& measured,
                                std::int64_t batch) {
  std::vector<std::pair<std::int64_t, std::int64_t>> known;  // recomputed, peak
  for (const auto& [recomputed, trials] : measured) {
    if (trials.knows(batch)) known.emplace_back(recomputed, trials.peak(batch, false));
    if (!known.empty() && known.front().first == 0) return known.front().second;
    if (known.size() == 2)
      return along_line(known[0].second, known[0].first, known[1].second, known[1].first, 0);
  }
  return 0;
}

// The fastest candidate of each number of recomputed segments: that of the fewest, which needs no
// faith in the predicted cost of recomputation, and then the others by time.
std::vector<PlanCandidate> best_of_levels(const std::vector<PlanCandidate>& by_time) {
  std::vector<PlanCandidate> best;
  for (const PlanCandidate& candidate : by_time) {
    const bool known = std::any_of(best.begin(), best.end(), [&](const PlanCandidate& other) {
      return other.plan.recomputed == candidate.plan.recomputed;
    });
    if (!known) best.push_back(candidate);
  }
  const auto fewest = std::min_element(best.begin(), best.end(),
                                       [](const PlanCandidate& l, const PlanCandidate& r) {
                                         return l.plan.recomputed < r.plan.recomputed;
                                       });
  if (fewest != best.end()) std::rotate(best.begin(), fewest, fewest + 1);
  // Nothing beats the plain step where it fits.
  const auto plain =
      std::find_if(by_time.begin(), by_time.end(),
                   [](const PlanCandidate& candidate) { return candidate.plan == Plan{}; });
  if (plain != by_time.end()) best.insert(best.begin(), *plain);
  return best;
}

}  // namespace

PlanChoice choose_plan(std::int64_t batch, std::int64_t segments, std::int64_t limit_bytes,
                       const TrialRunner& run) {
  PlanChoice choice;
  std::map<std::int64_t, Measured> measured;  // by recomputed segments
  const std::vector<std::int64_t> levels = measured_segments(segments);
  // From everything recomputed (least memory) to nothing: what does not fit stays out.
  for (auto level = levels.rbegin(); level != levels.rend(); ++level) {
    auto trials = measure(batch, *level, run);
    if (!trials) break;
    measured.emplace(*level, std::move(*trials));
  }
  if (measured.empty()) {
    throw UserError(base::join(
        "[plan] the memory limit of ", base::format_bytes(limit_bytes),
        " is below what this model needs for one sequence with every block recomputed; raise "
        "--memory, shorten --context, or make the model smaller"));
  }
  choice.plain_peak_bytes = predict_plain_peak(measured, batch);

  for (const auto& [recomputed, trials] : measured) {
    std::int64_t last_size = 0;
    for (std::int64_t count = 1; count <= batch; ++count) {
      const Plan plan{count, recomputed};
      const std::int64_t size = plan.largest(batch);
      if (size == last_size || !trials.knows(size))
        continue;  // more micro-batches of the same size gain nothing
      last_size = size;
      const std::int64_t peak = trials.peak(size, count > 1);
      if (limit_bytes > 0 && peak > limit_bytes) continue;
      double seconds = 0.0;
      for (const std::int64_t part : plan.sizes(batch)) seconds += trials.seconds(part);
      choice.candidates.push_back({plan, peak, seconds});
    }
  }
  sort_by_time(choice.candidates);

  // Predictions choose what to try; trials under the limit prove that it fits and say how fast it
  // is.
  constexpr std::size_t kProofs = 4;
  std::vector<PlanCandidate> proved;
  std::map<std::int64_t, std::int64_t> trial_peaks;
  std::int64_t refused = 0;
  for (const PlanCandidate& first_choice : best_of_levels(choice.candidates)) {
    // The fastest of a level may fail its trial; then the next fastest of that level is tried.
    bool reached = false;
    for (const PlanCandidate& candidate : choice.candidates) {
      const Plan& plan = candidate.plan;
      reached = reached || plan == first_choice.plan;
      if (!reached || plan.recomputed != first_choice.plan.recomputed) continue;
      const std::optional<Trial> proof =
          run(plan.largest(batch), plan.recomputed, plan.micro_batches > 1);
      if (!proof || (limit_bytes > 0 && proof->peak_bytes() > limit_bytes)) {
        ++refused;
        continue;
      }
      trial_peaks[plan.recomputed] = proof->peak_bytes();
      proved.push_back(
          {plan, candidate.peak_bytes, proof->seconds * static_cast<double>(plan.micro_batches)});
      break;
    }
    const bool is_plain = !proved.empty() && proved.back().plan == Plan{};
    if (is_plain || proved.size() == kProofs) break;
  }
  if (proved.empty()) {
    throw UserError(base::join("[plan] no plan was proved to fit the memory limit of ",
                               base::format_bytes(limit_bytes),
                               "; raise --memory by a few per cent"));
  }
  sort_by_time(proved);
  const PlanCandidate& best = proved.front();
  choice.plan = best.plan;
  choice.predicted_peak_bytes = best.peak_bytes;
  choice.trial_peak_bytes = trial_peaks[best.plan.recomputed];
  const bool is_plain = best.plan.recomputed == 0 && best.plan.micro_batches == 1;
  choice.reason = base::join(is_plain ? "plain training fits" : "the fastest of those tried", "; ",
                             choice.candidates.size(), " plans fit by prediction, ", proved.size(),
                             " proved it in a trial step",
                             refused > 0 ? base::join(", ", refused, " did not") : std::string(),
                             "; this one took ", base::format_bytes(choice.trial_peak_bytes),
                             ", predicted ", base::format_bytes(best.peak_bytes));
  return choice;
}

}  // namespace gradus::train
