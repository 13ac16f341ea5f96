#include <gradus/solve/chain.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/solve/internal/chain_sizes.h>

namespace gradus::solve {
namespace {

using Bytes = std::int64_t;

constexpr float kNever = std::numeric_limits<float>::infinity();

Bytes divide_up(Bytes value, Bytes by) { return (value + by - 1) / by; }

// row[m] = min(row[m], constant + left[m] + right[m]); apart, so that the compiler makes vector
// code of it.
void relax(float* row, const float* left, const float* right, float constant, std::size_t count) {
  for (std::size_t m = 0; m < count; ++m) {
    const float candidate = constant + left[m] + right[m];
    row[m] = candidate < row[m] ? candidate : row[m];
  }
}

void relax(float* row, const float* right, float constant, std::size_t count) {
  for (std::size_t m = 0; m < count; ++m) {
    const float candidate = constant + right[m];
    row[m] = candidate < row[m] ? candidate : row[m];
  }
}

}  // namespace

// Stages count from 0. The task (s, t) is: from the output of stage s - 1 and the gradient of the
// output of stage t, run forwards and backwards of stages s to t. Its memory counts that gradient
// but not that output (Beaumont et al. 2019, section 4.3).
class ChainPlanner::Impl {
 public:
  Impl(Chain chain, Bytes largest_limit, const ChainOptions& options) : chain_(std::move(chain)) {
    internal::check_chain(chain_);
    count_ = chain_.stages.size();
    const auto tasks = static_cast<Bytes>(task(0, count_));
    GRADUS_CHECK("chain", options.max_slots >= 1, "max_slots must be >= 1; got ",
                 options.max_slots);
    GRADUS_CHECK("chain", options.max_table_bytes >= 8 * tasks,
                 "max_table_bytes must be >= ", 8 * tasks, " for a chain of ", count_,
                 " stages; got ", options.max_table_bytes, ". Merge stages first");
    GRADUS_CHECK("chain", largest_limit >= 0, "the limit must be >= 0 bytes; got ", largest_limit);
    largest_limit_ = largest_limit;
    measure();
    plain_ = simulate(keep_everything(chain_), chain_).peak_bytes;
    const Bytes range = std::min(largest_limit, plain_) - chain_.input_bytes;
    if (range < least_.back_task()) return;
    const Bytes most = options.max_table_bytes / (tasks * Bytes{sizeof(float)}) - 1;
    slot_ = std::max<Bytes>(1, divide_up(range, std::min(most, options.max_slots)));
    row_ = static_cast<std::size_t>(range / slot_) + 1;
    table_.assign(static_cast<std::size_t>(tasks) * row_, kNever);
    for (std::size_t t = 0; t < count_; ++t)
      for (std::size_t s = t + 1; s-- > 0;) fill_row(s, t);
  }

  ChainPlan plan(Bytes limit) const {
    GRADUS_CHECK("chain", limit <= largest_limit_, "the limit must be at most ", largest_limit_,
                 " bytes, the largest of this planner; got ", limit);
    ChainPlan plan;
    plan.least_bytes = least_bytes();
    if (limit < plan.least_bytes) return plan;
    plan.feasible = true;
    plan.sequence =
        limit >= plain_ ? keep_everything(chain_) : sequence(limit - chain_.input_bytes);
    const ChainRun run = simulate(plan.sequence, chain_);
    GRADUS_INTERNAL_CHECK("chain", run.peak_bytes <= limit, "a plan for ", limit, " bytes takes ",
                          run.peak_bytes);
    plan.time_ms = run.time_ms;
    plan.peak_bytes = run.peak_bytes;
    return plan;
  }

  Bytes least_bytes() const { return least_.back_task() + chain_.input_bytes; }
  Bytes plain_bytes() const { return plain_; }
  Bytes slot_bytes() const { return slot_; }
  Bytes table_bytes() const { return static_cast<Bytes>(table_.size() * sizeof(float)); }

 private:
  // Least memory of each task, exact to the byte, and the time of the fastest plan known for it.
  struct Least {
    std::vector<Bytes> bytes;
    std::vector<double> time_ms;
    Bytes back_task() const { return bytes[bytes.size() - 1 - offset_of_last]; }
    std::size_t offset_of_last = 0;
  };

  // What to do first in a task: save stage s (split == s), or keep the input and run on to the
  // stage `split`, which the right part starts with.
  struct Choice {
    std::size_t split = 0;
    Bytes peak = 0;  ///< Of the choice's own operations.
    double time_ms = 0.0;
  };

  // Triangular: the tasks of one t lie together, those with larger s behind.
  static std::size_t task(std::size_t s, std::size_t t) { return t * (t + 1) / 2 + s; }

