#include <gradus/recompute/internal/tracer.h>

#include <algorithm>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace gradus::recompute::internal {

Tracer::Tracer() : memory_(base::MemoryTracker::install()) { memory_.lap_peak(); }

std::int64_t Tracer::own_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& weak : contents_) {
    const auto content = weak.lock();
    if (content != nullptr && content->in_memory()) bytes += content->bytes;
  }
  return bytes;
}

// Counts what was live in the lap that ends, but for results.
void Tracer::settle(std::int64_t made_bytes) {
  const std::int64_t peak = memory_.lap_peak();
  trace_.peak_bytes = std::max(trace_.peak_bytes, peak);
  other_ = std::max(other_, peak - own_ - made_bytes);
}

void Tracer::before_change() { settle(0); }

void Tracer::after_change() {
  trace_.peak_bytes = std::max(trace_.peak_bytes, memory_.lap_peak());
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
  for (const auto& weak : recipe.made) {
    const auto content = weak.lock();
    if (content == nullptr) continue;
    call.bytes += content->bytes;
    call.can_run_again = true;
    contents_.push_back(content);
    held_.push_back(content);
  }
  // A call that autograd's part of another makes (a clone inside mul_) ends before that one.
  if (trace_.calls.size() <= static_cast<std::size_t>(recipe.call))
    trace_.calls.resize(static_cast<std::size_t>(recipe.call) + 1);
  trace_.calls[static_cast<std::size_t>(recipe.call)] = std::move(call);
  settle(made_bytes);
  own_ += made_bytes;
}

void Tracer::note_program(std::int64_t moment) {
  std::erase_if(held_, [&](const std::weak_ptr<Content>& weak) {
    const auto content = weak.lock();
    if (content == nullptr || !content->held_by_program()) return true;
    trace_.calls[static_cast<std::size_t>(content->call)].held_until = moment;
    return false;
  });
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
                           .backward = backward};
  other_ = 0;
}

void Tracer::saved(const Content& content, std::string_view maker) {
  TracedCall& call = trace_.calls[static_cast<std::size_t>(content.call)];
  call.saved = true;
  if (content.saved == 1) call.saved_bytes += content.bytes;  // else it was counted
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
  trace_.complete = true;
  return std::move(trace_);
}

}  // namespace gradus::recompute::internal
