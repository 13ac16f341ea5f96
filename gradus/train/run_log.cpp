#include <gradus/train/run_log.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;

report::MetricsWriter open_metrics(const std::string& directory, std::int64_t first_step) {
  report::MetricsWriter writer(fs::path(directory) / "metrics.jsonl");
  writer.truncate_after(first_step);
  return writer;
}

}  // namespace

RunLog::RunLog(const std::string& run_directory, std::int64_t first_step, std::int64_t total_steps,
               std::int64_t limit_bytes, const TrainerEnvironment& environment,
               const std::string& item)
    : directory_(run_directory),
      metrics_(open_metrics(run_directory, first_step)),
      board_(fs::path(run_directory) / "tensorboard",
             {.first_step = first_step == 0 ? 0 : first_step + 1}),
      progress_(environment.out, environment.clock,
                {.total_steps = total_steps,
                 .first_step = first_step,
                 .is_terminal = environment.terminal.is_terminal,
                 .unicode = environment.terminal.unicode,
                 .columns = environment.terminal.columns,
                 .limit_bytes = limit_bytes,
                 .item = item}) {
  report_.item = item;
  for (const auto& metrics : report::read_metrics(fs::path(directory_) / "metrics.jsonl"))
    remember_loss(metrics.loss);
}

void RunLog::remember_loss(double loss) {
  if (!std::isfinite(loss)) return;
  recent_losses_.push_back(loss);
  if (recent_losses_.size() > 10) recent_losses_.pop_front();
}

double RunLog::recent_loss() const {
  if (recent_losses_.empty()) return 0.0;
  return std::accumulate(recent_losses_.begin(), recent_losses_.end(), 0.0) /
         static_cast<double>(recent_losses_.size());
}

void RunLog::step(const report::StepMetrics& metrics, const std::string& remark) {
  metrics_.append(metrics);
  std::vector<std::pair<std::string, double>> values{
      {"train/loss", metrics.loss},
      {"train/lr", metrics.lr},
      {"train/grad_norm", metrics.grad_norm},
      {"train/tokens_per_s", metrics.tokens_per_s},
      {"memory/peak_bytes", static_cast<double>(metrics.peak_bytes)}};
  if (metrics.loss_scale) {
    values.emplace_back("amp/loss_scale", *metrics.loss_scale);
    values.emplace_back("amp/skipped", metrics.skipped ? 1.0 : 0.0);
  }
  if (metrics.validation_loss) values.emplace_back("validation/loss", *metrics.validation_loss);
  for (const auto& [name, value] : metrics.extra) values.emplace_back("train/" + name, value);
  board_.scalars(values, metrics.step);
  remember_loss(metrics.loss);
  peak_bytes_ = std::max(peak_bytes_, metrics.peak_bytes);
  progress_.update({.step = metrics.step,
                    .loss = metrics.loss,
                    .tokens = metrics.tokens,
                    .peak_bytes = peak_bytes_,
                    .remark = remark});
}

std::string RunLog::write_report() {
  report_.steps = report::read_metrics(fs::path(directory_) / "metrics.jsonl");
  const fs::path path = fs::path(directory_) / "report.html";
  report::write_html_report(path, report_);
  return path.string();
}

}  // namespace gradus::train
