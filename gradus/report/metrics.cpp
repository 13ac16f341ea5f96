#include <gradus/report/metrics.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include <gradus/base/error.h>
#include <gradus/report/internal/append_file.h>
#include <gradus/report/internal/text.h>

namespace gradus::report {
namespace {

using Json = nlohmann::json;
constexpr const char* kNonfinite = "_nonfinite";

/// Writes one flat or nested JSON object, names in the order given.
class ObjectWriter {
 public:
  void number(std::string_view name, double value) {
    if (std::isfinite(value)) {
      member(name, internal::exact_decimal(value));
      return;
    }
    member(name, "null");
    member(std::string(name) + kNonfinite, std::isnan(value) ? "\"nan\""
                                           : value > 0       ? "\"inf\""
                                                             : "\"-inf\"");
  }
  void integer(std::string_view name, std::int64_t value) { member(name, std::to_string(value)); }
  void boolean(std::string_view name, bool value) { member(name, value ? "true" : "false"); }
  void object(std::string_view name, ObjectWriter value) { member(name, value.take()); }
  std::string take() { return text_ + "}"; }

 private:
  void member(std::string_view name, std::string_view value) {
    if (text_.size() > 1) text_ += ',';
    text_ += internal::json_string(name) + ":";
    text_ += value;
  }
  std::string text_ = "{";
};

std::string to_line(const StepMetrics& metrics) {
  ObjectWriter out;
  out.integer("step", metrics.step);
  out.number("elapsed_s", metrics.elapsed_s);
  out.number("loss", metrics.loss);
  if (metrics.validation_loss) out.number("validation_loss", *metrics.validation_loss);
  out.number("lr", metrics.lr);
  out.number("grad_norm", metrics.grad_norm);
  if (metrics.loss_scale) out.number("loss_scale", *metrics.loss_scale);
  if (metrics.skipped) out.boolean("skipped", true);
  out.integer("tokens", metrics.tokens);
  out.number("tokens_per_s", metrics.tokens_per_s);
  out.integer("peak_bytes", metrics.peak_bytes);
  ObjectWriter peak;
  for (std::size_t i = 0; i < base::kMemoryCategoryCount; ++i) {
    peak.integer(base::kMemoryCategoryNames[i], metrics.peak.bytes[i]);
  }
  out.object("peak", std::move(peak));
  if (!metrics.extra.empty()) {
    ObjectWriter extra;
    for (const auto& [name, value] : metrics.extra) extra.number(name, value);
    out.object("extra", std::move(extra));
  }
  return out.take() + "\n";
}

double number(const Json& object, const std::string& name) {
  const Json& value = object.at(name);
  if (!value.is_null()) return value.get<double>();
  const auto kind = object.value(name + kNonfinite, std::string("nan"));
  if (kind == "inf") return std::numeric_limits<double>::infinity();
  if (kind == "-inf") return -std::numeric_limits<double>::infinity();
  return std::numeric_limits<double>::quiet_NaN();
}

/// @throws Json::exception if the line is no metrics object.
StepMetrics from_line(std::string_view line) {
  const Json object = Json::parse(line);
  StepMetrics metrics;
  metrics.step = object.at("step").get<std::int64_t>();
  metrics.elapsed_s = number(object, "elapsed_s");
  metrics.loss = number(object, "loss");
  if (object.contains("validation_loss"))
    metrics.validation_loss = number(object, "validation_loss");
  metrics.lr = number(object, "lr");
  metrics.grad_norm = number(object, "grad_norm");
  if (object.contains("loss_scale")) metrics.loss_scale = number(object, "loss_scale");
  metrics.skipped = object.value("skipped", false);
  metrics.tokens = object.at("tokens").get<std::int64_t>();
  metrics.tokens_per_s = number(object, "tokens_per_s");
  metrics.peak_bytes = object.at("peak_bytes").get<std::int64_t>();
  for (std::size_t i = 0; i < base::kMemoryCategoryCount; ++i) {
    metrics.peak.bytes[i] =
        object.at("peak").value(std::string(base::kMemoryCategoryNames[i]), std::int64_t{0});
  }
  if (object.contains("extra")) {
    for (const auto& [name, value] : object.at("extra").items()) {
      if (value.is_number() || value.is_null())
        metrics.extra[name] = number(object.at("extra"), name);
    }
  }
  return metrics;
}

std::string read_whole(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  GRADUS_CHECK("metrics", in.good() && !std::filesystem::is_directory(path), "cannot read '",
               path.string(), "' (a run writes it into its output folder)");
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Line {
  std::size_t begin;
  std::size_t end;  // past its newline, if it has one
  StepMetrics metrics;
};

/// The whole lines of @p text. A last line without an end is left out, and so is a last line that
/// is damaged: after a power failure a file may be longer than what of it was stored.
std::vector<Line> parse_lines(std::string_view text, const std::filesystem::path& path) {
  std::vector<Line> lines;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    ++number;
    const std::size_t newline = text.find('\n', begin);
    if (newline == std::string_view::npos) break;
    try {
      lines.push_back({begin, newline + 1, from_line(text.substr(begin, newline - begin))});
    } catch (const Json::exception& error) {
      const bool is_last = newline + 1 == text.size();
      GRADUS_CHECK("metrics", is_last && number > 1, "every line must be a step's metrics; line ",
                   number, " of '", path.string(), "' is not: ", error.what(),
                   ". Mend or remove the file");
      break;
    }
    begin = newline + 1;
  }
  return lines;
}

}  // namespace

struct MetricsWriter::State {
  internal::AppendFile file;
  std::int64_t last_step = 0;
};

MetricsWriter::MetricsWriter(std::filesystem::path path)
    : state_(new State{internal::AppendFile(std::move(path), "metrics",
                                            internal::AppendFile::Mode::open_or_create)}) {
  // A device (/dev/stdout, /dev/null) has nothing to mend.
  if (!std::filesystem::is_regular_file(state_->file.path())) return;
  const std::string text = read_whole(state_->file.path());
  const auto lines = parse_lines(text, state_->file.path());
  const std::size_t whole = lines.empty() ? 0 : lines.back().end;
  // Text without a single whole line could be the user's own file: only a torn first line of ours
  // may go.
  GRADUS_CHECK("metrics", whole > 0 || text.empty() || text.front() == '{' || text.front() == '\0',
               "'", state_->file.path().string(),
               "' must be a metrics file or empty; it starts with '",
               internal::valid_utf8(text.substr(0, 16)), "'. Name another file");
  if (whole < text.size()) state_->file.truncate(static_cast<std::int64_t>(whole));
  if (!lines.empty()) state_->last_step = lines.back().metrics.step;
}

MetricsWriter::MetricsWriter(MetricsWriter&&) noexcept = default;
MetricsWriter& MetricsWriter::operator=(MetricsWriter&&) noexcept = default;
MetricsWriter::~MetricsWriter() = default;

void MetricsWriter::append(const StepMetrics& metrics) {
  GRADUS_CHECK("metrics", metrics.step > state_->last_step, "steps must increase; got ",
               metrics.step, " after ", state_->last_step, " in '", state_->file.path().string(),
               "'. Call truncate_after with the step that training resumes from");
  state_->file.append(to_line(metrics));
  state_->last_step = metrics.step;
}

void MetricsWriter::truncate_after(std::int64_t step) {
  if (state_->last_step <= step) return;
  const auto lines = parse_lines(read_whole(state_->file.path()), state_->file.path());
  std::size_t kept = 0;
  std::int64_t last_step = 0;
  for (const auto& line : lines) {
    if (line.metrics.step > step) break;
    kept = line.end;
    last_step = line.metrics.step;
  }
  state_->file.truncate(static_cast<std::int64_t>(kept));
  state_->last_step = last_step;
}

std::int64_t MetricsWriter::last_step() const { return state_->last_step; }

std::vector<StepMetrics> read_metrics(const std::filesystem::path& path) {
  std::vector<StepMetrics> steps;
  for (auto& line : parse_lines(read_whole(path), path)) steps.push_back(std::move(line.metrics));
  return steps;
}

}  // namespace gradus::report
