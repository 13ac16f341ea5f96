#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <ostream>
#include <string>
#include <string_view>

#include <gradus/base/clock.h>

namespace gradus::report {

struct ProgressOptions {
  std::int64_t total_steps =
      0;  ///< Optimizer steps of the whole run; 0 if unknown (then no bar, no time left).
  std::int64_t first_step = 0;  ///< Steps already done when this process began (resumed runs).
  bool is_terminal =
      false;             ///< True: one redrawn line. False: plain lines without control characters.
  bool unicode = false;  ///< Draw the bar with block characters; only for UTF-8 terminals.
  int columns = 80;      ///< Terminal width, characters.
  std::function<int()>
      measure_columns{};  ///< If set, asked for the width before each redraw (resized windows).
  std::int64_t limit_bytes = 0;    ///< Memory limit; 0 if there is none.
  std::string item = "token";      ///< What a step's tokens count, in the singular: "image".
  double redraw_interval_s = 0.1;  ///< Terminal: least time between two redraws. >= 0.
  double line_interval_s =
      15.0;  ///< Plain: longest time between two lines; the first ones come sooner. > 0.
};

/// What one finished optimizer step shows.
struct ProgressStep {
  std::int64_t step = 0;  ///< Optimizer steps done, this one included.
  double loss = 0.0;  ///< May be non-finite: shown as it is, and kept out of the smoothed value.
  std::int64_t tokens = 0;      ///< Tokens (or examples) of this step.
  std::int64_t peak_bytes = 0;  ///< Highest memory so far.
  std::string remark{};         ///< Shown after the loss: "epsilon 1.23". Narrow characters.
};

/// Shows a training run as it goes: on a terminal one line, redrawn in place (bar, step, smoothed
/// loss, tokens/s, peak memory against the limit, time left) at most ten times a second and never
/// wider than the window; elsewhere plain lines after the first step, then after 1, 2, 4, ...
/// seconds up to line_interval_s apart, and after the last step.
///
///     report::Progress progress(std::cerr, base::monotonic_clock(), {.total_steps = 500,
///     .is_terminal = true}); progress.update({.step = 1, .loss = 8.3, .tokens = 8192, .peak_bytes
///     = 550 << 20}); progress.note("step 100: validation loss 5.12");  // does not tear the bar
///     progress.finish();
///
/// Calls may come from several threads. The stream must outlive the object.
class Progress {
 public:
  /// @throws UserError if an option is out of range.
  Progress(std::ostream& out, base::Clock clock, ProgressOptions options);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Leaves the terminal on a fresh line, also when finish() was never reached.
  ~Progress();

  void update(const ProgressStep& step);

  /// Prints @p text on lines of its own, above the bar. Control characters other than newline and
  /// tab become '?'.
  void note(std::string_view text);

  /// Shows the last step once more with the whole time, and ends the line. Later calls do nothing.
  void finish();

 private:
  struct Mark {
    double time_s;
    std::int64_t step;
    std::int64_t tokens;
  };

  void draw();
  void print_line(std::string_view text);
  std::string bar_line(std::size_t width) const;
  std::string plain_line() const;
  std::string bar(std::size_t cells) const;
  std::string loss_text() const;
  std::string time_text() const;
  double tokens_per_s() const;

  std::mutex mutex_;
  std::ostream& out_;
  base::Clock clock_;
  ProgressOptions options_;
  double start_s_;
  ProgressStep last_;
  std::deque<Mark>
      marks_;  // the last half minute: rates follow a change without jumping at every step
  double loss_sum_ = 0.0;
  double loss_weight_ = 0.0;
  double last_draw_s_;
  double next_gap_s_ = 1.0;
  bool any_step_ = false;
  bool shown_ = false;  // last_ is on the screen
  bool line_open_ = false;
  bool finished_ = false;
};

/// What standard output or error is connected to.
struct TerminalTraits {
  bool is_terminal = false;  ///< A terminal that can redraw a line (TERM is not "dumb").
  bool unicode = false;      ///< Its locale is UTF-8.
  int columns = 80;          ///< Its width, characters.
};

/// Reads the traits of file descriptor @p descriptor (1 or 2) and of the environment: for main
/// programs, which hand the result to Progress.
TerminalTraits inspect_terminal(int descriptor);

/// Whether these values of LC_ALL, LC_CTYPE and LANG (null if unset) name a UTF-8 locale, in
/// POSIX's order.
bool names_utf8_locale(const char* lc_all, const char* lc_ctype, const char* lang);

}  // namespace gradus::report
