#include <examples/support.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <ctime>
#include <filesystem>
#include <functional>
#include <iostream>
#include <numeric>
#include <optional>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <examples/compare_page.h>
#include <torch/torch.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/one_line.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/schedule.h>
#include <gradus/plan/planned_budget.h>
#include <gradus/report/html_report.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/memory_attribution.h>
#include <gradus/train/run_log.h>

namespace gradus::examples {
namespace {

namespace fs = std::filesystem;
using base::MemoryCategory;
using base::MemoryCategoryScope;
using base::MemoryTracker;

constexpr double kClipNorm = 1.0;
// The step whose memory the report draws: the optimizer has its state by then.
constexpr std::int64_t kTimelineStep = 3;

std::int64_t limit_of(const RunOptions& options) {
  return options.memory.empty() ? 0 : base::parse_bytes(options.memory);
}

std::string local_time() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M", &parts);
  return text;
}

/// A memory limit for as long as it lives: kept by a budget, or bare.
struct Enforcement {
  std::optional<plan::PlannedBudget> budget = {};
  std::optional<base::MemoryLimit> limit = {};

  Enforcement(std::int64_t limit_bytes, bool with_budget) {
    if (limit_bytes == 0) return;
    if (with_budget) {
      budget.emplace(plan::PlannedBudgetOptions{.limit_bytes = limit_bytes});
    } else {
      limit.emplace(base::MemoryLimitOptions{.device_bytes = limit_bytes});
    }
  }
};

/// Drops the subject's model whatever happens.
class ModelScope {
 public:
  ModelScope(Subject& subject, std::int64_t depth, std::int64_t seed) : subject_(subject) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    const MemoryCategoryScope category(MemoryCategory::parameters);
    try {
      module_ = subject.begin(depth);
    } catch (...) {
      subject.end();
      throw;
    }
  }
  ~ModelScope() { subject_.end(); }
  ModelScope(const ModelScope&) = delete;
  ModelScope& operator=(const ModelScope&) = delete;

  torch::nn::Module& module() { return *module_; }

 private:
  Subject& subject_;
  std::shared_ptr<torch::nn::Module> module_;
};

std::int64_t value_count(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const at::Tensor& parameter : module.parameters()) count += parameter.numel();
  return count;
}

/// Marks where a part of the step ends, for the report's memory chart.
using Mark = std::function<void(const char* next)>;

/// One optimizer step on the batch taken, and its loss.
struct Stepped {
  double loss = 0.0;
  double grad_norm = 0.0;
};
Stepped take_step(Subject& subject, optim::Optimizer& optimizer,
                  const std::vector<at::Tensor>& parameters, const Mark& mark) {
  Stepped stepped;
  mark("forward");
  {
    const at::Tensor loss = subject.loss();
    mark("backward");
    loss.backward();
    stepped.loss = loss.item<double>();
  }
  mark("optimizer");
  stepped.grad_norm = optim::clip_gradient_norm(parameters, kClipNorm);
  {
    const MemoryCategoryScope category(MemoryCategory::optimizer_state);
    optimizer.step();
  }
  optimizer.zero_grad();
  return stepped;
}

std::int64_t draw_batch(Subject& subject, bool largest) {
  const MemoryCategoryScope category(MemoryCategory::inputs);
  return subject.draw(largest);
}

/// A run from the first step to its report.
class Training {
 public:
  Training(Subject& subject, const RunOptions& options, std::string name, std::int64_t depth,
           const std::string& directory, std::ostream& out)
      : subject_(subject),
        options_(options),
        environment_{
            .out = out, .terminal = report::inspect_terminal(STDOUT_FILENO), .date = local_time()},
        directory_(directory) {
    result_.name = std::move(name);
    result_.depth = depth;
    result_.limit_bytes = limit_of(options);
    result_.model = subject.model_name(depth);
  }

  RunResult run();

 private:
  void step(optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, double lr);
  void evaluate(std::int64_t step);
  void write_report();

  Subject& subject_;
  const RunOptions& options_;
  train::TrainerEnvironment environment_;
  std::string directory_;
  MemoryTracker& tracker_ = MemoryTracker::install();
  std::optional<train::RunLog> log_;
  RunResult result_;
  Quality quality_;
  std::vector<double> step_ms_;
  double started_s_ = 0.0;
};

