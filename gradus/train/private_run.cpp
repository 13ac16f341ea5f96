#include <gradus/train/private_run.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include <ATen/ops/isfinite.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/sort.h>
#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/train/private_options.h>

namespace gradus::train {
namespace {

// Where PrivateTraining::state has the optimizer's tensors, which a training state has already.
constexpr const char* kOptimizerEntries = "private.optimizer.";

// Epsilon is found this often in a run: it costs a Fourier transform, and moves slowly.
constexpr std::int64_t kEpsilonPoints = 50;

privacy::PrivateTraining make_training(const TrainConfig& config, const PrivateSubject& subject,
                                       optim::Optimizer& optimizer, double noise_multiplier,
                                       const TrainerEnvironment& environment,
                                       std::function<void(const std::string&)> log) {
  const auto& privacy = config.privacy;
  if (privacy.delta * static_cast<double>(subject.examples) >= 1.0) {
    environment.out << "warning: privacy.delta should be below 1 / " << subject.examples
                    << ", one over the examples; got " << privacy.delta
                    << ": publishing one example whole would keep such a budget\n";
  }
  const privacy::DataDescription data{
      .examples = subject.examples, .batch_size = config.train.batch, .steps = subject.steps};
  privacy::PrivacyOptions options = privacy_options(config);
  options.log = [&](const std::string& text) { environment.out << "note: " << text << '\n'; };
  options.sample.log = [log = std::move(log)](const std::string& text) { log("note: " + text); };
  options.targets = subject.targets;
  options.apply = subject.apply;
  options.noise_multiplier = noise_multiplier > 0.0 ? noise_multiplier : privacy.noise_multiplier;
  if (options.noise_multiplier > 0.0)
    return privacy::make_private(subject.model, optimizer, data, options);
  return privacy::make_private_with_epsilon(subject.model, optimizer, data, privacy.epsilon,
                                            privacy.delta, options);
}

}  // namespace

PrivateRun::PrivateRun(const TrainConfig& config, const PrivateSubject& subject,
                       optim::Optimizer& optimizer, double noise_multiplier,
                       const TrainerEnvironment& environment,
                       std::function<void(const std::string&)> log)
    : config_(config),
      subject_(subject),
      training_(
          make_training(config, subject, optimizer, noise_multiplier, environment, std::move(log))),
      noise_multiplier_(training_.optimizer().options().noise_multiplier) {}

void PrivateRun::describe(report::ReportData& report, std::ostream& out) {
  const auto& privacy = config_.privacy;
  report.title += ", private";
  report.privacy = {
      {"Budget", privacy.epsilon > 0.0
                     ? base::join("epsilon ", privacy.epsilon, ", delta ", privacy.delta)
                     : base::join("delta ", privacy.delta)},
      {"Noise multiplier", base::join(noise_multiplier())},
      {"Clipping", base::join(privacy.clipping, ", largest norm ", privacy.max_grad_norm)},
      {"Accountant", privacy.accountant},
      {"Sampling", base::join("Poisson, each ", subject_.example, " with probability ",
                              training_.sampler().options().sample_rate)},
      {"Noise", privacy.secure ? "from the system's random source"
                               : "seeded: private from nobody who knows the seed"}};
  out << "private: noise multiplier " << noise_multiplier() << ", " << privacy.clipping
      << " clipping at norm " << privacy.max_grad_norm << "; at the end epsilon "
      << epsilon_text(training_.final_epsilon(privacy.delta)) << " at delta " << privacy.delta
      << " (" << privacy.accountant << ")\n";
  if (!privacy.secure) {
    out << "warning: privacy.secure is false: sampling and noise follow from train.seed, and hide "
           "nothing from who knows it\n";
  }
}

PrivateRun::Indices PrivateRun::next_batch() {
  auto drawn = training_.sampler().next();
  GRADUS_INTERNAL_CHECK("train", drawn.has_value(), "a step past the sampler's last one");
  return std::move(*drawn);
}

at::Tensor PrivateRun::accumulate(const persample::LossFunction& loss,
                                  const persample::Batch& rows) {
  return training_.optimizer().accumulate(loss, rows).cpu();
}

void PrivateRun::step(report::StepMetrics& metrics, report::ReportData& report, std::int64_t step) {
  const base::MemoryCategoryScope category(base::MemoryCategory::optimizer_state);
  privacy::DPOptimizer& optimizer = training_.optimizer();
  const privacy::DPStep done =
      optimizer.examples() == 0 ? optimizer.step_empty() : optimizer.step();
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
  report.example_norms.assign(values, values + sorted.numel());
  report.norm_threshold = done.max_norm;
  report.norms_label = base::join("step ", step);
}

// For steps between those where epsilon is found it is that of the next: never too little.
void PrivateRun::spend(std::int64_t step, report::StepMetrics& metrics) {
  if (step > epsilon_step_) {
    const std::int64_t steps = subject_.steps;
    const std::int64_t stride = (steps + kEpsilonPoints - 1) / kEpsilonPoints;
    epsilon_step_ = std::min(steps, (step + stride - 1) / stride * stride);
    privacy::History history = training_.accountant().history();
    privacy::GaussianSteps further = training_.sampler().accounted(noise_multiplier());
    further.steps = epsilon_step_ - step;
    history.add(further);
    epsilon_ =
        privacy::epsilon_of(history, config_.privacy.delta, training_.accountant().options());
  }
  if (step == epsilon_step_) metrics.extra["epsilon"] = epsilon_;
}

std::string PrivateRun::remark() const { return "epsilon " + epsilon_text(epsilon_); }

void PrivateRun::abandon() {
  training_.optimizer().zero_grad();
  training_.sampler().load_state(held_);
}

std::vector<std::pair<std::string, at::Tensor>> PrivateRun::entries() const {
  std::vector<std::pair<std::string, at::Tensor>> entries;
  for (auto& [name, tensor] : training_.state())
    if (!name.starts_with(kOptimizerEntries)) entries.emplace_back(name, tensor);
  return entries;
}

void PrivateRun::load(const SavedState& state) {
  auto entries = load_privacy(state);
  for (const optim::NamedState& entry : load_optimizer_entries(state))
    entries.emplace_back(kOptimizerEntries + entry.name, entry.tensor);
  const base::MemoryCategoryScope category(base::MemoryCategory::optimizer_state);
  training_.load_state(entries);
}

}  // namespace gradus::train
