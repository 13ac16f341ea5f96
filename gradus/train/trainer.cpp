#include <gradus/train/trainer.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/headeronly/version.h>
#include <torch/utils.h>

#include <gradus/accumulate/window.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/base/step_boundary.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/schedule.h>
#include <gradus/plan/budget_compression.h>
#include <gradus/plan/store_stash.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/classification.h>
#include <gradus/train/device.h>
#include <gradus/train/generate.h>
#include <gradus/train/language_model.h>
#include <gradus/train/memory_attribution.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/planning.h>
#include <gradus/train/precision.h>
#include <gradus/train/run_data.h>
#include <gradus/train/run_directory.h>
#include <gradus/train/run_lock.h>
#include <gradus/train/run_log.h>
#include <gradus/train/training_state.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using base::MemoryCategory;

// All that a plan depends on.
std::string plan_inputs(const TrainConfig& config, std::int64_t vocabulary) {
  const auto& m = config.model;
  return base::join("limit ", config.memory.limit, ", plan ", config.memory.plan, ", batch ",
                    config.train.batch, ", layers ", m.layers, ", heads ", m.heads, ", width ",
                    m.width, ", context ", m.context, ", dropout ", m.dropout, ", bias ", m.bias,
                    ", vocabulary ", vocabulary, ", optimizer ", config.optimizer.kind,
                    ", optimizer state ", config.memory.optimizer_state, ", precision ",
                    config.train.precision, ", accumulate ", config.train.accumulate,
                    // What is lossless changes no number.
                    parse_lossy(config.memory.compress) == compress::Lossy::none
                        ? ""
                        : ", compress " + config.memory.compress);
}

class Run {
 public:
  Run(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);
  TrainOutcome execute();

 private:
  void make_plan();
  PlannedTraining choose(std::optional<Plan> only);
  void start_log();
  bool step();  // false if it was interrupted
  // What a step is abandoned to.
  struct StepStart {
    base::RngState rng;
    data::DataPosition position;
    std::vector<std::pair<std::string, at::Tensor>> precision;
    bool timeline;
  };
  void abandon_step(const StepStart& start);
  [[noreturn]] void refuse_non_finite(const StepStart& start, const char* what, double value);
  bool scales_loss() const;
  TrainConfig planned_config() const;
  std::optional<accumulate::WindowResult> accumulate_batch(const data::Batch& batch, bool timeline);
  void begin_phase(std::int64_t micro_batch, std::int64_t micro_batches);
  void end_timeline(const base::MemoryBreakdown& peak);
  void finish_step(report::StepMetrics& metrics);
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
  std::optional<RunLock> lock_;
  std::optional<SavedState> resumed_;
  std::optional<RunData> data_;
  models::Gpt gpt_{nullptr};
  std::optional<amp::Amp> amp_;
  std::optional<base::NamedTensors> names_;
  std::optional<MemoryAttribution> attribution_;
  std::optional<base::MemoryLimit> limit_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<accumulate::GradientWindow> window_;
  optim::Schedule schedule_;
  std::optional<RunLog> log_;
  RunState state_;
  PassPlans passes_;                         // if state_.plan.budget
  std::shared_ptr<recompute::Stash> stash_;  // where plans move what they offload; may be null
  std::string saved_path_;
  std::int64_t saved_step_ = -1;
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
  make_run_directory(config_.train.out);
  lock_.emplace(config_.train.out);
  resumed_ = starting_state(config_.train.out, resume_, environment_.out);
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
  if (resumed_) {
    state_ = resumed_->run;
    saved_step_ = state_.step;
    saved_path_ = resumed_->path;
    elapsed_before_ = state_.elapsed_s;
    GRADUS_CHECK("train",
                 state_.corpus_hash == data_->prepared.tokens->info().corpus_hash &&
                     state_.tokenizer_hash == data_->prepared.tokenizer->hash(),
                 "a run goes on with the text it began with; ", config_.data.corpus,
                 " is another now, or is read "
                 "with another tokenizer. Put it back, or start a new run");
    load_model(*resumed_, named_tensors(*gpt_));
    data_->training.seek(state_.position);
  }
  {
    const base::MemoryCategoryScope parameters(MemoryCategory::parameters);
    amp_.emplace(amp::initialize(*gpt_, precision_options(config_)));
  }
  if (resumed_) amp_->load_state(load_precision(*resumed_));
  names_.emplace(named_tensors(*gpt_));
  attribution_.emplace(*gpt_);
  state_.corpus_hash = data_->prepared.tokens->info().corpus_hash;
  state_.tokenizer_hash = data_->prepared.tokenizer->hash();
  make_plan();
  optimizer_ = make_optimizer(planned_config(), *amp_, *gpt_, config_.optimizer.lr);
  if (resumed_) {
    load_optimizer(*resumed_, *optimizer_);
    base::RngState rng = base::RngState::capture();
    load_rng(*resumed_, rng);
    rng.restore();
  }
  accumulate::WindowOptions window{.micro_batches = state_.plan.micro_batches,
                                   .normalisation = accumulate::Normalisation::tokens};
  if (scales_loss()) {
    window.scale_loss = [this](const at::Tensor& seed) { return seed * amp_->loss_scale(); };
  }
  window_.emplace(amp_->parameters(*gpt_), window);
  schedule_ = optim::warmup_cosine_schedule({.peak_lr = config_.optimizer.lr,
                                             .warmup_steps = config_.optimizer.warmup,
                                             .total_steps = config_.train.steps,
                                             .min_ratio = config_.optimizer.min_lr_ratio});
  start_log();
}