RunResult Training::run() {
  log_.emplace(directory_, 0, options_.steps, result_.limit_bytes, environment_, subject_.item());
  tracker_.reset_peak();
  // Before the first tensor: weights are made inside the limit too.
  const Enforcement enforcement(result_.limit_bytes, result_.name == "budget");
  ModelScope model(subject_, result_.depth, options_.seed);
  model.module().train();
  const std::vector<at::Tensor> parameters = model.module().parameters();
  result_.parameters = value_count(model.module());
  const train::MemoryAttribution attribution(model.module());
  std::optional<train::BudgetAttribution> budget_attribution;
  if (enforcement.budget) budget_attribution.emplace(model.module());
  optim::AdamW optimizer(parameters, {.lr = options_.lr});
  const optim::Schedule schedule = optim::warmup_cosine_schedule(
      {.peak_lr = options_.lr,
       .warmup_steps = std::min<std::int64_t>(options_.steps / 10, 50),
       .total_steps = options_.steps});
  started_s_ = environment_.clock();
  for (std::int64_t i = 0; i < options_.steps; ++i) {
    optimizer.set_learning_rate(schedule(i));
    step(optimizer, parameters, schedule(i));
    if (options_.eval_every > 0 && (i + 1) % options_.eval_every == 0 && i + 1 < options_.steps)
      evaluate(i + 1);
  }
  log_->finish();
  model.module().eval();
  {
    const torch::NoGradGuard no_grad;
    quality_ = subject_.evaluate(/*final=*/true);
  }
  result_.peak_bytes = std::max(result_.peak_bytes, tracker_.peak().total());
  result_.quality = quality_.text;
  result_.sample = quality_.sample;
  if (enforcement.budget) result_.replayed = enforcement.budget->statistics().replayed;
  write_report();
  return result_;
}

void Training::step(optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters,
                    double lr) {
  result_.peak_bytes = std::max(result_.peak_bytes, tracker_.peak().total());
  tracker_.reset_peak();
  report::StepMetrics metrics;
  metrics.step = static_cast<std::int64_t>(result_.steps.size()) + 1;
  metrics.lr = lr;
  report::ReportData& report = log_->report();
  const bool timeline = metrics.step == std::min(kTimelineStep, options_.steps);
  if (timeline) tracker_.start_timeline();
  const double begin_s = environment_.clock();
  metrics.tokens = draw_batch(subject_, /*largest=*/false);
  const Stepped stepped = take_step(subject_, optimizer, parameters, [&](const char* next) {
    if (!timeline) return;
    const double now = environment_.clock();
    if (!report.phases.empty()) report.phases.back().end_s = now;
    report.phases.push_back({.name = next, .begin_s = now, .end_s = now});
  });
  const double end_s = environment_.clock();
  metrics.peak = tracker_.peak();
  metrics.peak_bytes = metrics.peak.total();
  if (timeline) {
    report.phases.back().end_s = end_s;
    report.step_timeline = tracker_.stop_timeline();
    report.timeline_label = base::join("step ", metrics.step);
    report.peak_breakdown = metrics.peak;
  }
  metrics.loss = stepped.loss;
  metrics.grad_norm = stepped.grad_norm;
  metrics.elapsed_s = end_s - started_s_;
  metrics.tokens_per_s = static_cast<double>(metrics.tokens) / std::max(end_s - begin_s, 1e-9);
  log_->step(metrics);
  GRADUS_CHECK("train", std::isfinite(metrics.loss), "the loss must stay finite; step ",
               metrics.step, " gave ", metrics.loss, ". Lower --lr");
  step_ms_.push_back(1e3 * (end_s - begin_s));
  result_.steps.push_back(metrics);
}

