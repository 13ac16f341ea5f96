#include <gradus/privacy/training/make_private.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/noise_search.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;

constexpr const char* kSampler = "sampler.";
constexpr const char* kOptimizer = "private.";

double sample_rate_of(const DataDescription& data) {
  GRADUS_CHECK(kComponent, data.examples >= 1, "examples must be >= 1; got ", data.examples);
  GRADUS_CHECK(kComponent, data.batch_size.has_value() != data.sample_rate.has_value(),
               "either batch_size or sample_rate must be given; got ",
               data.batch_size ? "both" : "neither");
  if (data.sample_rate) return *data.sample_rate;
  GRADUS_CHECK(kComponent, *data.batch_size >= 1 && *data.batch_size <= data.examples,
               "batch_size must be in [1, ", data.examples, "], the number of examples; got ",
               *data.batch_size);
  return static_cast<double>(*data.batch_size) / static_cast<double>(data.examples);
}

std::int64_t steps_of(const DataDescription& data, double sample_rate) {
  GRADUS_CHECK(kComponent, data.epochs.has_value() != data.steps.has_value(),
               "either epochs or steps must be given; got ", data.epochs ? "both" : "neither");
  if (data.steps) return *data.steps;
  GRADUS_CHECK(kComponent, std::isfinite(*data.epochs) && *data.epochs > 0.0,
               "epochs must be finite and > 0; got ", *data.epochs);
  const double steps = *data.epochs / sample_rate;
  GRADUS_CHECK(kComponent, steps < 0x1p53, "epochs over the sample rate must be < 2^53 steps; got ",
               steps);
  return std::max<std::int64_t>(1, std::llround(steps));
}

std::unique_ptr<Sampler> sampler_for(const DataDescription& data, const PrivacyOptions& options) {
  const double rate = sample_rate_of(data);
  return make_sampler(options.sampling, {.examples = data.examples,
                                         .sample_rate = rate,
                                         .steps = steps_of(data, rate),
                                         .max_batch_size = data.max_batch_size,
                                         .seed = options.seed,
                                         .rank = options.reduction.rank,
                                         .ranks = options.reduction.ranks,
                                         .broadcast = options.broadcast});
}

// Everything that steps [from, to) of a run with this noise release.
void add_steps(History& history, const Sampler& sampler, const optim::Schedule& schedule,
               double noise_multiplier, std::int64_t from, std::int64_t to) {
  if (!schedule) {
    GaussianSteps steps = sampler.accounted(noise_multiplier);
    steps.steps = to - from;
    history.add(steps);
    return;
  }
  for (std::int64_t step = from; step < to; ++step)
    history.add(sampler.accounted(noise_multiplier * schedule(step)));
}

PrivateTraining assemble(std::shared_ptr<torch::nn::Module> model, optim::Optimizer& optimizer,
                         std::unique_ptr<Sampler> sampler, const PrivacyOptions& options) {
  auto accountant = std::make_shared<Accountant>(options.accountant, options.spent);
  // An accountant that cannot do this sampling says so before the run, not at its end.
  if (options.accountant.kind == AccountantKind::kGaussian)
    epsilon_of(History({sampler->accounted(1.0)}), 0.5, options.accountant);
  const Sampler& drawn = *sampler;  // lives as long as the PrivateTraining
  auto made = std::make_unique<DPOptimizer>(
      optimizer, std::move(model), accountant,
      DPOptimizerOptions{.noise_multiplier = options.noise_multiplier,
                         .expected_batch_size = drawn.expected_batch_size(),
                         .clipping = options.clipping,
                         .noise_schedule = options.noise_schedule,
                         .clip_schedule = options.clip_schedule,
                         .seed = options.seed,
                         .reduction = options.reduction,
                         .sample = options.sample,
                         .accounted = [&drawn](double noise) { return drawn.accounted(noise); },
                         .targets = options.targets,
                         .apply = options.apply,
                         .allow_buffer_updates = options.allow_buffer_updates});
  return {std::move(sampler), std::move(made), std::move(accountant)};
}

void check_model(const std::shared_ptr<torch::nn::Module>& model, const PrivacyOptions& options) {
  GRADUS_CHECK(kComponent, model != nullptr, "a model must be given; got null");
  ValidatorOptions validator = options.validator;
  validator.master_weights = validator.master_weights || !options.targets.empty();
  validate(*model, validator);
  if (!options.log) return;
  for (const PrivacyIssue& issue : find_issues(*model, validator)) options.log(describe(issue));
}

}  // namespace

