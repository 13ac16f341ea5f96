#include <gradus/train/classification.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/sort.h>
#include <torch/headeronly/version.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
#include <gradus/base/step_boundary.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/schedule.h>
#include <gradus/persample/vmap/examples.h>
#include <gradus/privacy/training/losses.h>
#include <gradus/privacy/training/make_private.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/classification_task.h>
#include <gradus/train/device.h>
#include <gradus/train/language_model.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/precision.h>
#include <gradus/train/private_options.h>
#include <gradus/train/run_directory.h>
#include <gradus/train/run_lock.h>
#include <gradus/train/run_log.h>
#include <gradus/train/training_state.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using base::MemoryCategory;
using Indices = std::vector<std::int64_t>;
using Entries = std::vector<std::pair<std::string, at::Tensor>>;

// Where PrivateTraining::state has the optimizer's tensors, which a training state has already.
constexpr const char* kOptimizerEntries = "private.optimizer.";

// Epsilon is found this often in a run: it costs a Fourier transform, and moves slowly.
constexpr std::int64_t kEpsilonPoints = 50;

class ClassifierRun {
 public:
  ClassifierRun(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);
  TrainOutcome execute();

 private:
  // What a step is abandoned to.
  struct StepStart {
    base::RngState rng;
    data::DataPosition position;
    Entries sampler;
    bool timeline = false;
  };
  void plan_steps();
  void make_training();
  void load();
  void start_log();
  bool step();  // false if it was interrupted
  void abandon_step(const StepStart& start);
  Indices next_batch();
  at::Tensor losses(const persample::Batch& rows) const;
  std::optional<at::Tensor> accumulate_batch(const Indices& batch);
  void judge(const StepStart& start, const at::Tensor& losses);
  void private_step(report::StepMetrics& metrics);
  void plain_step(const StepStart& start, report::StepMetrics& metrics);
  void spend(report::StepMetrics& metrics);
  void finish_step(report::StepMetrics& metrics);
  void begin_phase(const char* name);
  void save();
  void summarise(TrainOutcome& outcome);
  double elapsed() const { return elapsed_before_ + environment_.clock() - started_; }

  TrainConfig config_;
  const bool resume_;
  const TrainerEnvironment& environment_;
  const at::Device device_;
  base::MemoryTracker& tracker_;
  std::optional<RunLock> lock_;
  std::optional<SavedState> resumed_;
  ClassificationTask task_;
  std::int64_t steps_ = 0;  // of the whole run
  std::optional<amp::Amp> amp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<privacy::PrivateTraining> private_;
  optim::Schedule schedule_;
  std::optional<RunLog> log_;
  RunState state_;
  at::Tensor order_;  // of the plain run's epoch
  std::int64_t ordered_epoch_ = -1;
  std::int64_t epsilon_step_ = 0;  // epsilon_ is what is spent once this step is done
  double epsilon_ = 0.0;
  std::optional<double> accuracy_;
  std::string saved_path_;
  std::int64_t saved_step_ = -1;
  double started_ = 0.0;
  double elapsed_before_ = 0.0;
};

ClassifierRun::ClassifierRun(const TrainConfig& config, bool resume,
                             const TrainerEnvironment& environment)
    : config_(config),
      resume_(resume),
      environment_(environment),
      device_(find_device(config.train.device)),
      tracker_(base::MemoryTracker::install({.clock = environment.clock})) {
  validate(config_);
  if (config_.train.threads > 0) at::set_num_threads(static_cast<int>(config_.train.threads));
  make_run_directory(config_.train.out);
  lock_.emplace(config_.train.out);
  resumed_ = starting_state(config_.train.out, resume_, environment_.out);
  torch::manual_seed(static_cast<std::uint64_t>(config_.train.seed));
  {
    const base::MemoryCategoryScope inputs(MemoryCategory::inputs);
    task_ = make_classification_task(config_, config_.train.out, resume_);
    task_.model->to(device_);
    for (const auto& [name, tensor] : named_tensors(*task_.model))
      tracker_.attribute(tensor, MemoryCategory::parameters);
    amp_.emplace(amp::initialize(*task_.model, precision_options(config_)));
  }
  plan_steps();
  optimizer_ = make_optimizer(config_, *amp_, *task_.model, config_.optimizer.lr);
  make_training();
  if (resumed_) load();
  schedule_ = optim::warmup_cosine_schedule({.peak_lr = config_.optimizer.lr,
                                             .warmup_steps = config_.optimizer.warmup,
                                             .total_steps = steps_,
                                             .min_ratio = config_.optimizer.min_lr_ratio});
  start_log();
}