void Training::evaluate(std::int64_t step) {
  Quality quality;
  {
    const torch::NoGradGuard no_grad;
    quality = subject_.evaluate(/*final=*/false);
  }
  log_->note(base::join("step ", step, ": ", subject_.quality_name(), " ", quality.text,
                        " on part of the held-out data"));
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void Training::write_report() {
  result_.step_ms = median(step_ms_);
  const std::size_t last = std::min<std::size_t>(result_.steps.size(), 20);
  result_.last_loss =
      std::accumulate(result_.steps.end() - static_cast<std::ptrdiff_t>(last), result_.steps.end(),
                      0.0, [](double sum, const auto& step) { return sum + step.loss; }) /
      static_cast<double>(last);
  report::ReportData& report = log_->report();
  report.title = base::join(subject_.task(), ": ", subject_.quality_name(), " ", quality_.text);
  report.status = base::join("finished ", options_.steps, " steps");
  report.created = environment_.date;
  report.model = result_.model;
  report.parameter_count = result_.parameters;
  report.plan = result_.name == "budget"
                    ? base::join("memory budget: ", result_.replayed, " operators run again")
                    : std::string("none: plain training");
  report.microbatch_size = options_.batch;
  report.microbatches_per_step = 1;
  report.limit_bytes = result_.limit_bytes;
  report.peak_bytes = result_.peak_bytes;
  report.loss_label = subject_.loss_label();
  report.configuration = {{"depth", std::to_string(result_.depth)},
                          {"steps", std::to_string(options_.steps)},
                          {"batch", std::to_string(options_.batch)},
                          {"lr", base::join(options_.lr)},
                          {"seed", std::to_string(options_.seed)}};
  for (const auto& setting : subject_.settings()) report.configuration.push_back(setting);
  report.environment = {{"LibTorch", TORCH_VERSION},
                        {"threads", std::to_string(at::get_num_threads())}};
  report.sample_text = quality_.sample;
  result_.report_path = log_->write_report();
}

/// Whether plain training of @p depth stays below the limit on the batch that needs most.
bool plain_fits(Subject& subject, const RunOptions& options, std::int64_t depth) {
  try {
    const Enforcement enforcement(limit_of(options), /*with_budget=*/false);
    ModelScope model(subject, depth, options.seed);
    const std::vector<at::Tensor> parameters = model.module().parameters();
    optim::AdamW optimizer(parameters, {.lr = 0.0});
    // The second step begins with the optimizer's state already there.
    for (int i = 0; i < 2; ++i) {
      draw_batch(subject, /*largest=*/true);
      take_step(subject, optimizer, parameters, [](const char*) {});
    }
    return true;
  } catch (const MemoryLimitError&) {
    return false;
  }
}

/// The deepest plain model that fits, by doubling, then bisection; below @p wanted.
std::int64_t deepest_plain(Subject& subject, const RunOptions& options, std::int64_t wanted,
                           std::ostream& out) {
  const std::int64_t first = subject.smallest_depth();
  const std::int64_t unit = subject.depth_step();
  const auto fits = [&](std::int64_t units) {
    const std::int64_t depth = first + units * unit;
    const bool good = plain_fits(subject, options, depth);
    out << "plain training of depth " << depth << (good ? " fits" : " does not fit") << std::endl;
    return good;
  };
  const std::string limit = base::format_bytes(limit_of(options));
  GRADUS_CHECK("compare", fits(0), "plain training must fit at its smallest depth, ", first,
               "; it does not under ", limit, ". Raise --memory or lower --batch");
  const std::int64_t last = (wanted - first) / unit;
  std::int64_t low = 0;
  std::int64_t high = std::min<std::int64_t>(1, last);
  while (high < last && fits(high)) {
    low = high;
    high = std::min(last, 2 * high);
  }
  GRADUS_CHECK("compare", high < last || !fits(last),
               "--depth must be more than plain training can have; ", wanted, " fits under ", limit,
               " without a budget. Raise --depth or lower --memory");
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return first + low * unit;
}

void print_result(const Subject& subject, const RunResult& result, std::ostream& out) {
  out << result.model << ": " << subject.quality_name() << ' ' << result.quality << ", peak "
      << base::format_bytes(result.peak_bytes);
  if (result.limit_bytes > 0) out << " of " << base::format_bytes(result.limit_bytes);
  out << ", " << result.replayed << " operators run again\n"
      << "report " << result.report_path << std::endl;
}

void compare(Subject& subject, const RunOptions& options, std::ostream& out) {
  const std::int64_t plain_depth = deepest_plain(subject, options, options.depth, out);
  const fs::path directory(options.out);
  std::vector<RunResult> runs;
  for (const auto& [name, depth] :
       {std::pair<std::string, std::int64_t>{"plain", plain_depth}, {"budget", options.depth}}) {
    out << '\n' << name << ": " << subject.model_name(depth) << std::endl;
    fs::create_directories(directory / name);
    runs.push_back(Training(subject, options, name, depth, (directory / name).string(), out).run());
    print_result(subject, runs.back(), out);
    runs.back().report_path = name + "/report.html";
  }
  const ComparisonText text{
      .title = base::join(subject.task(), ": under ", base::format_bytes(limit_of(options)),
                          ", depth ", plain_depth, " plain and ", options.depth, " by a budget"),
      .quality_name = subject.quality_name(),
      .loss_label = subject.loss_label()};
  const std::string page = (directory / "report.html").string();
  state::write_file_atomically(page, comparison_page(text, runs));
  out << '\n' << comparison_table(text, runs) << "\nreport " << page << std::endl;
}

int fail(const CLI::App& app, const std::string& message, int code) {
  std::cerr << app.get_name() << ": error: " << base::one_line(message) << '\n';
  return code;
}

/// Runs a part of the program; what it throws becomes one line and @p code.
int guarded(const CLI::App& app, const std::function<void()>& part, int code) {
  try {
    part();
    return 0;
  } catch (const c10::Error& error) {
    return fail(app, error.what_without_backtrace(), code);
  } catch (const std::bad_alloc&) {
    return fail(app, "the operating system has no memory left", code);
  } catch (const std::exception& error) {
    return fail(app, error.what(), code);
  }
}

}  // namespace

