#include <gradus/plan/scale_trace.h>

#include <algorithm>
#include <cmath>

#include <gradus/base/error.h>

namespace gradus::plan {

using recompute::StepTrace;
using recompute::TracedCall;
using recompute::TracedMoment;

namespace {

std::string call_difference(const TracedCall& a, const TracedCall& b) {
  if (a.op != b.op) return base::join("is ", a.op, " in one and ", b.op, " in the other");
  const auto differs = [&](const char* what) {
    return base::join("(", a.op, ") differs in ", what);
  };
  if (a.moment != b.moment) return differs("its moment");
  if (a.inputs != b.inputs) return differs("what it reads");
  if (a.can_run_again != b.can_run_again) return differs("whether it can run again");
  if ((a.bytes == 0) != (b.bytes == 0)) return differs("whether it makes anything");
  if (a.saved != b.saved) return differs("whether autograd keeps a result");
  if (a.reads != b.reads) return differs("when backward reads it");
  if (a.released_after != b.released_after) return differs("when its result is let go");
  return "";
}

// Values at a third size on the line through two.
class Line {
 public:
  Line(std::int64_t small_size, std::int64_t large_size, std::int64_t size)
      : small_size_(small_size), large_size_(large_size), size_(size) {}

  std::int64_t bytes(std::int64_t small, std::int64_t large) const {
    if (small_size_ == large_size_) return large;
    const double slope =
        static_cast<double>(large - small) / static_cast<double>(large_size_ - small_size_);
    return std::max<std::int64_t>(
        0, large + static_cast<std::int64_t>(
                       std::llround(slope * static_cast<double>(size_ - large_size_))));
  }
  double seconds(double small, double large) const {
    const double per_example = large / static_cast<double>(large_size_);
    const double slope = small_size_ == large_size_
                             ? per_example
                             : (large - small) / static_cast<double>(large_size_ - small_size_);
    return std::max(0.0, large + std::clamp(slope, 0.1 * per_example, per_example) *
                                     static_cast<double>(size_ - large_size_));
  }

 private:
  std::int64_t small_size_, large_size_, size_;
};

void check_sizes(std::int64_t small_size, std::int64_t large_size, std::int64_t size) {
  GRADUS_CHECK("plan", small_size > 0 && large_size > 0 && size > 0, "sizes must be > 0; got ",
               small_size, ", ", large_size, " and ", size);
  GRADUS_CHECK("plan", small_size != large_size || size == large_size,
               "two different sizes are needed to tell of a third; got ", small_size, " twice for ",
               size);
}

}  // namespace

std::string program_difference(const StepTrace& a, const StepTrace& b) {
  if (a.calls.size() != b.calls.size())
    return base::join("one makes ", a.calls.size(), " calls and the other ", b.calls.size());
  if (a.moments.size() != b.moments.size())
    return base::join("one has ", a.moments.size(), " moments and the other ", b.moments.size());
  for (std::size_t i = 0; i < a.calls.size(); ++i) {
    const std::string difference = call_difference(a.calls[i], b.calls[i]);
    if (!difference.empty()) return base::join("call ", i, " ", difference);
  }
  for (std::size_t i = 0; i < a.moments.size(); ++i) {
    if (a.moments[i].backward != b.moments[i].backward)
      return base::join("moment ", i, " is of backward in one of them only");
  }
  return "";
}

StepTrace scale_trace(const StepTrace& small, std::int64_t small_size, const StepTrace& large,
                      std::int64_t large_size, std::int64_t size) {
  check_sizes(small_size, large_size, size);
  const std::string difference = program_difference(small, large);
  GRADUS_CHECK("plan", difference.empty(), "traces of two sizes must be of one program; ",
               difference);
  const Line line(small_size, large_size, size);
  StepTrace scaled = large;
  for (std::size_t i = 0; i < scaled.calls.size(); ++i) {
    const TracedCall &s = small.calls[i], &l = large.calls[i];
    TracedCall& call = scaled.calls[i];
    call.bytes = line.bytes(s.bytes, l.bytes);
    call.saved_bytes = line.bytes(s.saved_bytes, l.saved_bytes);
    call.copied_bytes = line.bytes(s.copied_bytes, l.copied_bytes);
    call.seconds = line.seconds(s.seconds, l.seconds);
    call.held_until = std::max(s.held_until, l.held_until);
  }
  for (std::size_t i = 0; i < scaled.moments.size(); ++i) {
    const TracedMoment &s = small.moments[i], &l = large.moments[i];
    TracedMoment& moment = scaled.moments[i];
    moment.rest_bytes = line.bytes(s.rest_bytes, l.rest_bytes);
    moment.other_bytes = std::max(line.bytes(s.other_bytes, l.other_bytes), moment.rest_bytes);
    moment.own_bytes = line.bytes(s.own_bytes, l.own_bytes);
    moment.levels.clear();
    for (std::size_t k = 0; s.levels.size() == l.levels.size() && k < l.levels.size(); ++k)
      moment.levels.push_back(line.bytes(s.levels[k], l.levels[k]));
  }
  scaled.recording_seconds = std::min(small.recording_seconds, large.recording_seconds);
  scaled.seconds = scaled.recording_seconds +
                   line.seconds(std::max(0.0, small.seconds - small.recording_seconds),
                                std::max(0.0, large.seconds - large.recording_seconds));
  scaled.replay_seconds = 0.0;  // of a pass not run yet
  scaled.peak_bytes = line.bytes(small.peak_bytes, large.peak_bytes);
  return scaled;
}

std::vector<CompressedResult> scale_compressed(const std::vector<CompressedResult>& small,
                                               std::int64_t small_size,
                                               const std::vector<CompressedResult>& large,
                                               std::int64_t large_size, std::int64_t size) {
  check_sizes(small_size, large_size, size);
  if (small.empty() || large.empty()) return {};
  GRADUS_CHECK("plan", small.size() == large.size(),
               "what compression makes of two sizes must be of one program; got ", small.size(),
               " and ", large.size(), " calls");
  const Line line(small_size, large_size, size);
  std::vector<CompressedResult> scaled(large.size());
  for (std::size_t i = 0; i < scaled.size(); ++i) {
    if (small[i].bytes == 0 || large[i].bytes == 0) continue;
    scaled[i] = {.bytes = std::max<std::int64_t>(1, line.bytes(small[i].bytes, large[i].bytes)),
                 .encode_seconds = line.seconds(small[i].encode_seconds, large[i].encode_seconds),
                 .decode_seconds = line.seconds(small[i].decode_seconds, large[i].decode_seconds)};
  }
  return scaled;
}

}  // namespace gradus::plan
