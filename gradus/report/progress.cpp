#include <gradus/report/progress.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include <sys/ioctl.h>
#include <unistd.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/report/internal/text.h>

namespace gradus::report {
namespace {

constexpr double kRateWindow_s = 30.0;
constexpr std::size_t kMaxMarks = 512;
constexpr double kLossMemory = 0.95;  // the smoothed loss forgets with a time constant of 20 steps
constexpr std::size_t kMaxBarCells = 40;
constexpr std::string_view kSeparator = "  ";

std::int64_t percent(std::int64_t part, std::int64_t whole) {
  // Rounded down: 100% means all of it.
  return static_cast<std::int64_t>(
      std::floor(100.0 * static_cast<double>(part) / static_cast<double>(whole)));
}

/// "571/600 MiB": both in the limit's unit.
std::string compact_pair(std::int64_t part, std::int64_t whole) {
  static constexpr std::array<const char*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
  double scale = 1.0;
  std::size_t unit = 0;
  while (static_cast<double>(whole) / scale >= 1024.0 && unit + 1 < units.size()) {
    scale *= 1024.0;
    ++unit;
  }
  const auto number = [&](std::int64_t bytes) {
    const double value = static_cast<double>(bytes) / scale;
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), unit == 0 || value >= 100.0 ? "%.0f" : "%.1f", value);
    return std::string(text.data());
  };
  return number(part) + "/" + number(whole) + " " + units[unit];
}

std::string joined(const std::vector<std::string>& parts) {
  std::string line;
  for (const auto& part : parts) {
    if (part.empty()) continue;
    if (!line.empty()) line += kSeparator;
    line += part;
  }
  return line;
}

}  // namespace

Progress::Progress(std::ostream& out, base::Clock clock, ProgressOptions options)
    : out_(out), clock_(std::move(clock)), options_(std::move(options)) {
  GRADUS_CHECK("progress", clock_ != nullptr, "a clock is required; got an empty function");
  GRADUS_CHECK("progress", options_.total_steps >= 0, "total_steps must be >= 0; got ",
               options_.total_steps);
  GRADUS_CHECK("progress", options_.first_step >= 0, "first_step must be >= 0; got ",
               options_.first_step);
  GRADUS_CHECK("progress", options_.redraw_interval_s >= 0.0,
               "redraw_interval_s must be >= 0; got ", options_.redraw_interval_s);
  GRADUS_CHECK("progress", options_.line_interval_s > 0.0, "line_interval_s must be > 0; got ",
               options_.line_interval_s);
  start_s_ = clock_();
  last_draw_s_ = start_s_;
  last_.step = options_.first_step;
  marks_.push_back({start_s_, options_.first_step, 0});
}

Progress::~Progress() {
  try {
    if (line_open_) out_ << '\n' << std::flush;
  } catch (...) {  // NOLINT: a stream that throws must not end the program here
  }
}

void Progress::update(const ProgressStep& step) {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  const double now_s = clock_();
  last_ = step;
  if (std::isfinite(step.loss)) {
    loss_sum_ = kLossMemory * loss_sum_ + (1.0 - kLossMemory) * step.loss;
    loss_weight_ = kLossMemory * loss_weight_ + (1.0 - kLossMemory);
  }
  marks_.push_back({now_s, step.step, marks_.back().tokens + step.tokens});
  while (marks_.size() > 2 &&
         (marks_.size() > kMaxMarks || marks_[1].time_s <= now_s - kRateWindow_s)) {
    marks_.pop_front();
  }
  shown_ = false;
  const bool first = !std::exchange(any_step_, true);
  const bool last = options_.total_steps > 0 && step.step >= options_.total_steps;
  if (options_.is_terminal) {
    if (first || last || now_s - last_draw_s_ >= options_.redraw_interval_s) draw();
    return;
  }
  if (!first && !last && now_s - last_draw_s_ < next_gap_s_) return;
  if (!first) next_gap_s_ = std::min(2.0 * next_gap_s_, options_.line_interval_s);
  print_line(plain_line());
}

void Progress::note(std::string_view text) {
  const std::lock_guard lock(mutex_);
  const std::string clean = internal::without_control_characters(text);
  if (!line_open_) {
    out_ << clean << '\n' << std::flush;
    return;
  }
  // One write: the bar goes, the text takes its place, the bar returns below.
  out_ << "\r\x1b[K" + clean + "\n";
  draw();
}

void Progress::finish() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(finished_, true)) return;
  if (!any_step_) return;
  if (options_.is_terminal) {
    draw();
    line_open_ = false;
    out_ << '\n' << std::flush;
  } else if (!shown_) {
    print_line(plain_line());
  }
}

void Progress::draw() {
  const int columns = options_.measure_columns ? options_.measure_columns() : options_.columns;
  // The last column stays free: some terminals wrap as soon as it is written.
  const auto width = static_cast<std::size_t>(std::max(columns, 2) - 1);
  // Overwriting and then clearing the rest, in one write, does not flicker; clearing first would.
  out_ << "\r" + bar_line(width) + "\x1b[K" << std::flush;
  last_draw_s_ = clock_();
  line_open_ = true;
  shown_ = true;
}

void Progress::print_line(std::string_view text) {
  out_ << std::string(text) + "\n" << std::flush;
  last_draw_s_ = clock_();
  shown_ = true;
}