void ClassifierRun::plan_steps() {
  const std::int64_t examples = task_.train.size();
  GRADUS_CHECK("train", config_.train.batch <= examples,
               "train.batch must be at most the number of examples (", examples, "); got ",
               config_.train.batch);
  steps_ = config_.train.steps;
  if (config_.train.epochs > 0.0) {
    steps_ = std::max<std::int64_t>(
        1, std::llround(config_.train.epochs * static_cast<double>(examples) /
                        static_cast<double>(config_.train.batch)));
  }
  GRADUS_CHECK("train", config_.optimizer.warmup < steps_,
               "optimizer.warmup must be below the steps of the run (", steps_, "); got ",
               config_.optimizer.warmup);
  const std::string inputs = privacy_inputs(config_, examples, steps_);
  if (resumed_) {
    const RunState& saved = resumed_->run;
    GRADUS_CHECK(
        "train", saved.corpus_hash == task_.content_hash,
        "a run goes on with the examples it began with; those of data.task ", config_.data.task,
        " are others now. Put them back (data.limit, model.context and the tokenizer count "
        "too), or start a new run");
    GRADUS_CHECK("train", saved.privacy_inputs == inputs,
                 "a run keeps the privacy it began with; it began with ",
                 saved.privacy_inputs.empty() ? "none" : saved.privacy_inputs, "; got ", inputs);
    state_ = saved;
  }
  state_.corpus_hash = task_.content_hash;
  state_.privacy_inputs = inputs;
  state_.optimizer = config_.optimizer.kind;
}

void ClassifierRun::make_training() {
  if (!config_.privacy.enabled) return;
  const std::int64_t examples = task_.train.size();
  if (config_.privacy.delta * static_cast<double>(examples) >= 1.0) {
    environment_.out << "warning: privacy.delta should be below 1 / " << examples
                     << ", one over the examples; got " << config_.privacy.delta
                     << ": publishing one example whole would keep such a budget\n";
  }
  const privacy::DataDescription data{
      .examples = examples, .batch_size = config_.train.batch, .steps = steps_};
  privacy::PrivacyOptions options = privacy_options(config_);
  options.log = [this](const std::string& text) { environment_.out << "note: " << text << '\n'; };
  options.sample.log = [this](const std::string& text) { log_->note("note: " + text); };
  // What the state has is what the first process found: a search on another machine might differ
  // in the last bits, and the budget must not.
  options.noise_multiplier = resumed_ ? state_.noise_multiplier : config_.privacy.noise_multiplier;
  if (options.noise_multiplier > 0.0) {
    private_.emplace(privacy::make_private(task_.model, *optimizer_, data, options));
  } else {
    private_.emplace(privacy::make_private_with_epsilon(
        task_.model, *optimizer_, data, config_.privacy.epsilon, config_.privacy.delta, options));
  }
  state_.noise_multiplier = private_->optimizer().options().noise_multiplier;
}