  Bytes output_gradient(std::size_t t) const {
    return chain_.stages[t].gradient_bytes.value_or(chain_.stages[t].output_bytes);
  }
  Bytes input_gradient(std::size_t s) const {
    return s == 0 ? chain_.input_gradient_bytes : output_gradient(s - 1);
  }

  Choice save(std::size_t s, std::size_t t) const {
    const ChainStage& stage = chain_.stages[s];
    const Bytes forward = output_gradient(t) + stage.saved_bytes +
                          stage.saving_transient_bytes.value_or(stage.forward_transient_bytes);
    const Bytes at_rest = output_gradient(s) + stage.saved_bytes;
    const Bytes backward = at_rest + input_gradient(s) + stage.backward_transient_bytes;
    return {s, std::max({forward, at_rest, backward}), stage.forward_ms + stage.backward_ms};
  }

  // Calls visit(choice) for each choice of a task but saving its first stage, until it returns
  // false.
  template <typename Visit>
  void for_each_split(std::size_t s, std::size_t t, Visit&& visit) const {
    Choice choice;
    for (std::size_t split = s + 1; split <= t; ++split) {
      const ChainStage& last = chain_.stages[split - 1];
      const Bytes source = split - 1 == s ? 0 : chain_.stages[split - 2].output_bytes;
      choice.split = split;
      choice.peak = std::max(choice.peak, output_gradient(t) + source + last.output_bytes +
                                              last.forward_transient_bytes);
      choice.time_ms += last.forward_ms;
      if (!visit(choice)) return;
    }
  }

  void measure() {
    before_ms_.assign(1, 0.0);
    for (const ChainStage& stage : chain_.stages)
      before_ms_.push_back(before_ms_.back() + stage.forward_ms + stage.backward_ms);
    least_.bytes.resize(task(0, count_));
    least_.time_ms.resize(task(0, count_));
    least_.offset_of_last = count_ - 1;
    for (std::size_t t = 0; t < count_; ++t) {
      for (std::size_t s = t + 1; s-- > 0;) {
        const Choice saving = save(s, t);
        std::pair<Bytes, double> best{saving.peak, saving.time_ms};
        if (s < t) {
          const std::size_t rest = task(s + 1, t);
          best.first = std::max(best.first, chain_.stages[s].saved_bytes + least_.bytes[rest]);
          best.second += least_.time_ms[rest];
        }
        for_each_split(s, t, [&](const Choice& choice) {
          const std::size_t left = task(s, choice.split - 1);
          const std::size_t right = task(choice.split, t);
          const Bytes kept = chain_.stages[choice.split - 1].output_bytes;
          const Bytes peak =
              std::max({choice.peak, kept + least_.bytes[right], least_.bytes[left]});
          best =
              std::min(best, {peak, choice.time_ms + least_.time_ms[left] + least_.time_ms[right]});
          return choice.peak <= best.first;
        });
        least_.bytes[task(s, t)] = best.first;
        least_.time_ms[task(s, t)] = best.second;
      }
    }
  }

  void fill_row(std::size_t s, std::size_t t) {
    float* const row = table_.data() + task(s, t) * row_;
    // The least plan is exact where rounding would make a task look infeasible that is not. With it
    // the row is finite, and never rises, from its first slot on.
    const auto lowest = static_cast<std::size_t>(divide_up(least_.bytes[task(s, t)], slot_));
    if (lowest >= row_) return;
    std::fill(row + lowest, row + row_, static_cast<float>(least_.time_ms[task(s, t)]));
    if (s == t) return;
    // From the first slot at which a choice can be made up to the one from which on the row is as
    // good as the choice can be with all memory: most of the work, saved.
    const auto range = [&](Bytes peak, std::size_t right, Bytes shift, float best) {
      const auto first = static_cast<std::size_t>(
          std::max(divide_up(peak, slot_), shift + divide_up(least_.bytes[right], slot_)));
      const auto start = std::min(std::max(first, lowest), row_);
      const float* stop =
          std::partition_point(row + start, row + row_, [best](float time) { return time > best; });
      return std::pair{start, static_cast<std::size_t>(stop - row) - start};
    };
    {
      const Choice saving = save(s, t);
      const Bytes shift = divide_up(chain_.stages[s].saved_bytes, slot_);
      const float* const right = row_of(s + 1, t);
      const auto time = static_cast<float>(saving.time_ms);
      const auto [start, count] = range(saving.peak, task(s + 1, t), shift, time + right[row_ - 1]);
      relax(row + start, right + start - shift, time, count);
    }
    for_each_split(s, t, [&](const Choice& choice) {
      const auto time = static_cast<float>(choice.time_ms);
      const float* const left = row_of(s, choice.split - 1);
      const float* const right = row_of(choice.split, t);
      const Bytes shift = divide_up(chain_.stages[choice.split - 1].output_bytes, slot_);
      const auto [start, count] =
          range(choice.peak, task(choice.split, t), shift, time + left[row_ - 1] + right[row_ - 1]);
      relax(row + start, left + start, right + start - shift, time, count);
      // Later splits run more forwards first, and a task has no plan without a recomputation less.
      return time + plain_ms(s, t) < row[lowest];
    });
  }