std::string Progress::bar_line(std::size_t width) const {
  const bool counted = options_.total_steps > 0;
  const std::string step =
      counted ? base::join(last_.step, "/", options_.total_steps) : base::join("step ", last_.step);
  const std::string done =
      counted ? base::join(
                    percent(std::min(last_.step, options_.total_steps), options_.total_steps), "%")
              : "";
  const std::string loss = joined({"loss " + loss_text(), last_.remark});
  const std::string rate = internal::short_count(tokens_per_s()) +
                           (options_.item == "token" ? " tok/s" : " " + options_.item + "s/s");
  std::string memory = base::format_bytes(last_.peak_bytes);
  std::string short_memory = memory;
  if (options_.limit_bytes > 0) {
    const std::string share = base::join(percent(last_.peak_bytes, options_.limit_bytes), "%");
    memory = compact_pair(last_.peak_bytes, options_.limit_bytes) + " " + share;
    short_memory = "mem " + share;
  }
  struct Layout {
    std::vector<std::string> parts;
    std::size_t least_bar_cells;
  };
  // From rich to poor: the first that fits is shown.
  const std::array<Layout, 7> layouts{{{{done, step, loss, rate, memory, time_text()}, 8},
                                       {{done, step, loss, memory, time_text()}, 8},
                                       {{step, loss, memory, time_text()}, 0},
                                       {{step, loss, short_memory, time_text()}, 0},
                                       {{step, loss, short_memory}, 0},
                                       {{step, loss}, 0},
                                       {{step}, 0}}};
  for (const auto& [parts, least_bar_cells] : layouts) {
    const std::string text = joined(parts);
    const std::size_t frame = least_bar_cells > 0 && counted ? 3 : 0;  // two bars and a space
    const std::size_t least_cells = frame > 0 ? least_bar_cells : 0;
    if (internal::display_width(text) + frame + least_cells > width) continue;
    if (frame == 0) return text;
    return bar(std::min(kMaxBarCells, width - frame - internal::display_width(text))) + " " + text;
  }
  return std::string(internal::clip_to_width(step, width));
}

std::string Progress::bar(std::size_t cells) const {
  const double share = std::clamp(
      static_cast<double>(last_.step) / static_cast<double>(options_.total_steps), 0.0, 1.0);
  std::string text = "|";
  if (options_.unicode) {
    static constexpr std::array<const char*, 8> eighths{" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(cells) * 8.0);
    for (std::size_t cell = 0; cell < cells; ++cell) {
      text += filled >= 8 * (cell + 1) ? "█" : filled > 8 * cell ? eighths[filled - 8 * cell] : " ";
    }
  } else {
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(cells));
    text += std::string(filled, '#') + std::string(cells - filled, '-');
  }
  return text + "|";
}

std::string Progress::plain_line() const {
  std::string line = base::join("step ", last_.step);
  if (options_.total_steps > 0) line += base::join("/", options_.total_steps);
  std::string memory = "peak " + base::format_bytes(last_.peak_bytes);
  if (options_.limit_bytes > 0) {
    memory += base::join(" of ", base::format_bytes(options_.limit_bytes), " (",
                         percent(last_.peak_bytes, options_.limit_bytes), "%)");
  }
  return joined({line, "loss " + loss_text(), last_.remark,
                 internal::short_count(tokens_per_s()) + " " + options_.item + "s/s", memory,
                 time_text()});
}

std::string Progress::loss_text() const {
  // A loss that is not a number must be seen at once, not vanish in an average.
  if (!std::isfinite(last_.loss)) return internal::significant(last_.loss, 4);
  std::array<char, 32> text{};
  const double smoothed = loss_sum_ / loss_weight_;
  std::snprintf(text.data(), text.size(),
                std::abs(smoothed) < 1e-3 || std::abs(smoothed) >= 1e4 ? "%.3e" : "%.4f", smoothed);
  return text.data();
}

std::string Progress::time_text() const {
  if (finished_) return "in " + internal::clock_time(clock_() - start_s_);
  if (options_.total_steps <= 0) return internal::clock_time(clock_() - start_s_);
  const Mark& from = marks_.front();
  const Mark& to = marks_.back();
  const double steps_per_s = static_cast<double>(to.step - from.step) / (to.time_s - from.time_s);
  const double left =
      static_cast<double>(std::max<std::int64_t>(0, options_.total_steps - last_.step));
  return internal::clock_time(left / steps_per_s) + " left";
}

double Progress::tokens_per_s() const {
  const Mark& from = marks_.front();
  const Mark& to = marks_.back();
  if (!(to.time_s > from.time_s)) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(to.tokens - from.tokens) / (to.time_s - from.time_s);
}

TerminalTraits inspect_terminal(int descriptor) {
  TerminalTraits traits;
  const char* term = std::getenv("TERM");
  traits.is_terminal =
      ::isatty(descriptor) == 1 && term != nullptr && std::string_view(term) != "dumb";
  traits.unicode =
      names_utf8_locale(std::getenv("LC_ALL"), std::getenv("LC_CTYPE"), std::getenv("LANG"));
  winsize size{};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) traits.columns = size.ws_col;
  return traits;
}

bool names_utf8_locale(const char* lc_all, const char* lc_ctype, const char* lang) {
  for (const char* name : {lc_all, lc_ctype, lang}) {
    if (name == nullptr || *name == '\0') continue;
    std::string upper(name);
    std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) {
      return static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c);
    });
    return upper.find("UTF-8") != std::string::npos || upper.find("UTF8") != std::string::npos;
  }
  return false;
}

}  // namespace gradus::report