void ClassifierRun::load() {
  saved_step_ = state_.step;
  saved_path_ = resumed_->path;
  elapsed_before_ = state_.elapsed_s;
  load_model(*resumed_, named_tensors(*task_.model));
  amp_->load_state(load_precision(*resumed_));
  if (private_) {
    Entries entries = load_privacy(*resumed_);
    for (const optim::NamedState& entry : load_optimizer_entries(*resumed_))
      entries.emplace_back(kOptimizerEntries + entry.name, entry.tensor);
    const base::MemoryCategoryScope category(MemoryCategory::optimizer_state);
    private_->load_state(entries);
  } else {
    load_optimizer(*resumed_, *optimizer_);
  }
  base::RngState rng = base::RngState::capture();
  load_rng(*resumed_, rng);
  rng.restore();
}

void ClassifierRun::start_log() {
  log_.emplace(config_.train.out, state_.step, steps_, /*limit_bytes=*/0, environment_, task_.item);
  state::write_file_atomically((fs::path(config_.train.out) / "config.toml").string(),
                               config_toml(config_));
  std::int64_t parameters = 0, trained = 0;
  for (const at::Tensor& parameter : task_.model->parameters()) {
    parameters += parameter.numel();
    if (parameter.requires_grad()) trained += parameter.numel();
  }
  report::ReportData& report = log_->report();
  report.title = task_.title + (private_ ? ", private" : "");
  report.created = environment_.date;
  report.model = task_.model_name;
  report.parameter_count = parameters;
  report.precision = config_.train.precision;
  report.optimizer = config_.optimizer.kind;
  report.effective_batch = config_.train.batch;
  report.microbatch_size = std::min(config_.privacy.micro_batch, config_.train.batch);
  report.loss_label = base::join("Cross-entropy, nats per ", task_.item);
  report.configuration = describe_config(config_);
  report.environment = {{"LibTorch", TORCH_VERSION},
                        {"threads", std::to_string(at::get_num_threads())},
                        {"device", device_.str()}};
  environment_.out << report.model << ", " << parameters << " parameters";
  if (trained < parameters) environment_.out << ", " << trained << " of them trained";
  environment_.out << "\n"
                   << task_.train.size() << " " << task_.item << "s to train on, "
                   << task_.test.size() << " to test, " << task_.classes << " classes; " << steps_
                   << " steps of " << config_.train.batch << "\n";
  if (private_) {
    const auto& privacy = config_.privacy;
    report.privacy = {
        {"Budget", privacy.epsilon > 0.0
                       ? base::join("epsilon ", privacy.epsilon, ", delta ", privacy.delta)
                       : base::join("delta ", privacy.delta)},
        {"Noise multiplier", base::join(state_.noise_multiplier)},
        {"Clipping", base::join(privacy.clipping, ", largest norm ", privacy.max_grad_norm)},
        {"Accountant", privacy.accountant},
        {"Sampling", base::join("Poisson, each ", task_.item, " with probability ",
                                private_->sampler().options().sample_rate)},
        {"Noise", privacy.secure ? "from the system's random source"
                                 : "seeded: private from nobody who knows the seed"}};
    environment_.out << "private: noise multiplier " << state_.noise_multiplier << ", "
                     << privacy.clipping << " clipping at norm " << privacy.max_grad_norm
                     << "; at the end epsilon "
                     << epsilon_text(private_->final_epsilon(privacy.delta)) << " at delta "
                     << privacy.delta << " (" << privacy.accountant << ")\n";
    if (!privacy.secure) {
      environment_.out << "warning: privacy.secure is false: sampling and noise follow from "
                          "train.seed, and hide nothing from who knows it\n";
    }
  }
  if (resumed_)
    environment_.out << "resumed from " << resumed_->path << " at step " << state_.step << '\n';
  environment_.out << std::flush;
}

