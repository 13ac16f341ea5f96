#include <gradus/train/trainer.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/csrc/api/include/torch/utils.h>
#include <torch/headeronly/version.h>

#include <gradus/accumulate/window.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/base/step_boundary.h>
#include <gradus/data/token_file.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/schedule.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/device.h>
#include <gradus/train/generate.h>
#include <gradus/train/language_model.h>
#include <gradus/train/memory_attribution.h>
#include <gradus/train/run_log.h>
#include <gradus/train/step_trial.h>
#include <gradus/train/training_state.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using base::MemoryCategory;

// The data of a run: tokens divided, and a stream over each part.
struct RunData {
  data::PreparedTokens prepared;
  data::BatchStream training;
  std::optional<data::BatchStream> validation;
};

RunData make_data(const TrainConfig& config) {
  data::PreparedTokens prepared = data::prepare_tokens(
      config.data.corpus,
      {.kind = config.data.tokenizer, .vocabulary_size = config.data.vocabulary},
      config.data.cache);
  const auto split = data::split_tokens(prepared.tokens->size(),
                                        {.validation_ratio = config.data.validation_ratio});
  data::BatchStream training(prepared.tokens, split.train,
                             {.batch_size = config.train.batch,
                              .sequence_length = config.model.context,
                              .seed = static_cast<std::uint64_t>(config.train.seed)});
  std::optional<data::BatchStream> validation;
  if (!split.validation.empty()) {
    validation.emplace(prepared.tokens, split.validation,
                       data::BatchOptions{.batch_size = config.train.batch,
                                          .sequence_length = config.model.context,
                                          .shuffle = false});
  }
  return {std::move(prepared), std::move(training), std::move(validation)};
}

class Run {
 public:
  Run(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);
  TrainOutcome execute();

 private:
  void open_directory();
  void make_plan();
  void start_log();
  bool step();  // false if it was interrupted
  void record_timeline(std::int64_t micro_batch, std::int64_t micro_batches);
  std::optional<double> evaluate_now();
  void save();
  void summarise(TrainOutcome& outcome);
  double elapsed() const { return elapsed_before_ + environment_.clock() - started_; }

  TrainConfig config_;
  const bool resume_;
  const TrainerEnvironment& environment_;
  const std::int64_t limit_bytes_;
  const at::Device device_;
  base::MemoryTracker& tracker_;
  std::optional<SavedState> resumed_;
  std::optional<RunData> data_;
  models::Gpt gpt_{nullptr};
  std::optional<base::NamedTensors> names_;
  std::optional<MemoryAttribution> attribution_;
  std::optional<base::MemoryLimit> limit_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<accumulate::GradientWindow> window_;
  optim::Schedule schedule_;
  std::optional<RunLog> log_;
  RunState state_;
  std::string saved_path_;
  std::int64_t saved_step_ = -1;
  std::vector<double> recent_losses_;
  double started_ = 0.0;
  double elapsed_before_ = 0.0;
};

Run::Run(const TrainConfig& config, bool resume, const TrainerEnvironment& environment)
    : config_(config),
      resume_(resume),
      environment_(environment),
      limit_bytes_(config.memory.limit.empty() ? 0 : base::parse_bytes(config.memory.limit)),
      device_(find_device(config.train.device)),
      tracker_(base::MemoryTracker::install({.clock = environment.clock})) {
  validate(config_);
  GRADUS_CHECK(
      "train", device_.is_cpu() || (config_.memory.limit.empty() && config_.memory.plan != "auto"),
      "memory limits and automatic plans work on the CPU so far; for ", device_.str(),
      " leave memory.limit empty and set memory.plan to none or micro-batch=N,recompute=N");
  if (config_.train.threads > 0) at::set_num_threads(static_cast<int>(config_.train.threads));
  open_directory();
  data_.emplace(make_data(config_));
  const std::int64_t vocabulary = data_->prepared.tokenizer->vocabulary_size();

  // Before the first tensor: weights are made inside the limit too.
  if (limit_bytes_ > 0) limit_.emplace(base::MemoryLimitOptions{.device_bytes = limit_bytes_});
  torch::manual_seed(static_cast<std::uint64_t>(config_.train.seed));
  {
    const base::MemoryCategoryScope parameters(MemoryCategory::parameters);
    gpt_ = make_gpt(config_, vocabulary);
    gpt_->to(device_);
  }
  names_.emplace(named_tensors(*gpt_));
  attribution_.emplace(*gpt_);

  if (resumed_) {
    state_ = resumed_->run;
    saved_step_ = state_.step;
    saved_path_ = resumed_->path;
    elapsed_before_ = state_.elapsed_s;
    load_model(*resumed_, named_tensors(*gpt_));
    data_->training.seek(state_.position);
  }
  make_plan();
  optimizer_ = make_optimizer(config_.optimizer, *gpt_, config_.optimizer.lr);
  if (resumed_) {
    load_optimizer(*resumed_, *optimizer_);
    base::RngState rng = base::RngState::capture();
    load_rng(*resumed_, rng);
    rng.restore();
  }
  window_.emplace(gpt_->parameters(),
                  accumulate::WindowOptions{.micro_batches = state_.plan.micro_batches,
                                            .normalisation = accumulate::Normalisation::tokens});
  schedule_ = optim::warmup_cosine_schedule({.peak_lr = config_.optimizer.lr,
                                             .warmup_steps = config_.optimizer.warmup,
                                             .total_steps = config_.train.steps,
                                             .min_ratio = config_.optimizer.min_lr_ratio});
  start_log();
}