void Run::make_plan() {
  if (const auto offload = offload_options(config_)) stash_ = plan::make_stash(*offload);
  const std::int64_t segments = config_.model.layers;
  const PlanRequest request =
      parse_plan_request(config_.memory.plan, config_.train.batch, segments);
  const std::string inputs = plan_inputs(config_, data_->prepared.tokenizer->vocabulary_size());
  if (resumed_ && state_.plan_inputs == inputs) {
    if (state_.optimizer.empty()) state_.optimizer = config_.optimizer.kind;
    // The same micro-batches, or the run would not continue bit for bit; what they drop changes no
    // number.
    if (state_.plan.budget) passes_ = choose(state_.plan).choice.passes;
    return;
  }
  if (resumed_) {
    environment_.out << "note: what the plan was made for changed since the state was saved; a new "
                        "plan may round "
                        "differently from here on\n";
  }
  state_.plan_inputs = inputs;
  state_.plain_peak_bytes = 0;
  state_.peak_bytes = 0;  // that of steps under this plan
  state_.optimizer = config_.optimizer.kind;
  const std::int64_t accumulate = std::max<std::int64_t>(config_.train.accumulate, 1);
  if (!request.automatic) {
    state_.plan = request.plan;
    if (config_.train.accumulate > 0) state_.plan.micro_batches = accumulate;
    state_.plan_reason = "as asked";
    return;
  }
  if (limit_bytes_ == 0) {
    state_.plan = {.micro_batches = accumulate};
    state_.plan_reason = "no memory limit: plain training";
    return;
  }
  const PlannedTraining planned = choose(std::nullopt);
  const PlanChoice& choice = planned.choice;
  state_.optimizer = planned.optimizer;
  state_.plan = choice.plan;
  state_.plan_reason = choice.reason;
  state_.plain_peak_bytes = choice.plain_peak_bytes;
  passes_ = choice.passes;
}

PlannedTraining Run::choose(std::optional<Plan> only) {
  environment_.out << (only ? "planning what the saved plan drops to fit "
                            : "measuring a step to fit ")
                   << base::format_bytes(limit_bytes_) << " ..." << std::endl;
  return plan_training(only ? planned_config() : config_, gpt_, *amp_, data_->training,
                       {.batch = config_.train.batch, .limit_bytes = limit_bytes_, .only = only},
                       environment_);
}

