#pragma once

// Writes down one pass of a program: what its calls made, how long each result was wanted, and how
// much other memory was live at each moment.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <gradus/base/memory_tracker.h>
#include <gradus/recompute/internal/content.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::recompute::internal {

/// Used under the tape's lock. Moments are the tape's.
class Tracer {
 public:
  using Clock = std::chrono::steady_clock;

  Tracer();

  /// A call of the forward pass, after it was made; @p made_bytes is memory that is new.
  void call(const Recipe& recipe, std::int64_t moment, std::int64_t made_bytes);
  /// Any call, after it was made (and after call()).
  void end_moment(std::int64_t moment, bool backward);
  /// Contents changed in the middle of a moment (eviction): memory is looked at before and after.
  void before_change();
  void after_change();

  /// @p first: no place of autograd stood for it before.
  void saved(const Content& content, std::string_view maker, bool first);
  void read(const Content& content, std::int64_t moment);
  void released(const Content& content, std::int64_t moment);

  ~Tracer();
  StepTrace finish(double seconds, double recording_seconds, double replay_seconds);

 private:
  void settle(std::int64_t made_bytes);
  std::int64_t own_bytes() const;
  void note_program(std::int64_t moment);

  base::MemoryTracker& memory_;
  StepTrace trace_;
  std::vector<std::weak_ptr<Content>> contents_;  // of this pass, that may still be in memory
  std::vector<std::weak_ptr<Content>> held_;      // those of them that the program holds
  std::int64_t own_ = 0;                          // at the start of the lap
  std::int64_t other_ = 0;                        // peak in this moment
  std::int64_t in_call_ = 0;                      // the same with what the call is making
  std::int64_t made_ = 0;                         // results of the moment's call, in own_
  std::vector<std::int64_t> levels_;              // on the way there
};

}  // namespace gradus::recompute::internal
