#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradus::recompute {

/// What one operator call of a forward pass made: the bytes of its results, which are kept or
/// dropped together. Calls are numbered from 0 in the order of a pass. A call whose results differ
/// much in size (an LSTM layer's output and workspace, a normalisation's statistics) stands twice:
/// the large ones, and behind them the small ones.
struct TracedCall {
  std::string op;              ///< "aten::mm".
  std::int64_t moment = 0;     ///< When it ran.
  double seconds = 0.0;        ///< Measured, with the planes' own cost.
  std::int64_t bytes = 0;      ///< Of what it made; 0 for a view, or what changes outside tensors.
  bool can_run_again = false;  ///< False if what it made can only be kept.
  std::vector<std::int64_t>
      inputs;  ///< Calls whose results it reads; what came from outside is not among them.
  std::int64_t copied_bytes = 0;  ///< Running it again first copies so much: it works in place.

  std::int64_t held_until = 0;        ///< Last moment at which the program itself holds results
                                      ///< of at least half the bytes.
  bool saved = false;                 ///< Autograd keeps a result.
  std::int64_t saved_bytes = 0;       ///< Of the results that it keeps: the statistics of a
                                      ///< normalisation, say, and not its output.
  std::vector<std::int64_t> reads;    ///< Moments at which backward asks for one, ascending.
  std::int64_t released_after = -1;   ///< Last moment at which autograd keeps one; -1 if never.
  std::vector<std::string> saved_by;  ///< The operators that saved it, "" for other purposes.
};

/// One moment: an operator call, of forward or of backward, with what went on since the one before.
struct TracedMoment {
  std::int64_t other_bytes = 0;  ///< Peak of all live device memory but that of traced results.
  std::int64_t rest_bytes = 0;   ///< The same at its end.
  std::int64_t own_bytes = 0;    ///< Traced results in memory at its end, as measured.
  bool backward = false;
  /// Highest totals on the way to the peak, ascending, of all live device memory but the results in
  /// memory before: what the call makes is in them. Empty: not known.
  std::vector<std::int64_t> levels{};
};

/// One pass, forward and backward, as the program ran it: without what was run again.
struct StepTrace {
  std::vector<TracedCall> calls;
  std::vector<TracedMoment> moments;
  double seconds = 0.0;  ///< Of the pass, beginning of forward to end of backward, without
                         ///< replays and evictions.
  double recording_seconds = 0.0;  ///< The part of it that a plain pass would not spend.
  double replay_seconds = 0.0;     ///< Beside it: running calls again, and moving results.
  std::int64_t peak_bytes = 0;     ///< Of all live device memory, measured, under whatever limit.
};

}  // namespace gradus::recompute
