#include <gradus/train/run_loop.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/masked_select.h>
#include <torch/headeronly/version.h>
#include <torch/nn/module.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/step_boundary.h>
#include <gradus/optim/clip.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/device.h>
#include <gradus/train/language_model.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/precision.h>
#include <gradus/train/private_options.h>
#include <gradus/train/run_directory.h>

namespace gradus::train {

namespace fs = std::filesystem;
using base::MemoryCategory;

RunLoop::RunLoop(const TrainConfig& config, bool resume, const TrainerEnvironment& environment)
    : config_(config),
      environment_(environment),
      limit_bytes_(config.memory.limit.empty() ? 0 : base::parse_bytes(config.memory.limit)),
      device_(find_device(config.train.device)),
      tracker_(base::MemoryTracker::install({.clock = environment.clock})) {
  validate(config_);
  GRADUS_CHECK(
      "train",
      device_.is_cpu() || is_classifier(config_) ||
          (config_.memory.limit.empty() && config_.memory.plan != "auto"),
      "memory limits and automatic plans work on the CPU so far; for ", device_.str(),
      " leave memory.limit empty and set memory.plan to none or micro-batch=N,recompute=N");
  if (config_.train.threads > 0) at::set_num_threads(static_cast<int>(config_.train.threads));
  make_run_directory(config_.train.out);
  lock_.emplace(config_.train.out);
  resumed_ = starting_state(config_.train.out, resume, environment_.out);
  if (!resumed_) return;
  state_ = resumed_->run;
  saved_step_ = state_.step;
  saved_path_ = resumed_->path;
  elapsed_before_ = state_.elapsed_s;
}

void RunLoop::take_model(std::shared_ptr<torch::nn::Module> model) {
  model_ = std::move(model);
  if (resumed_) load_model(*resumed_, named_tensors(*model_));
  {
    const base::MemoryCategoryScope parameters(MemoryCategory::parameters);
    amp_.emplace(amp::initialize(*model_, precision_options(config_)));
  }
  if (resumed_) amp_->load_state(load_precision(*resumed_));
}

TrainConfig RunLoop::planned_config() const {
  TrainConfig config = config_;
  config.optimizer.kind = state_.optimizer;
  return config;
}

bool RunLoop::scales_loss() const {
  const amp::Properties& chosen = amp_->properties();
  return chosen.enabled && chosen.loss_scale != amp::LossScaling(1.0);
}

void RunLoop::make_update(const Update& update) {
  steps_ = update.steps;
  optimizer_ = make_optimizer(planned_config(), *amp_, *model_, config_.optimizer.lr);
  make_private(update);
  if (resumed_) {
    private_ ? private_->load(*resumed_) : load_optimizer(*resumed_, *optimizer_);
    base::RngState rng = base::RngState::capture();
    load_rng(*resumed_, rng);
    rng.restore();
  }
  schedule_ = optim::warmup_cosine_schedule({.peak_lr = config_.optimizer.lr,
                                             .warmup_steps = config_.optimizer.warmup,
                                             .total_steps = steps_,
                                             .min_ratio = config_.optimizer.min_lr_ratio});
}

void RunLoop::make_private(const Update& update) {
  std::string inputs = privacy_inputs(config_, update.examples, steps_);
  if (config_.privacy.enabled) inputs += update.privacy_further;
  const std::string began = state_.privacy_inputs.empty() ? "none" : state_.privacy_inputs;
  GRADUS_CHECK("train", !resumed_ || began == inputs,
               "a run keeps the privacy it began with; it began with ", began, "; got ", inputs);
  state_.privacy_inputs = inputs;
  if (!config_.privacy.enabled) return;
  PrivateSubject subject{
      .model = model_, .examples = update.examples, .steps = steps_, .example = update.example};
  if (amp_->properties().casts_to_half()) {
    subject.targets = amp_->parameters(*model_);
    subject.apply = [this] { return optim::StepResult{.skipped = !amp_->step(*optimizer_)}; };
  }
  private_.emplace(config_, subject, *optimizer_, state_.noise_multiplier, environment_,
                   [this](const std::string& text) {
                     log_ ? log_->note(text) : void(environment_.out << text << '\n');
                   });
  state_.noise_multiplier = private_->noise_multiplier();
}

void RunLoop::start_log() {
  std::int64_t parameters = 0, trained = 0;
  for (const at::Tensor& parameter : model_->parameters()) {
    parameters += parameter.numel();
    if (parameter.requires_grad()) trained += parameter.numel();
  }
  report::ReportData report;
  report.created = environment_.date;
  report.parameter_count = parameters;
  report.precision = config_.train.precision;
  report.optimizer = state_.optimizer;
  report.effective_batch = config_.train.batch;
  report.limit_bytes = limit_bytes_;
  report.configuration = describe_config(config_);
  report.environment = {{"LibTorch", TORCH_VERSION},
                        {"threads", std::to_string(at::get_num_threads())},
                        {"device", device_.str()}};
  const std::string lines = describe(report);
  log_.emplace(config_.train.out, state_.step, steps_, limit_bytes_, environment_, report.item);
  log_->report() = report;
  state::write_file_atomically((fs::path(config_.train.out) / "config.toml").string(),
                               config_toml(config_));
  environment_.out << report.model << ", " << parameters << " parameters";
  if (trained < parameters) environment_.out << ", " << trained << " of them trained";
  environment_.out << '\n' << lines;
  if (private_) private_->describe(log_->report(), environment_.out);
  if (resumed_)
    environment_.out << "resumed from " << resumed_->path << " at step " << state_.step << '\n';
  environment_.out << std::flush;
}

void RunLoop::begin_phase(const std::string& name) {
  if (!records_timeline()) return;
  report::ReportData& report = log_->report();
  const double now = environment_.clock();
  if (!report.phases.empty()) report.phases.back().end_s = now;
  report.phases.push_back({name, now, now});
}

void RunLoop::end_timeline(const base::MemoryBreakdown& peak) {
  report::ReportData& report = log_->report();
  report.phases.back().end_s = environment_.clock();
  report.step_timeline = tracker_.stop_timeline();
  report.timeline_label = base::join("step ", state_.step + 1);
  report.peak_breakdown = peak;
}

// Goes back to the last step boundary, as if this step had never begun.
void RunLoop::abandon_step() {
  drop_gradients();
  amp_->zero_grad(*optimizer_);
  amp_->load_state(start_->precision);  // the last micro-batch may have moved the loss scale
  if (private_) private_->abandon();
  seek(start_->position);
  start_->rng.restore();
  if (start_->timeline) {
    tracker_.stop_timeline();
    log_->report().phases.clear();
  }
}

void RunLoop::refuse_non_finite(const std::string& what) {
  abandon_step();
  throw UserError(base::join("[train] the ", what, " at step ", state_.step + 1,
                             ". The last training state, of step ", saved_step_, ", stands in ",
                             saved_path_, "; resume from it with a lower --lr",
                             private_ ? "" : " or --clip-norm"));
}

void RunLoop::take_losses(const at::Tensor& losses, report::StepMetrics& metrics) {
  const at::Tensor finite = losses.masked_select(losses.isfinite());
  const std::int64_t lost = losses.numel() - finite.numel();
  if (lost > 0 && (!private_ || finite.numel() == 0)) {
    refuse_non_finite(base::join("loss must stay finite; it is not for ", lost, " of ",
                                 losses.numel(), " examples"));
  }
  // An empty batch has no loss; a gap in the curve would look like a fault.
  metrics.loss =
      finite.numel() == 0 ? log_->recent_loss() : finite.to(at::kDouble).mean().item<double>();
}

void RunLoop::plain_update(report::StepMetrics& metrics) {
  const std::vector<at::Tensor> weights = amp_->master_params(*optimizer_);
  metrics.grad_norm = optim::gradient_norm(weights);
  // An overflow under a loss scale is skipped below, where the scale has room to go down.
  if (!scales_loss() && !std::isfinite(metrics.grad_norm))
    refuse_non_finite(base::join("gradient norm must stay finite; it is ", metrics.grad_norm));
  if (config_.optimizer.clip_norm > 0.0) {
    optim::scale_gradients(weights,
                           optim::clip_coefficient(metrics.grad_norm, config_.optimizer.clip_norm));
  }
  if (config_.optimizer.clip_value > 0.0)
    optim::clip_gradient_value(weights, config_.optimizer.clip_value);
  const base::MemoryCategoryScope category(MemoryCategory::optimizer_state);
  metrics.skipped = !amp_->step(*optimizer_);
}

bool RunLoop::step() {
  start_.emplace(StepStart{
      base::RngState::capture(), position(), amp_->state(),
      // The first step of a process makes the optimizer's state; the second one is like all others.
      log_->report().step_timeline.empty() && !optimizer_->state_tensors().empty()});
  if (private_) private_->hold();
  const double start_s = environment_.clock();
  tracker_.reset_peak();
  if (start_->timeline) tracker_.start_timeline();
  report::StepMetrics metrics;
  if (scales_loss()) metrics.loss_scale = amp_->loss_scale();
  if (!gradients(metrics)) {
    abandon_step();
    return false;
  }
  metrics.lr = schedule_(state_.step);
  optimizer_->set_learning_rate(metrics.lr);
  begin_phase(private_ ? "noise and optimizer" : "optimizer");
  if (private_) {
    private_->step(metrics, log_->report(), state_.step + 1);
    metrics.grad_norm = optim::gradient_norm(amp_->master_params(*optimizer_));
  } else {
    plain_update(metrics);
  }
  amp_->zero_grad(*optimizer_);
  metrics.peak = tracker_.peak();
  metrics.peak_bytes = metrics.peak.total();
  if (start_->timeline) end_timeline(metrics.peak);
  metrics.tokens_per_s =
      static_cast<double>(metrics.tokens) / std::max(environment_.clock() - start_s, 1e-9);
  finish_step(metrics);
  return true;
}

// Takes note of a step whose weights are written.
void RunLoop::finish_step(report::StepMetrics& metrics) {
  start_.reset();
  ++state_.step;
  state_.position = position();
  state_.peak_bytes = std::max(state_.peak_bytes, metrics.peak_bytes);
  if (state_.step == 1 || !std::isfinite(state_.first_loss)) state_.first_loss = metrics.loss;
  metrics.step = state_.step;
  if (private_) private_->spend(state_.step, metrics);
  const std::string remark = private_ ? private_->remark() : "";
  const std::int64_t every = config_.train.eval_every;
  if (every > 0 && (state_.step % every == 0 || state_.step == steps_)) {
    const std::string found = evaluate_now(metrics);
    if (!found.empty()) {
      log_->note(base::join("step ", state_.step, ": ", found, private_ ? ", " + remark : ""));
    }
  }
  metrics.elapsed_s = elapsed();
  log_->step(metrics, remark);
  state_.last_loss = log_->recent_loss();
  base::step_boundary().notify(state_.step);
}

void RunLoop::save() {
  state_.elapsed_s = elapsed();
  state_.position = position();
  const base::ArenaScope host(base::Arena::host);  // copies made for writing are not the device's
  StateTensors tensors{.model = amp_->properties().casts_to_half() ? amp_->model_state(*model_)
                                                                   : named_tensors(*model_),
                       .precision = amp_->state()};
  if (private_) tensors.privacy = private_->entries();
  saved_path_ = save_training_state(config_.train.out, config_.train.keep, state_, tensors,
                                    *optimizer_, base::RngState::capture())
                    .path;
  saved_step_ = state_.step;
}

void RunLoop::summarise(TrainOutcome& outcome) {
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

TrainOutcome RunLoop::execute() {
  started_ = environment_.clock();
  start_log();
  TrainOutcome outcome;
  // From here on a run that ends in any way can be resumed.
  if (!resumed_) save();
  while (state_.step < steps_ && !outcome.interrupted) {
    outcome.interrupted = environment_.should_stop() || !step();
    if (!outcome.interrupted && config_.train.save_every > 0 &&
        state_.step % config_.train.save_every == 0) {
      save();
      summarise(outcome);
    }
  }
  if (saved_step_ != state_.step) save();
  log_->finish();
  complete(outcome);
  summarise(outcome);
  outcome.steps = state_.step;
  outcome.first_loss = state_.first_loss;
  outcome.last_loss = state_.last_loss;
  outcome.skipped_steps = amp_->counts(*optimizer_).skipped;
  outcome.peak_bytes = state_.peak_bytes;
  outcome.plain_peak_bytes = state_.plain_peak_bytes;
  outcome.plan = state_.plan;
  outcome.state_path = saved_path_;
  if (private_) {
    outcome.epsilon = private_->epsilon();
    outcome.noise_multiplier = private_->noise_multiplier();
  }
  return outcome;
}

}  // namespace gradus::train
