#include <gradus/recompute/internal/tracer.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace gradus::recompute::internal {

Tracer::Tracer() : memory_(base::MemoryTracker::install()) { memory_.lap_levels(); }

Tracer::~Tracer() { memory_.lap_peak(); }

std::int64_t Tracer::own_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& weak : contents_) {
    const auto content = weak.lock();
    if (content == nullptr) continue;
    if (content->in_memory()) bytes += content->bytes;
    if (!content->encoded.empty()) bytes += content->encoded_bytes();
    if (const auto decoded = content->decoded.lock())
      bytes += static_cast<std::int64_t>(decoded->nbytes());
  }
  return bytes;
}

// Counts what was live in the laps that end, but for results.
void Tracer::settle(std::int64_t made_bytes) {
  before_change();
  other_ = std::max(other_, in_call_ - made_bytes);
  in_call_ = 0;
}

// In the middle of a call nobody knows which of the new memory will be its results.
void Tracer::before_change() {
  for (const std::int64_t total : memory_.lap_levels()) {
    trace_.peak_bytes = std::max(trace_.peak_bytes, total);
    in_call_ = std::max(in_call_, total - own_);
    const std::int64_t level = total - own_ + made_;
    if (levels_.empty() || level > levels_.back()) levels_.push_back(level);
  }
}

void Tracer::after_change() {
  trace_.peak_bytes = std::max(trace_.peak_bytes, memory_.lap_levels().back());
  own_ = own_bytes();
}

void Tracer::call(const Recipe& recipe, std::int64_t moment, std::int64_t made_bytes) {
  TracedCall call;
  call.op = recipe.op.schema().name();
  call.moment = moment;
  call.held_until = moment;
  call.seconds = recipe.seconds;
  for (const Argument& argument : recipe.arguments) {
    for (const auto& [input, shape] : argument.tensors) {
      if (argument.written) call.copied_bytes += input->bytes;
      if (input->call >= 0 && input->call < recipe.call &&
          std::find(call.inputs.begin(), call.inputs.end(), input->call) == call.inputs.end()) {
        call.inputs.push_back(input->call);
      }
    }
  }
  // A call that autograd's part of another makes (a clone inside mul_) ends before that one.
  const auto last = static_cast<std::size_t>(std::max(recipe.call, recipe.small_call));
  if (trace_.calls.size() <= last) trace_.calls.resize(last + 1);
  if (recipe.small_call >= 0) trace_.calls[static_cast<std::size_t>(recipe.small_call)] = call;
  trace_.calls[static_cast<std::size_t>(recipe.call)] = std::move(call);
  for (const auto& weak : recipe.made) {
    const auto content = weak.lock();
    TracedCall& made = trace_.calls[static_cast<std::size_t>(content->call)];
    made.bytes += content->bytes;
    made.can_run_again = true;
    contents_.push_back(content);
    held_.push_back(content);
  }
  settle(made_bytes);
  own_ += made_bytes;
  made_ += made_bytes;
}

void Tracer::note_program(std::int64_t moment) {
  std::unordered_map<std::int64_t, std::int64_t> held_bytes;  // by call
  std::erase_if(held_, [&](const std::weak_ptr<Content>& weak) {
    const auto content = weak.lock();
    if (content == nullptr || !content->held_by_program()) return true;
    held_bytes[content->call] += content->bytes;
    return false;
  });
  for (const auto& [index, bytes] : held_bytes) {
    TracedCall& call = trace_.calls[static_cast<std::size_t>(index)];
    // The program may hold a last state for long, and what it was computed with is free to go.
    if (2 * bytes >= call.bytes) call.held_until = moment;
  }
}

void Tracer::end_moment(std::int64_t moment, bool backward) {
  settle(0);
  note_program(moment);
  std::erase_if(contents_, [](const auto& weak) { return weak.expired(); });
  own_ = own_bytes();
  trace_.moments.resize(static_cast<std::size_t>(moment) + 1);
  const std::int64_t rest = memory_.live().total() - own_;
  trace_.moments.back() = {.other_bytes = std::max(other_, rest),
                           .rest_bytes = rest,
                           .own_bytes = own_,
                           .backward = backward,
                           .levels = std::move(levels_)};
  levels_.clear();
  other_ = made_ = 0;
}

void Tracer::saved(const Content& content, std::string_view maker, bool first) {
  TracedCall& call = trace_.calls[static_cast<std::size_t>(content.call)];
  call.saved = true;
  if (first) call.saved_bytes += content.bytes;
  call.saved_by.emplace_back(maker);
}

void Tracer::read(const Content& content, std::int64_t moment) {
  auto& reads = trace_.calls[static_cast<std::size_t>(content.call)].reads;
  if (reads.empty() || reads.back() != moment) reads.push_back(moment);
}

void Tracer::released(const Content& content, std::int64_t moment) {
  auto& last = trace_.calls[static_cast<std::size_t>(content.call)].released_after;
  last = std::max(last, moment);
}

StepTrace Tracer::finish(double seconds, double recording_seconds, double replay_seconds) {
  trace_.seconds = seconds;
  trace_.recording_seconds = recording_seconds;
  trace_.replay_seconds = replay_seconds;
  return std::move(trace_);
}

}  // namespace gradus::recompute::internal