PrivateTraining::PrivateTraining(std::unique_ptr<Sampler> sampler,
                                 std::unique_ptr<DPOptimizer> optimizer,
                                 std::shared_ptr<Accountant> accountant)
    : sampler_(std::move(sampler)),
      optimizer_(std::move(optimizer)),
      accountant_(std::move(accountant)) {}

double PrivateTraining::final_epsilon(double delta) const {
  History history = accountant_->history();
  const DPOptimizerOptions& options = optimizer_->options();
  const std::int64_t left = sampler_->options().steps - sampler_->step();
  const std::int64_t from = optimizer_->steps();
  if (left > 0) {
    add_steps(history, *sampler_, options.noise_schedule, options.noise_multiplier, from,
              from + left);
  }
  return epsilon_of(history, delta, accountant_->options());
}

std::optional<DPStep> PrivateTraining::step(const persample::LossFunction& loss, const Fetch& fetch,
                                            std::int64_t micro_batch) {
  GRADUS_CHECK(kComponent, optimizer_->examples() == 0,
               "a logical batch must be finished before the next is drawn; ",
               optimizer_->examples(), " examples are accumulated");
  GRADUS_CHECK(kComponent, micro_batch >= 1, "micro_batch must be >= 1; got ", micro_batch);
  const auto batch = sampler_->next();
  if (!batch) return std::nullopt;
  if (batch->empty()) return optimizer_->step_empty();
  optimizer_->zero_grad();  // the last step's gradients would stand beside the new sums
  try {
    for (const auto& piece : micro_batches(*batch, micro_batch)) {
      const persample::Batch rows = fetch(piece);
      const std::int64_t got = persample::count_examples(rows);
      GRADUS_CHECK(kComponent, got == static_cast<std::int64_t>(piece.size()),
                   "fetch must give one row for each of ", piece.size(), " indices; got ", got);
      optimizer_->accumulate(loss, rows);
    }
  } catch (...) {
    // The batch was drawn. Its step is released as one without examples, because a step that is
    // missing would tell that the batch had the example that failed.
    optimizer_->zero_grad();
    try {
      optimizer_->step_empty();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first failure is what the caller must see
      optimizer_->zero_grad();
    }
    throw;
  }
  try {
    return optimizer_->step();
  } catch (...) {
    optimizer_->zero_grad();
    throw;
  }
}

StateEntries PrivateTraining::state() const {
  StateEntries entries;
  for (auto& [name, tensor] : sampler_->state()) entries.emplace_back(kSampler + name, tensor);
  for (auto& [name, tensor] : optimizer_->state()) entries.emplace_back(kOptimizer + name, tensor);
  return entries;
}

void PrivateTraining::load_state(const StateEntries& entries) {
  internal::StateReader read(entries);
  const StateEntries sampler = read.under(kSampler), optimizer = read.under(kOptimizer);
  read.finish();
  // Both or neither: the sampler goes back if the optimizer refuses.
  const StateEntries before = sampler_->state();
  sampler_->load_state(sampler);
  try {
    optimizer_->load_state(optimizer);
  } catch (...) {
    sampler_->load_state(before);
    throw;
  }
}

PrivateTraining make_private(std::shared_ptr<torch::nn::Module> model, optim::Optimizer& optimizer,
                             const DataDescription& data, const PrivacyOptions& options) {
  check_model(model, options);
  return assemble(std::move(model), optimizer, sampler_for(data, options), options);
}

PrivateTraining make_private_with_epsilon(std::shared_ptr<torch::nn::Module> model,
                                          optim::Optimizer& optimizer, const DataDescription& data,
                                          double epsilon, double delta,
                                          const PrivacyOptions& options) {
  check_model(model, options);
  auto sampler = sampler_for(data, options);
  // A function of the scale for every case, as what a step releases is the sampler's to say.
  const auto history_of = [&](double noise) {
    History history;
    add_steps(history, *sampler, options.noise_schedule, noise, 0, sampler->options().steps);
    return history;
  };
  PrivacyOptions chosen = options;
  chosen.noise_multiplier =
      find_noise_multiplier({.epsilon = epsilon, .delta = delta}, history_of,
                            {.accountant = options.accountant, .spent = options.spent})
          .noise_multiplier;
  return assemble(std::move(model), optimizer, std::move(sampler), chosen);
}

}  // namespace gradus::privacy