void Run::open_directory() {
  const fs::path directory = config_.train.out;
  GRADUS_CHECK("train", !config_.train.out.empty(), "a run directory is required; set train.out");
  FoundState found;
  if (fs::exists(directory)) found = find_training_state(directory.string());
  for (const std::string& damaged : found.damaged) {
    environment_.out << "warning: passed over a damaged training state: " << damaged << '\n';
  }
  if (resume_) {
    GRADUS_CHECK("train", found.newest.has_value(), "to resume, ", directory.string(),
                 " must hold a good training state; it holds ",
                 found.damaged.empty() ? "none" : "damaged ones only");
    resumed_ = std::move(found.newest);
    return;
  }
  GRADUS_CHECK("train",
               !found.newest && found.damaged.empty() && !fs::exists(directory / "metrics.jsonl"),
               directory.string(),
               " already holds a run; continue it with --resume, or choose another --out");
  std::error_code error;
  fs::create_directories(directory, error);
  GRADUS_CHECK("train", !error, "the run directory ", directory.string(),
               " cannot be made: ", error.message());
}

void Run::make_plan() {
  const std::int64_t segments = config_.model.layers;
  const PlanRequest request =
      parse_plan_request(config_.memory.plan, config_.train.batch, segments);
  if (resumed_ && state_.plan_request == config_.memory.plan &&
      state_.memory_limit == config_.memory.limit) {
    return;  // the same plan, or the run would not continue bit for bit
  }
  if (resumed_) {
    environment_.out << "note: memory.limit or memory.plan changed since the state was saved; a "
                        "new plan may round "
                        "differently from here on\n";
  }
  state_.memory_limit = config_.memory.limit;
  state_.plan_request = config_.memory.plan;
  if (!request.automatic) {
    state_.plan = request.plan;
    state_.plan_reason = "as asked";
    return;
  }
  if (limit_bytes_ == 0) {
    state_.plan = {};
    state_.plan_reason = "no memory limit: plain training";
    return;
  }
  environment_.out << "measuring a step to fit " << base::format_bytes(limit_bytes_) << " ..."
                   << std::endl;
  const data::DataPosition position = data_->training.position();
  StepTrials trials(gpt_, data_->training.next(), make_optimizer(config_.optimizer, *gpt_, 0.0),
                    environment_.clock);
  data_->training.seek(position);
  const PlanChoice choice =
      choose_plan(config_.train.batch, segments, limit_bytes_,
                  [&](std::int64_t size, std::int64_t recomputed, bool accumulating) {
                    return trials.run(size, recomputed, accumulating);
                  });
  state_.plan = choice.plan;
  state_.plan_reason = choice.reason;
  state_.plain_peak_bytes = choice.plain_peak_bytes;
}