// Of a plain run: each example once an epoch, in an order that depends on seed and epoch only.
Indices ClassifierRun::next_batch() {
  if (private_) {
    auto drawn = private_->sampler().next();
    GRADUS_INTERNAL_CHECK("train", drawn.has_value(), "a step past the sampler's last one");
    return std::move(*drawn);
  }
  const std::int64_t examples = task_.train.size();
  data::DataPosition& position = state_.position;
  if (position.index >= examples) position = {.epoch = position.epoch + 1, .index = 0};
  if (ordered_epoch_ != position.epoch) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(
        persample::example_seed(static_cast<std::uint64_t>(config_.train.seed), position.epoch));
    order_ = at::randperm(examples, generator, at::kLong);
    ordered_epoch_ = position.epoch;
  }
  const std::int64_t count = std::min(config_.train.batch, examples - position.index);
  const std::int64_t* first = order_.const_data_ptr<std::int64_t>() + position.index;
  position.index += count;
  return {first, first + count};
}

at::Tensor ClassifierRun::losses(const persample::Batch& rows) const {
  const std::vector<at::Tensor> inputs(rows.begin(), rows.end() - 1);
  const at::Tensor logits_BK = [&] {
    const amp::Region region = amp_->region();
    return task_.logits(inputs);
  }();
  return privacy::cross_entropy_per_example(logits_BK.to(at::kFloat), rows.back());
}

// The loss of each example, their gradients added up; nothing if it was told to stop.
std::optional<at::Tensor> ClassifierRun::accumulate_batch(const Indices& batch) {
  std::vector<at::Tensor> all;
  for (const Indices& piece :
       privacy::micro_batches(by_length(task_, batch), config_.privacy.micro_batch)) {
    persample::Batch rows;
    {
      const base::MemoryCategoryScope category(MemoryCategory::inputs);
      rows = rows_of(task_, task_.train, piece);
      for (at::Tensor& tensor : rows) tensor = tensor.to(device_);
    }
    if (private_) {
      all.push_back(private_->optimizer().accumulate(
          [this](const persample::Batch& some) { return losses(some); }, rows));
    } else {
      const at::Tensor each = losses(rows);
      (each.sum() / static_cast<double>(batch.size())).backward();
      all.push_back(each.detach());
    }
    if (environment_.should_stop()) return std::nullopt;
  }
  return all.empty() ? at::empty({0}, at::kFloat) : at::cat(all).to(at::kCPU);
}

void ClassifierRun::abandon_step(const StepStart& start) {
  if (private_) {
    private_->optimizer().zero_grad();
    private_->sampler().load_state(start.sampler);
  } else {
    optimizer_->zero_grad();
  }
  state_.position = start.position;
  start.rng.restore();
  if (start.timeline) {
    tracker_.stop_timeline();
    log_->report().phases.clear();
  }
}

// A loss that is not finite ends a plain run. Of a private one single examples may be so, which are
// left out; if all are, the weights are spoilt.
void ClassifierRun::judge(const StepStart& start, const at::Tensor& losses) {
  if (losses.numel() == 0) return;
  const std::int64_t finite = losses.isfinite().sum().item<std::int64_t>();
  if (finite == losses.numel() || (private_ && finite > 0)) return;
  abandon_step(start);
  throw UserError(base::join("[train] the loss must stay finite; it is not for ",
                             losses.numel() - finite, " of ", losses.numel(), " examples of step ",
                             state_.step + 1, ". The last training state, of step ", saved_step_,
                             ", stands in ", saved_path_, "; resume from it with a lower --lr"));
}

void ClassifierRun::begin_phase(const char* name) {
  report::ReportData& report = log_->report();
  const double now = environment_.clock();
  if (!report.phases.empty()) report.phases.back().end_s = now;
  report.phases.push_back({name, now, now});
}