void add_run_options(CLI::App& app, RunOptions& options) {
  // Of a flag given twice the last counts, so that a script's defaults can be overridden.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--memory", options.memory, "Limit of all tensors, such as 300MiB; empty: none")
      ->capture_default_str();
  app.add_option("--plan", options.plan,
                 "How to keep the limit: budget (recompute), or none (plain training)")
      ->capture_default_str();
  app.add_flag("--compare", options.compare,
               "Also train the deepest plain model that fits, and compare");
  app.add_option("--depth", options.depth, "Depth of the model")->capture_default_str();
  app.add_option("--steps", options.steps, "Optimizer steps")->capture_default_str();
  app.add_option("--batch", options.batch, "Examples in a step")->capture_default_str();
  app.add_option("--lr", options.lr, "Highest learning rate")->capture_default_str();
  app.add_option("--seed", options.seed, "Of weights, dropout and order")->capture_default_str();
  app.add_option("--threads", options.threads, "Compute threads; 0: LibTorch's default")
      ->capture_default_str();
  app.add_option("--eval-every", options.eval_every,
                 "Steps between evaluations on part of the held-out data; 0: none")
      ->capture_default_str();
  app.add_option("--data", options.data, "Directory of the data")->capture_default_str();
  app.add_option("--out", options.out, "Run directory")->capture_default_str();
}

void validate(const RunOptions& options, const Subject* subject) {
  const auto at_least = [](const char* flag, std::int64_t value, std::int64_t least) {
    GRADUS_CHECK("flags", value >= least, flag, " must be >= ", least, "; got ", value);
  };
  at_least("--steps", options.steps, 1);
  at_least("--batch", options.batch, 1);
  at_least("--threads", options.threads, 0);
  at_least("--eval-every", options.eval_every, 0);
  GRADUS_CHECK("flags", std::isfinite(options.lr) && options.lr >= 0.0,
               "--lr must be finite and >= 0; got ", options.lr);
  GRADUS_CHECK("flags", options.plan == "budget" || options.plan == "none",
               "--plan must be budget or none; got '", options.plan, "'");
  GRADUS_CHECK("flags", !options.out.empty(), "--out must name a directory; got none");
  const std::int64_t limit = limit_of(options);
  GRADUS_CHECK("flags", limit > 0 || options.memory.empty(), "--memory must be > 0; got '",
               options.memory, "'");
  GRADUS_CHECK("flags", limit > 0 || (options.plan == "none" && !options.compare),
               "a budget and a comparison need a limit: set --memory, or train with --plan none");
  GRADUS_CHECK("flags", !options.compare || options.plan == "budget",
               "--compare trains plain and by a budget; leave out --plan");
  if (subject == nullptr) return;
  at_least("--depth", options.depth, subject->smallest_depth());
  GRADUS_CHECK("flags", (options.depth - subject->smallest_depth()) % subject->depth_step() == 0,
               "--depth must be ", subject->smallest_depth(), " and multiples of ",
               subject->depth_step(), " more; got ", options.depth);
}

void run_example(Subject& subject, const RunOptions& options, std::ostream& out) {
  MemoryTracker::install();
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  std::error_code error;
  fs::create_directories(options.out, error);
  GRADUS_CHECK("train", !error, "the run directory ", options.out,
               " cannot be made: ", error.message());
  out << subject.task() << std::endl;
  if (options.compare) {
    compare(subject, options, out);
    return;
  }
  const std::string name = options.plan == "budget" ? "budget" : "plain";
  print_result(subject, Training(subject, options, name, options.depth, options.out, out).run(),
               out);
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& prepare,
                const std::function<void()>& run) {
  constexpr int kRunFailed = 1;
  constexpr int kBadUsage = 2;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    return fail(app, base::join(error.what(), " (", app.get_name(), " --help)"), kBadUsage);
  }
  if (const int code = guarded(app, prepare, kBadUsage)) return code;
  return guarded(app, run, kRunFailed);
}

}  // namespace gradus::examples