void Run::start_log() {
  log_.emplace(config_.train.out, state_.step, config_.train.steps, limit_bytes_, environment_);
  if (!resumed_) {
    state::write_file_atomically((fs::path(config_.train.out) / "config.toml").string(),
                                 config_toml(config_));
    data_->prepared.tokenizer->save((fs::path(config_.train.out) / "tokenizer").string());
  }
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : gpt_->parameters()) parameters += parameter.numel();
  const auto& model = config_.model;
  report::ReportData& report = log_->report();
  report.title = base::join("GPT on ", config_.data.corpus);
  report.created = environment_.date;
  report.model = base::join("GPT, ", model.layers, " layers, width ", model.width, ", ",
                            model.heads, " heads, context ", model.context, ", vocabulary ",
                            data_->prepared.tokenizer->vocabulary_size());
  report.parameter_count = parameters;
  report.plan = describe_plan(state_.plan, config_.train.batch, model.layers);
  report.plan_reason = state_.plan_reason;
  report.microbatch_size = state_.plan.largest(config_.train.batch);
  report.microbatches_per_step = state_.plan.micro_batches;
  report.recomputed_segments = state_.plan.recomputed;
  report.segments = model.layers;
  report.limit_bytes = limit_bytes_;
  report.plain_peak_bytes = state_.plain_peak_bytes;
  report.plain_source = "predicted from measured steps of two and three sequences";
  report.configuration = describe_config(config_);
  report.environment = {{"LibTorch", TORCH_VERSION},
                        {"threads", std::to_string(at::get_num_threads())},
                        {"device", device_.str()}};
  environment_.out << report.model << ", " << parameters << " parameters\n"
                   << "plan: " << report.plan << ": " << report.plan_reason << '\n';
  if (resumed_)
    environment_.out << "resumed from " << resumed_->path << " at step " << state_.step << '\n';
  environment_.out << std::flush;
}

void Run::record_timeline(std::int64_t micro_batch, std::int64_t micro_batches) {
  report::ReportData& report = log_->report();
  const double now = environment_.clock();
  if (!report.phases.empty()) report.phases.back().end_s = now;
  std::string name = micro_batch == micro_batches ? "optimizer"
                     : micro_batches == 1         ? "forward and backward"
                     : micro_batch == 0           ? "first micro-batch"
                                                  : "further micro-batches";
  if (micro_batch >= 2 && micro_batch < micro_batches) return;
  report.phases.push_back({std::move(name), now, now});
}

bool Run::step() {
  const base::RngState rng_before = base::RngState::capture();
  const data::DataPosition position_before = data_->training.position();
  const double start = environment_.clock();
  // The first step of a process makes the optimizer's state; the second one is like all others.
  const bool timeline =
      log_->report().step_timeline.empty() && !optimizer_->state_tensors().empty();
  tracker_.reset_peak();
  if (timeline) tracker_.start_timeline();

  const data::Batch batch = data_->training.next();
  const std::int64_t tokens = batch.inputs.numel();
  window_->expect_total_weight(static_cast<double>(tokens));
  const std::vector<std::int64_t> sizes = state_.plan.sizes(batch.size());
  std::int64_t at = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (timeline)
      record_timeline(static_cast<std::int64_t>(i), static_cast<std::int64_t>(sizes.size()));
    at::Tensor inputs, targets;
    {
      const base::MemoryCategoryScope category(MemoryCategory::inputs);
      inputs = batch.inputs.narrow(0, at, sizes[i]).to(device_);
      targets = batch.targets.narrow(0, at, sizes[i]).to(device_);
    }
    at += sizes[i];
    window_->backward(language_model_loss(*gpt_, inputs, targets, state_.plan.recomputed),
                      static_cast<double>(inputs.numel()));
    if (environment_.should_stop()) {
      // As if this step had never begun: the state saved is that of the last whole step.
      window_->reset();
      data_->training.seek(position_before);
      rng_before.restore();
      if (timeline) {
        tracker_.stop_timeline();
        log_->report().phases.clear();
      }
      return false;
    }
  }
  if (timeline)
    record_timeline(static_cast<std::int64_t>(sizes.size()),
                    static_cast<std::int64_t>(sizes.size()));
  const accumulate::WindowResult result = window_->finish();
  if (!std::isfinite(result.loss)) {
    optimizer_->zero_grad();
    data_->training.seek(position_before);
    rng_before.restore();
    save();
    throw UserError(base::join(
        "[train] the loss must stay finite; it is ", result.loss, " at step ", state_.step + 1,
        ". The state before that step is saved; resume with a lower --lr or --clip-norm"));
  }
  report::StepMetrics metrics;
  metrics.lr = schedule_(state_.step);
  optimizer_->set_learning_rate(metrics.lr);
  metrics.grad_norm =
      config_.optimizer.clip_norm > 0.0
          ? optim::clip_gradient_norm(gpt_->parameters(), config_.optimizer.clip_norm)
          : optim::gradient_norm(gpt_->parameters());
  {
    const base::MemoryCategoryScope category(MemoryCategory::optimizer_state);
    optimizer_->step();
  }
  optimizer_->zero_grad();
  metrics.peak = tracker_.peak();
  metrics.peak_bytes = metrics.peak.total();
  if (timeline) {
    report::ReportData& report = log_->report();
    report.phases.back().end_s = environment_.clock();
    report.step_timeline = tracker_.stop_timeline();
    report.timeline_label = base::join("step ", state_.step + 1);
    report.peak_breakdown = metrics.peak;
  }

  ++state_.step;
  state_.position = data_->training.position();
  state_.peak_bytes = std::max(state_.peak_bytes, metrics.peak_bytes);
  if (state_.step == 1) state_.first_loss = result.loss;
  recent_losses_.push_back(result.loss);
  if (recent_losses_.size() > 10) recent_losses_.erase(recent_losses_.begin());
  double sum = 0.0;
  for (const double loss : recent_losses_) sum += loss;
  state_.last_loss = sum / static_cast<double>(recent_losses_.size());

  metrics.step = state_.step;
  metrics.loss = result.loss;
  metrics.tokens = tokens;
  metrics.tokens_per_s = static_cast<double>(tokens) / std::max(environment_.clock() - start, 1e-9);
  if (config_.train.eval_every > 0 &&
      (state_.step % config_.train.eval_every == 0 || state_.step == config_.train.steps)) {
    metrics.validation_loss = evaluate_now();
  }
  metrics.elapsed_s = elapsed();
  log_->step(metrics);
  base::step_boundary().notify(state_.step);
  return true;
}