void ClassifierRun::private_step(report::StepMetrics& metrics) {
  privacy::DPOptimizer& optimizer = private_->optimizer();
  const privacy::DPStep done = metrics.tokens == 0 ? optimizer.step_empty() : optimizer.step();
  metrics.grad_norm = optim::gradient_norm(amp_->master_params(*optimizer_));
  metrics.extra["max_norm"] = done.max_norm;
  if (done.examples == 0) return;
  metrics.extra["clip_fraction"] =
      static_cast<double>(done.clipped) / static_cast<double>(done.examples);
  if (done.non_finite > 0) metrics.extra["non_finite"] = static_cast<double>(done.non_finite);
  const at::Tensor norms = optimizer.last_norms();
  const at::Tensor finite = norms.masked_select(norms.isfinite());
  if (finite.numel() == 0) return;
  const at::Tensor sorted = std::get<0>(finite.sort());
  const double* values = sorted.const_data_ptr<double>();
  const auto quantile = [&](double share) {
    return values[std::llround(share * static_cast<double>(sorted.numel() - 1))];
  };
  metrics.extra["norm_p10"] = quantile(0.1);
  metrics.extra["norm_median"] = quantile(0.5);
  metrics.extra["norm_p90"] = quantile(0.9);
  report::ReportData& report = log_->report();
  report.example_norms.assign(values, values + sorted.numel());
  report.norm_threshold = done.max_norm;
  report.norms_label = base::join("step ", state_.step + 1);
}

void ClassifierRun::plain_step(const StepStart& start, report::StepMetrics& metrics) {
  const std::vector<at::Tensor> weights = amp_->master_params(*optimizer_);
  metrics.grad_norm = optim::gradient_norm(weights);
  if (!std::isfinite(metrics.grad_norm)) {
    abandon_step(start);
    throw UserError(base::join("[train] the gradient norm must stay finite; it is ",
                               metrics.grad_norm, " at step ", state_.step + 1, ". Resume from ",
                               saved_path_, " with a lower --lr"));
  }
  if (config_.optimizer.clip_norm > 0.0) {
    optim::scale_gradients(weights,
                           optim::clip_coefficient(metrics.grad_norm, config_.optimizer.clip_norm));
  }
  if (config_.optimizer.clip_value > 0.0)
    optim::clip_gradient_value(weights, config_.optimizer.clip_value);
  optimizer_->step();
}

// Finds epsilon at some steps, and for those between shows that of the next: never too little.
void ClassifierRun::spend(report::StepMetrics& metrics) {
  if (state_.step > epsilon_step_) {
    const std::int64_t stride = (steps_ + kEpsilonPoints - 1) / kEpsilonPoints;
    epsilon_step_ = std::min(steps_, (state_.step + stride - 1) / stride * stride);
    privacy::History history = private_->accountant().history();
    privacy::GaussianSteps further = private_->sampler().accounted(state_.noise_multiplier);
    further.steps = epsilon_step_ - state_.step;
    history.add(further);
    epsilon_ =
        privacy::epsilon_of(history, config_.privacy.delta, private_->accountant().options());
  }
  if (state_.step == epsilon_step_) metrics.extra["epsilon"] = epsilon_;
}

bool ClassifierRun::step() {
  const StepStart start{
      base::RngState::capture(), state_.position,
      private_ ? private_->sampler().state() : Entries{},
      // The first step of a process makes the optimizer's state; the second one is like all others.
      log_->report().step_timeline.empty() && !optimizer_->state_tensors().empty()};
  const double start_s = environment_.clock();
  tracker_.reset_peak();
  if (start.timeline) {
    tracker_.start_timeline();
    begin_phase("gradients");
  }
  const Indices batch = next_batch();
  const std::optional<at::Tensor> losses = accumulate_batch(batch);
  if (!losses) {
    abandon_step(start);
    return false;
  }
  judge(start, *losses);
  report::StepMetrics metrics;
  metrics.tokens = static_cast<std::int64_t>(batch.size());
  // An empty batch has no loss; a gap in the curve would look like a fault.
  metrics.loss =
      losses->numel() == 0
          ? log_->recent_loss()
          : losses->masked_select(losses->isfinite()).to(at::kDouble).mean().item<double>();
  metrics.lr = schedule_(state_.step);
  optimizer_->set_learning_rate(metrics.lr);
  if (start.timeline) begin_phase(private_ ? "noise and optimizer" : "optimizer");
  {
    const base::MemoryCategoryScope category(MemoryCategory::optimizer_state);
    private_ ? private_step(metrics) : plain_step(start, metrics);
  }
  optimizer_->zero_grad();
  metrics.peak = tracker_.peak();
  metrics.peak_bytes = metrics.peak.total();
  if (start.timeline) {
    report::ReportData& report = log_->report();
    report.phases.back().end_s = environment_.clock();
    report.step_timeline = tracker_.stop_timeline();
    report.timeline_label = base::join("step ", state_.step + 1);
    report.peak_breakdown = metrics.peak;
  }
  metrics.tokens_per_s =
      static_cast<double>(metrics.tokens) / std::max(environment_.clock() - start_s, 1e-9);
  finish_step(metrics);
  return true;
}