  const float* row_of(std::size_t s, std::size_t t) const {
    return table_.data() + task(s, t) * row_;
  }

  // Of every forward and backward once.
  double plain_ms(std::size_t s, std::size_t t) const { return before_ms_[t + 1] - before_ms_[s]; }

  // Time of a task within `bytes`: the table's, or the least plan's.
  double time(std::size_t s, std::size_t t, Bytes bytes) const {
    if (bytes < least_.bytes[task(s, t)]) return kNever;
    return std::min<double>(row_of(s, t)[bytes / slot_], least_.time_ms[task(s, t)]);
  }

  Choice best_choice(std::size_t s, std::size_t t, Bytes bytes) const {
    Choice best = save(s, t);
    if (s == t) return best;
    best.time_ms +=
        best.peak <= bytes ? time(s + 1, t, bytes - chain_.stages[s].saved_bytes) : double{kNever};
    for_each_split(s, t, [&](Choice choice) {
      if (choice.peak > bytes) return false;
      const Bytes kept = chain_.stages[choice.split - 1].output_bytes;
      choice.time_ms += time(choice.split, t, bytes - kept) + time(s, choice.split - 1, bytes);
      if (choice.time_ms < best.time_ms) best = choice;
      return true;
    });
    GRADUS_INTERNAL_CHECK("chain", best.time_ms < kNever, "stages ", s, " to ", t,
                          " have no plan within ", bytes, " bytes");
    return best;
  }

  // Follows the table in exact bytes: what rounding held back at one split is free at the next.
  ChainSequence sequence(Bytes bytes) const {
    struct Task {
      std::size_t s = 0, t = 0;
      Bytes bytes = 0;
      bool only_backward = false;  ///< Of stage s.
    };
    using Kind = ChainOperationKind;
    ChainSequence sequence;
    const auto add = [&](Kind kind, std::size_t stage) {
      sequence.push_back({kind, static_cast<std::int64_t>(stage)});
    };
    std::vector<Task> open{{0, count_ - 1, bytes, false}};
    while (!open.empty()) {
      const Task now = open.back();
      open.pop_back();
      if (now.only_backward) {
        add(Kind::backward, now.s);
        continue;
      }
      const Choice choice = best_choice(now.s, now.t, now.bytes);
      if (choice.split == now.s) {
        add(Kind::forward_save, now.s);
        open.push_back({now.s, now.s, 0, true});
        if (now.s < now.t)
          open.push_back({now.s + 1, now.t, now.bytes - chain_.stages[now.s].saved_bytes, false});
        continue;
      }
      add(Kind::forward_keep, now.s);
      for (std::size_t i = now.s + 1; i < choice.split; ++i) add(Kind::forward_drop, i);
      open.push_back({now.s, choice.split - 1, now.bytes, false});
      open.push_back(
          {choice.split, now.t, now.bytes - chain_.stages[choice.split - 1].output_bytes, false});
    }
    return sequence;
  }

  Chain chain_;
  std::size_t count_ = 0;
  Bytes largest_limit_ = 0;
  Bytes plain_ = 0;
  Bytes slot_ = 1;
  std::size_t row_ = 0;
  Least least_;
  std::vector<double> before_ms_;  // Of the stages before each.
  std::vector<float> table_;       // [task][slot] -> milliseconds.
};

ChainPlanner::ChainPlanner(Chain chain, std::int64_t largest_limit_bytes,
                           const ChainOptions& options)
    : impl_(std::make_unique<const Impl>(std::move(chain), largest_limit_bytes, options)) {}
ChainPlanner::~ChainPlanner() = default;
ChainPlanner::ChainPlanner(ChainPlanner&&) noexcept = default;
ChainPlanner& ChainPlanner::operator=(ChainPlanner&&) noexcept = default;

ChainPlan ChainPlanner::plan(std::int64_t limit_bytes) const { return impl_->plan(limit_bytes); }
std::int64_t ChainPlanner::least_bytes() const { return impl_->least_bytes(); }
std::int64_t ChainPlanner::plain_bytes() const { return impl_->plain_bytes(); }
std::int64_t ChainPlanner::slot_bytes() const { return impl_->slot_bytes(); }
std::int64_t ChainPlanner::table_bytes() const { return impl_->table_bytes(); }

ChainPlan plan_chain(const Chain& chain, std::int64_t limit_bytes, const ChainOptions& options) {
  return ChainPlanner(chain, limit_bytes, options).plan(limit_bytes);
}

}  // namespace gradus::solve