std::optional<double> Run::evaluate_now() {
  if (!data_->validation) return std::nullopt;
  const std::int64_t sequences =
      std::min(config_.train.eval_sequences, data_->validation->sequences_per_epoch());
  const double loss =
      evaluate(*gpt_, *data_->validation, sequences, state_.plan.largest(config_.train.batch));
  log_->note(base::join("step ", state_.step, ": validation loss ", loss));
  return loss;
}

void Run::save() {
  state_.elapsed_s = elapsed();
  state_.position = data_->training.position();
  saved_path_ = save_training_state(config_.train.out, config_.train.keep, state_,
                                    named_tensors(*gpt_), *optimizer_, base::RngState::capture())
                    .path;
  saved_step_ = state_.step;
}

void Run::summarise(TrainOutcome& outcome) {
  report::ReportData& report = log_->report();
  report.status = outcome.interrupted ? base::join("interrupted at step ", state_.step)
                                      : base::join("finished ", state_.step, " steps");
  report.peak_bytes = state_.peak_bytes;
  report.elapsed_s = elapsed();
  report.sample_prompt = config_.sample.prompt;
  report.sample_text = outcome.sample;
  outcome.report_path = log_->write_report();
}

TrainOutcome Run::execute() {
  started_ = environment_.clock();
  TrainOutcome outcome;
  while (state_.step < config_.train.steps && !outcome.interrupted) {
    outcome.interrupted = environment_.should_stop() || !step();
    if (!outcome.interrupted && config_.train.save_every > 0 &&
        state_.step % config_.train.save_every == 0) {
      save();
      summarise(outcome);
    }
  }
  if (saved_step_ != state_.step) save();
  log_->finish();
  if (!outcome.interrupted && config_.sample.tokens > 0) {
    outcome.sample = generate(*gpt_, *data_->prepared.tokenizer,
                              {.prompt = config_.sample.prompt,
                               .tokens = config_.sample.tokens,
                               .temperature = config_.sample.temperature,
                               .top_k = config_.sample.top_k,
                               .seed = static_cast<std::uint64_t>(config_.train.seed)});
  }
  summarise(outcome);
  outcome.steps = state_.step;
  outcome.first_loss = state_.first_loss;
  outcome.last_loss = state_.last_loss;
  outcome.peak_bytes = state_.peak_bytes;
  outcome.plain_peak_bytes = state_.plain_peak_bytes;
  outcome.plan = state_.plan;
  outcome.state_path = saved_path_;
  return outcome;
}

}  // namespace

TrainOutcome train(const TrainConfig& config, bool resume, const TrainerEnvironment& environment) {
  return Run(config, resume, environment).execute();
}

}  // namespace gradus::train