// Takes note of a step whose weights are written.
void ClassifierRun::finish_step(report::StepMetrics& metrics) {
  ++state_.step;
  state_.peak_bytes = std::max(state_.peak_bytes, metrics.peak_bytes);
  if (state_.step == 1) state_.first_loss = metrics.loss;
  metrics.step = state_.step;
  if (private_) spend(metrics);
  std::string remark = private_ ? "epsilon " + epsilon_text(epsilon_) : "";
  if (config_.train.eval_every > 0 &&
      (state_.step % config_.train.eval_every == 0 || state_.step == steps_)) {
    const amp::Region region = amp_->region();
    const Evaluation found = evaluate_classifier(task_, task_.test, config_.privacy.micro_batch);
    accuracy_ = metrics.extra["accuracy"] = found.accuracy;
    metrics.validation_loss = found.loss;
    log_->note(base::join("step ", state_.step, ": test accuracy ", 100.0 * found.accuracy,
                          "%, loss ", found.loss, private_ ? ", " + remark : ""));
  }
  metrics.elapsed_s = elapsed();
  log_->step(metrics, remark);
  state_.last_loss = log_->recent_loss();
  base::step_boundary().notify(state_.step);
}

void ClassifierRun::save() {
  state_.elapsed_s = elapsed();
  Entries privacy;
  if (private_) {
    for (auto& [name, tensor] : private_->state())
      if (!name.starts_with(kOptimizerEntries)) privacy.emplace_back(name, tensor);
  }
  const StateTensors tensors{.model = named_tensors(*task_.model),
                             .precision = amp_->state(),
                             .privacy = std::move(privacy)};
  saved_path_ = save_training_state(config_.train.out, config_.train.keep, state_, tensors,
                                    *optimizer_, base::RngState::capture())
                    .path;
  saved_step_ = state_.step;
}

void ClassifierRun::summarise(TrainOutcome& outcome) {
  report::ReportData& report = log_->report();
  report.status = outcome.interrupted ? base::join("interrupted at step ", state_.step)
                                      : base::join("finished ", state_.step, " steps");
  report.peak_bytes = state_.peak_bytes;
  report.elapsed_s = elapsed();
  outcome.report_path = log_->write_report();
}

TrainOutcome ClassifierRun::execute() {
  started_ = environment_.clock();
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
  summarise(outcome);
  outcome.steps = state_.step;
  outcome.first_loss = state_.first_loss;
  outcome.last_loss = state_.last_loss;
  outcome.peak_bytes = state_.peak_bytes;
  outcome.state_path = saved_path_;
  outcome.accuracy = accuracy_;
  if (private_) {
    outcome.epsilon = private_->epsilon(config_.privacy.delta);
    outcome.noise_multiplier = state_.noise_multiplier;
  }
  return outcome;
}

}  // namespace

TrainOutcome train_classifier(const TrainConfig& config, bool resume,
                              const TrainerEnvironment& environment) {
  return ClassifierRun(config, resume, environment).execute();
}

}  // namespace gradus::train
