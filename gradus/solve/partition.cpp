#include <gradus/solve/partition.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include <gradus/base/error.h>

namespace gradus::solve {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

void check(const std::vector<double>& times_ms, const std::vector<std::int64_t>& cut_bytes,
           const PartitionOptions& options) {
  GRADUS_CHECK("partition", !times_ms.empty(), "there must be at least one operator; got none");
  GRADUS_CHECK("partition", cut_bytes.size() + 1 == times_ms.size(),
               "there must be one cut fewer than operators; got ", cut_bytes.size(), " and ",
               times_ms.size());
  for (const double time : times_ms)
    GRADUS_CHECK("partition", std::isfinite(time) && time >= 0.0,
                 "times must be finite and >= 0; got ", time);
  for (const std::int64_t bytes : cut_bytes)
    GRADUS_CHECK("partition", bytes >= 0, "cut_bytes must be >= 0; got ", bytes);
  GRADUS_CHECK("partition", options.max_stages >= 1, "max_stages must be >= 1; got ",
               options.max_stages);
  GRADUS_CHECK("partition", options.balance_weight > 0.0 && std::isfinite(options.balance_weight),
               "balance_weight must be finite and > 0; got ", options.balance_weight);
  GRADUS_CHECK("partition", options.max_stage_ratio >= 2.0,
               "max_stage_ratio must be >= 2, for which a partition always exists; got ",
               options.max_stage_ratio);
}

// The program for one bound on a stage's time; times are in units of even_ms.
class Program {
 public:
  Program(const std::vector<double>& times, const std::vector<double>& cuts, std::size_t stages,
          double weight)
      : cuts_(cuts), stages_(stages), weight_(weight), before_(times.size() + 1) {
    std::partial_sum(times.begin(), times.end(), before_.begin() + 1);
  }

  // Ends of the best partition, or nothing.
  std::vector<std::int64_t> ends(double longest) {
    const std::size_t count = before_.size() - 1;
    // Slack for the rounding of differences of sums.
    const double bound = longest * (1.0 + 1e-12) + 1e-12 * before_.back();
    std::vector<std::size_t> first(count + 1, 0);  // First start of a stage that ends there.
    for (std::size_t end = 1; end <= count; ++end) {
      first[end] = first[end - 1];
      while (before_[end] - before_[first[end]] > bound) ++first[end];
    }
    std::vector<double> best(count + 1, kNever), next(count + 1);
    std::vector<std::int32_t> start(stages_ * (count + 1), -1);
    best[0] = 0.0;
    cost_ = kNever;
    std::size_t used = 0;
    for (std::size_t stage = 0; stage < stages_; ++stage) {
      std::fill(next.begin(), next.end(), kNever);
      for (std::size_t end = stage + 1; end <= count; ++end) {
        for (std::size_t begin = std::max(first[end], stage); begin < end; ++begin) {
          const double time = before_[end] - before_[begin];
          const double cost = best[begin] + weight_ * time * time;
          if (cost >= next[end]) continue;
          next[end] = cost;
          start[stage * (count + 1) + end] = static_cast<std::int32_t>(begin);
        }
        if (end < count) next[end] += cuts_[end - 1];
      }
      std::swap(best, next);
      if (best[count] < cost_) {
        cost_ = best[count];
        used = stage + 1;
      }
    }
    std::vector<std::int64_t> ends(used);
    for (std::size_t stage = used, end = count; stage-- > 0;) {
      ends[stage] = static_cast<std::int64_t>(end);
      end = static_cast<std::size_t>(start[stage * (count + 1) + end]);
    }
    return ends;
  }

  double cost() const { return cost_; }

 private:
  const std::vector<double>& cuts_;
  std::size_t stages_;
  double weight_;
  std::vector<double> before_;
  double cost_ = kNever;
};

}  // namespace

Partition partition(const std::vector<double>& times_ms, const std::vector<std::int64_t>& cut_bytes,
                    const PartitionOptions& options) {
  check(times_ms, cut_bytes, options);
  const double total = std::accumulate(times_ms.begin(), times_ms.end(), 0.0);
  const double sum = total > 0.0 ? total : static_cast<double>(times_ms.size());
  const double even = sum / static_cast<double>(options.max_stages);
  std::vector<double> times;
  for (const double time : times_ms) times.push_back(total > 0.0 ? time / even : 1.0 / even);

  double bytes = 0.0, places = 0.0;
  for (const std::int64_t cut : cut_bytes)
    if (cut != kNoCut) bytes += static_cast<double>(cut), ++places;
  std::vector<double> cuts;
  for (const std::int64_t cut : cut_bytes)
    cuts.push_back(cut == kNoCut ? kNever
                   : bytes > 0.0 ? static_cast<double>(cut) * places / bytes
                                 : 0.0);

  const std::size_t stages =
      std::min(static_cast<std::size_t>(options.max_stages), times_ms.size());
  Program program(times, cuts, stages, options.balance_weight);
  Partition result;
  // A bound below the longest operator, or stretch without cuts, has no partition.
  for (double longest =
           std::max(options.max_stage_ratio, *std::max_element(times.begin(), times.end()));
       result.ends.empty(); longest *= 2.0)
    result.ends = program.ends(longest);
  result.cost = program.cost();
  std::int64_t begin = 0;
  for (const std::int64_t end : result.ends) {
    result.longest_ms = std::max(
        result.longest_ms, std::accumulate(times_ms.begin() + begin, times_ms.begin() + end, 0.0));
    if (begin) result.cut_bytes += cut_bytes[begin - 1];
    begin = end;
  }
  return result;
}

}  // namespace gradus::solve