void Run::start_log() {
  log_.emplace(config_.train.out, state_.step, config_.train.steps, limit_bytes_, environment_);
  state::write_file_atomically((fs::path(config_.train.out) / "config.toml").string(),
                               config_toml(config_));
  if (!resumed_) {
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
  report.precision = config_.train.precision;
  report.optimizer = state_.optimizer;
  report.effective_batch = config_.train.batch;
  report.microbatch_size = state_.plan.largest(config_.train.batch);
  report.microbatches_per_step = state_.plan.micro_batches;
  report.recomputed_segments = state_.plan.recomputed;
  report.segments = state_.plan.budget ? 0 : model.layers;  // whose choice it is not
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

// Phases of the recorded step: its first micro-batch, all others, the optimizer.
void Run::begin_phase(std::int64_t micro_batch, std::int64_t micro_batches) {
  if (micro_batch >= 2 && micro_batch < micro_batches) return;
  report::ReportData& report = log_->report();
  const double now = environment_.clock();
  if (!report.phases.empty()) report.phases.back().end_s = now;
  std::string name = micro_batch == micro_batches ? "optimizer"
                     : micro_batches == 1         ? "forward and backward"
                     : micro_batch == 0           ? "first micro-batch"
                                                  : "further micro-batches";
  report.phases.push_back({std::move(name), now, now});
}

bool Run::scales_loss() const {
  const amp::Properties& chosen = amp_->properties();
  return chosen.enabled && chosen.loss_scale != amp::LossScaling(1.0);
}

// The configuration with what the plan chose in its place.
TrainConfig Run::planned_config() const {
  TrainConfig config = config_;
  config.optimizer.kind = state_.optimizer;
  return config;
}

// Goes back to the last step boundary, as if this step had never begun.
void Run::abandon_step(const StepStart& start) {
  window_->reset();
  amp_->zero_grad(*optimizer_);
  amp_->load_state(start.precision);  // the last micro-batch may have moved the loss scale
  data_->training.seek(start.position);
  start.rng.restore();
  if (start.timeline) {
    tracker_.stop_timeline();
    log_->report().phases.clear();
  }
}

void Run::refuse_non_finite(const StepStart& start, const char* what, double value) {
  abandon_step(start);
  throw UserError(base::join("[train] the ", what, " must stay finite; it is ", value, " at step ",
                             state_.step + 1, ". The last training state, of step ", saved_step_,
                             ", stands in ", saved_path_,
                             "; resume from it with a lower --lr or --clip-norm"));
}

// Forward and backward of one batch, micro-batch by micro-batch; nothing if it was told to stop.
std::optional<accumulate::WindowResult> Run::accumulate_batch(const data::Batch& batch,
                                                              bool timeline) {
  window_->expect_total_weight(static_cast<double>(batch.inputs.numel()));
  const std::vector<std::int64_t> sizes = state_.plan.sizes(batch.size());
  const auto count = static_cast<std::int64_t>(sizes.size());
  std::int64_t begin = 0;
  std::optional<plan::BudgetCompression> compression;
  std::optional<recompute::MemoryBudget> budget;
  std::optional<BudgetAttribution> attribution;
  if (state_.plan.budget) {
    const auto how = compress_options(config_, state_.step);
    if (how && passes_.compress()) compression.emplace(*how);
    budget.emplace(
        recompute::MemoryBudgetOptions{.limit_bytes = limit_bytes_,
                                       .stash = stash_,
                                       .encoder = compression ? compression->encoder() : nullptr});
    attribution.emplace(*gpt_);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    if (timeline) begin_phase(i, count);
    const std::int64_t size = sizes[static_cast<std::size_t>(i)];
    if (budget) budget->set_plan(passes_.find(size, i > 0));
    const at::Tensor inputs = batch.inputs.narrow(0, begin, size).to(device_);
    const at::Tensor targets = batch.targets.narrow(0, begin, size).to(device_);
    begin += size;
    language_model_backward(*gpt_, *amp_, *optimizer_, *window_, inputs, targets,
                            state_.plan.recomputed, /*judge=*/i + 1 == count);
    if (amp_->properties().casts_to_half()) {
      for (const at::Tensor& weight : amp_->master_params(*optimizer_))
        if (weight.grad().defined()) tracker_.attribute(weight.grad(), MemoryCategory::gradients);
    }
    if (environment_.should_stop()) return std::nullopt;
  }
  attribution.reset();
  budget.reset();
  if (timeline) begin_phase(count, count);
  return window_->finish();
}

bool Run::step() {
  const StepStart start{
      base::RngState::capture(), data_->training.position(), amp_->state(),
      // The first step of a process makes the optimizer's state; the second one is like all others.
      log_->report().step_timeline.empty() && !optimizer_->state_tensors().empty()};
  const double start_s = environment_.clock();
  tracker_.reset_peak();
  if (start.timeline) tracker_.start_timeline();

  std::optional<accumulate::WindowResult> result;
  report::StepMetrics metrics;
  if (scales_loss()) metrics.loss_scale = amp_->loss_scale();
  {
    const data::Batch batch = [&] {
      const base::MemoryCategoryScope category(MemoryCategory::inputs);
      return data_->training.next();
    }();
    metrics.tokens = batch.inputs.numel();
    result = accumulate_batch(batch, start.timeline);
  }
  if (!result) {
    abandon_step(start);
    return false;
  }
  // An overflow under a loss scale is skipped below, where the scale has room to go down.
  if (!scales_loss() && !std::isfinite(result->loss))
    refuse_non_finite(start, "loss", result->loss);
  metrics.lr = schedule_(state_.step);
  optimizer_->set_learning_rate(metrics.lr);
  const std::vector<at::Tensor> weights = amp_->master_params(*optimizer_);
  metrics.grad_norm = optim::gradient_norm(weights);
  if (!scales_loss() && !std::isfinite(metrics.grad_norm))
    refuse_non_finite(start, "gradient norm", metrics.grad_norm);
  if (config_.optimizer.clip_norm > 0.0) {
    optim::scale_gradients(weights,
                           optim::clip_coefficient(metrics.grad_norm, config_.optimizer.clip_norm));
  }
  if (config_.optimizer.clip_value > 0.0)
    optim::clip_gradient_value(weights, config_.optimizer.clip_value);
  {
    const base::MemoryCategoryScope category(MemoryCategory::optimizer_state);
    metrics.skipped = !amp_->step(*optimizer_);
  }
  amp_->zero_grad(*optimizer_);
  metrics.peak = tracker_.peak();
  metrics.peak_bytes = metrics.peak.total();
  if (start.timeline) end_timeline(metrics.peak);
  metrics.tokens_per_s =
      static_cast<double>(metrics.tokens) / std::max(environment_.clock() - start_s, 1e-9);
  metrics.loss = result->loss;
  finish_step(metrics);
  return true;
}

// Takes note of a step whose weights are written.
void Run::finish_step(report::StepMetrics& metrics) {
  ++state_.step;
  state_.position = data_->training.position();
  state_.peak_bytes = std::max(state_.peak_bytes, metrics.peak_bytes);
  if (state_.step == 1 || !std::isfinite(state_.first_loss)) state_.first_loss = metrics.loss;
  metrics.step = state_.step;
  if (config_.train.eval_every > 0 &&
      (state_.step % config_.train.eval_every == 0 || state_.step == config_.train.steps)) {
    metrics.validation_loss = evaluate_now();
  }
  metrics.elapsed_s = elapsed();
  log_->step(metrics);
  state_.last_loss = log_->recent_loss();
  base::step_boundary().notify(state_.step);
}

void Run::end_timeline(const base::MemoryBreakdown& peak) {
  report::ReportData& report = log_->report();
  report.phases.back().end_s = environment_.clock();
  report.step_timeline = tracker_.stop_timeline();
  report.timeline_label = base::join("step ", state_.step + 1);
  report.peak_breakdown = peak;
}

std::optional<double> Run::evaluate_now() {
  if (!data_->validation) return std::nullopt;
  const std::int64_t sequences =
      std::min(config_.train.eval_sequences, data_->validation->sequences_per_epoch());
  const amp::Region region = amp_->region();
  const double loss =
      evaluate(*gpt_, *data_->validation, sequences, state_.plan.largest(config_.train.batch));
  log_->note(base::join("step ", state_.step, ": validation loss ", loss));
  return loss;
}

void Run::save() {
  state_.elapsed_s = elapsed();
  state_.position = data_->training.position();
  const base::ArenaScope host(base::Arena::host);  // copies made for writing are not the device's
  const StateTensors tensors{
      .model = amp_->properties().casts_to_half() ? amp_->model_state(*gpt_) : named_tensors(*gpt_),
      .precision = amp_->state()};
  saved_path_ = save_training_state(config_.train.out, config_.train.keep, state_, tensors,
                                    *optimizer_, base::RngState::capture())
                    .path;
  saved_step_ = state_.step;
}

void Run::summarise(TrainOutcome& outcome) {
  report::ReportData& report = log_->report();
  report.status = outcome.interrupted ? base::join("interrupted at step ", state_.step)
                                      : base::join("finished ", state_.step, " steps");
  report.peak_bytes = state_.peak_bytes;
  report.elapsed_s = elapsed();
  if (!outcome.sample.empty()) {
    report.sample_prompt = config_.sample.prompt;
    report.sample_text =
        outcome.sample.substr(std::min(config_.sample.prompt.size(), outcome.sample.size()));
  }
  outcome.report_path = log_->write_report();
}

TrainOutcome Run::execute() {
  started_ = environment_.clock();
  TrainOutcome outcome;
  // From here on a run that ends in any way can be resumed.
  if (!resumed_) save();
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
    const amp::Region region = amp_->region();
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
  outcome.skipped_steps = amp_->counts(*optimizer_).skipped;
  outcome.peak_bytes = state_.peak_bytes;
  outcome.plain_peak_bytes = state_.plain_peak_bytes;
  outcome.plan = state_.plan;
  outcome.state_path = saved_path_;
  return outcome;
}

}  // namespace

TrainOutcome train(const TrainConfig& config, bool resume, const TrainerEnvironment& environment) {
  if (is_classifier(config)) return train_classifier(config, resume, environment);
  return Run(config, resume, environment).execute();
}

}  // namespace gradus::train
