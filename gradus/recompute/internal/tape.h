#pragma once

// How the values of a forward pass were made, which of them are in memory, and how to make one
// again.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/plane/op/op_plane.h>
#include <gradus/recompute/internal/content.h>
#include <gradus/recompute/internal/tracer.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus::recompute::internal {

/// Records a forward pass, drops contents under pressure and makes them again. Thread-safe.
///
/// A pass begins with the first call whose result needs a gradient after a backward pass has
/// released everything that was saved; its calls are those of its forward part, its moments all
/// calls until the next pass.
class Tape final : public plane::op::Handler, public std::enable_shared_from_this<Tape> {
 public:
  using OnTrace = std::function<void(const StepTrace&)>;
  using OnSaved = std::function<void(const plane::saved::Value&, std::int64_t call)>;

  Tape(std::shared_ptr<Stash> stash, std::shared_ptr<Encoder> encoder, bool encode_unplanned)
      : stash_(std::move(stash)),
        encoder_(std::move(encoder)),
        encode_unplanned_(encode_unplanned) {}

  void call(plane::op::Call& call) override;

  /// The content of a tensor that autograd saves, if the tape can make it again; else null.
  std::shared_ptr<Content> find(const plane::saved::Value& value);
  /// Says that a place of autograd stands for @p content from now on, or no longer.
  void save(const std::shared_ptr<Content>& content, std::string_view maker);
  void release(const std::shared_ptr<Content>& content);
  /// The smaller form of what autograd saves, if the plan leaves @p content to the encoder.
  std::optional<plane::saved::Packed> encode(const std::shared_ptr<Content>& content,
                                             const plane::saved::Value& value);
  /// Whether the plan leaves @p content to the hooks behind.
  bool leaves(const Content& content) const;
  /// Says that autograd saves a content that is left to others, and that it does no longer: the
  /// pass is not over before.
  void leave();
  void end_left();
  /// The tensor over @p content, made again if need be.
  at::Tensor get(const std::shared_ptr<Content>& content, const Shape& shape);

  /// Drops the cheapest contents until @p bytes are freed. Returns the bytes freed.
  std::int64_t evict(std::int64_t bytes);

  void trace(OnTrace on_trace, OnSaved on_saved);
  void on_pass(std::function<void(const EvictionPlan*)> ended);
  void set_plan(std::shared_ptr<const EvictionPlan> plan);
  void set_plans(std::vector<ProgramPlan> plans);

  BudgetStatistics statistics() const;

  static Shape shape_of(const at::Tensor& tensor);

 private:
  std::shared_ptr<Content> content_of(const at::Tensor& tensor, bool outside_too);
  void record(plane::op::Call& call);
  void count_moment(bool backward);
  void begin_pass(Tracer::Clock::duration since);
  void separate_small(Recipe& recipe);
  void follow(const Recipe& recipe);
  bool change_plan(const Recipe* recipe, const std::function<bool(const EvictionPlan&)>& fits);
  at::Tensor decode(const std::shared_ptr<Content>& content, Encoded& form, const Shape& shape);
  void release_encoded(const std::shared_ptr<Content>& content,
                       const std::shared_ptr<Encoded>& form);
  Argument argument_of(const c10::IValue& value);
  c10::Storage materialise(const std::shared_ptr<Content>& content);
  bool ready(const std::shared_ptr<Content>& content);
  void run(Recipe& recipe);
  bool purge();
  void end_saved();
  bool prepare_change(const at::Tensor& tensor, bool only_changes);
  bool replayable(const Content& content) const { return content.maker != nullptr; }

  struct Candidate;
  bool planned() const { return following_ && !online_; }
  Disposition disposition_of(const Content& content) const;
  std::int64_t next_read(const Content& content) const;
  bool evictable(const Content& content) const;
  std::int64_t drop(Content& content);
  std::int64_t drop_encoded(Content& content);
  std::int64_t drop_cheapest(std::vector<Candidate> candidates, std::int64_t bytes);
  std::int64_t evict_planned(std::int64_t bytes);
  std::int64_t evict_by_cost(std::int64_t bytes);

  const std::shared_ptr<Stash> stash_;
  const std::shared_ptr<Encoder> encoder_;
  const bool encode_unplanned_;

  // Recursive: making a value again allocates, which may ask this tape to evict.
  mutable std::recursive_mutex mutex_;
  // Contents by the storage that holds them now. The weak handles in them keep a key's address its
  // own.
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Content>>
      current_;  // made by recipes
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Content>>
      outside_;  // owned by recipes that read them
  // Calls in flight that change a tensor in place. Autograd's part of such a call may still read
  // what was there before (mul_ saves a clone).
  struct Change {
    const c10::StorageImpl* key;
    std::shared_ptr<Content> before;
    c10::VariableVersion counter;
    std::uint32_t version;  // before
  };
  std::vector<Change> changing_;
  std::vector<std::weak_ptr<Content>> kept_;  // what may be evicted: contents with a strong handle
  std::vector<std::weak_ptr<Content>> encoded_;  // contents with a smaller form
  std::int64_t clock_ = 0;
  std::int64_t saved_ = 0;  // places of autograd that stand for contents
  std::int64_t calls_since_purge_ = 0;
  BudgetStatistics statistics_;

  // The pass.
  std::int64_t calls_ = -1;  // made so far; -1 before the first pass
  std::int64_t moment_ = 0;  // the next one
  bool over_ = true;         // the next call that autograd records begins a pass
  bool backward_seen_ = false;
  Tracer::Clock::time_point pass_start_;
  Tracer::Clock::time_point backward_end_;
  double recording_s_ = 0.0;
  double evicting_s_ = 0.0;  // and keeping what is left in smaller forms
  double probing_s_ = 0.0;   // on_saved_, which is no part of any pass
  double replay_s_at_start_ = 0.0;

  // Its plan, and others that may turn out to be of this program.
  std::shared_ptr<const EvictionPlan> plan_;
  bool online_ = false;  // it only tells the program
  std::vector<ProgramPlan> other_plans_;
  std::vector<ProgramPlan> next_plans_;
  bool following_ = false;

  OnTrace on_trace_;
  std::function<void(const EvictionPlan*)> on_pass_;
  OnSaved on_saved_;
  std::unique_ptr<Tracer> tracer_;
};

}  // namespace gradus::recompute::internal
