#include <gradus/train/trainer.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <ostream>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/utils.h>

#include <gradus/accumulate/window.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plan/budget_compression.h>
#include <gradus/plan/store_stash.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/train/classification.h>
#include <gradus/train/generate.h>
#include <gradus/train/language_model.h>
#include <gradus/train/memory_attribution.h>
#include <gradus/train/planning.h>
#include <gradus/train/run_data.h>
#include <gradus/train/run_loop.h>
#include <gradus/train/text_windows.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using base::MemoryCategory;

// All that a plan depends on.
std::string plan_inputs(const TrainConfig& config, std::int64_t vocabulary) {
  const auto& m = config.model;
  return base::join(
      "limit ", config.memory.limit, ", plan ", config.memory.plan, ", batch ", config.train.batch,
      ", layers ", m.layers, ", heads ", m.heads, ", width ", m.width, ", context ", m.context,
      ", dropout ", m.dropout, ", bias ", m.bias, ", vocabulary ", vocabulary, ", optimizer ",
      config.optimizer.kind, ", optimizer state ", config.memory.optimizer_state, ", precision ",
      config.train.precision, ", accumulate ", config.train.accumulate,
      // What is lossless changes no number.
      parse_lossy(config.memory.compress) == compress::Lossy::none
          ? ""
          : ", compress " + config.memory.compress,
      config.privacy.enabled ? base::join(", private micro-batch ", config.privacy.micro_batch)
                             : "");
}

class LanguageModelRun final : public RunLoop {
 public:
  LanguageModelRun(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);

 private:
  std::string describe(report::ReportData& report) override;
  bool gradients(report::StepMetrics& metrics) override;
  void drop_gradients() override { window_->reset(); }
  data::DataPosition position() const override { return data_.training.position(); }
  void seek(data::DataPosition position) override { data_.training.seek(position); }
  std::string evaluate_now(report::StepMetrics& metrics) override;
  void complete(TrainOutcome& outcome) override;

  void make_plan();
  PlannedTraining choose(std::optional<Plan> only);
  void begin_micro_batch(std::int64_t micro_batch, std::int64_t micro_batches);
  bool plain_gradients(report::StepMetrics& metrics);
  bool private_gradients(report::StepMetrics& metrics);
  at::Tensor losses(const persample::Batch& rows);
  persample::Batch windows_at(const std::vector<std::int64_t>& indices) const;
  std::int64_t private_micro_batch() const;
  void examine();

  // What the passes of a step run under where memory is short.
  class PassBudget {
   public:
    explicit PassBudget(LanguageModelRun& run);
    void begin(std::int64_t size, bool later);

   private:
    const PassPlans& passes_;
    std::optional<plan::BudgetCompression> compression_;
    std::optional<recompute::MemoryBudget> budget_;
    std::optional<BudgetAttribution> attribution_;
  };

  RunData data_;
  std::optional<TextWindows> windows_;  // of a private run
  std::optional<base::MemoryLimit> limit_;
  models::Gpt gpt_{nullptr};
  std::optional<base::NamedTensors> names_;
  std::optional<MemoryAttribution> attribution_;
  std::optional<accumulate::GradientWindow> window_;
  PassPlans passes_;                         // if the plan has a budget
  std::shared_ptr<recompute::Stash> stash_;  // where plans move what they offload; may be null
};

LanguageModelRun::LanguageModelRun(const TrainConfig& config, bool resume,
                                   const TrainerEnvironment& environment)
    : RunLoop(config, resume, environment), data_(make_data(config)) {
  const data::Tokenizer& tokenizer = *data_.prepared.tokenizer;
  if (config.privacy.enabled) {
    windows_.emplace(data_.prepared.tokens, data_.training_ranges, config.model.context);
    GRADUS_CHECK("train", config.train.batch <= windows_->size(),
                 "train.batch must be at most the windows of the training text (", windows_->size(),
                 "); got ", config.train.batch);
  }
  // Before the first tensor: weights are made inside the limit too.
  if (limit_bytes() > 0) limit_.emplace(base::MemoryLimitOptions{.device_bytes = limit_bytes()});
  torch::manual_seed(static_cast<std::uint64_t>(config.train.seed));
  {
    const base::MemoryCategoryScope parameters(MemoryCategory::parameters);
    gpt_ = make_gpt(config, tokenizer.vocabulary_size());
    gpt_->to(device());
  }
  if (resumed()) {
    GRADUS_CHECK("train",
                 state().corpus_hash == data_.prepared.tokens->info().corpus_hash &&
                     state().tokenizer_hash == tokenizer.hash(),
                 "a run goes on with the text it began with; ", config.data.corpus,
                 " is another now, or is read "
                 "with another tokenizer. Put it back, or start a new run");
    data_.training.seek(state().position);
  }
  take_model(gpt_.ptr());
  names_.emplace(named_tensors(*gpt_));
  attribution_.emplace(*gpt_);
  state().corpus_hash = data_.prepared.tokens->info().corpus_hash;
  state().tokenizer_hash = tokenizer.hash();
  make_plan();
  make_update(
      {.steps = config.train.steps,
       .examples = windows_ ? windows_->size() : 0,
       .example = base::join("window of ", config.model.context + 1, " tokens"),
       .privacy_further = base::join(", windows of ", config.model.context + 1,
                                     " tokens, validation ratio ", config.data.validation_ratio)});
  accumulate::WindowOptions window{.micro_batches = state().plan.micro_batches,
                                   .normalisation = accumulate::Normalisation::tokens};
  if (scales_loss()) {
    window.scale_loss = [this](const at::Tensor& seed) { return seed * amp().loss_scale(); };
  }
  window_.emplace(amp().parameters(*gpt_), window);
  if (!resumed()) tokenizer.save((fs::path(config.train.out) / "tokenizer").string());
  if (windows_) examine();
}

void LanguageModelRun::make_plan() {
  if (const auto offload = offload_options(config())) stash_ = plan::make_stash(*offload);
  const std::int64_t segments = config().model.layers;
  const PlanRequest request =
      parse_plan_request(config().memory.plan, config().train.batch, segments);
  const std::string inputs = plan_inputs(config(), data_.prepared.tokenizer->vocabulary_size());
  if (resumed() && state().plan_inputs == inputs) {
    if (state().optimizer.empty()) state().optimizer = config().optimizer.kind;
    // The same micro-batches, or the run would not continue bit for bit; what they drop changes no
    // number.
    if (state().plan.budget) passes_ = choose(state().plan).choice.passes;
    return;
  }
  if (resumed()) {
    environment().out << "note: what the plan was made for changed since the state was saved; a "
                         "new plan may round "
                         "differently from here on\n";
  }
  state().plan_inputs = inputs;
  state().plain_peak_bytes = 0;
  state().peak_bytes = 0;  // that of steps under this plan
  state().optimizer = config().optimizer.kind;
  std::int64_t accumulate = std::max<std::int64_t>(config().train.accumulate, 1);
  if (windows_ && config().train.accumulate == 0) {
    const std::int64_t at_once = config().privacy.micro_batch;
    accumulate = (config().train.batch + at_once - 1) / at_once;
  }
  if (!request.automatic) {
    state().plan = request.plan;
    if (config().train.accumulate > 0 || config().memory.plan == "none")
      state().plan.micro_batches = accumulate;
    state().plan_reason = "as asked";
    return;
  }
  if (limit_bytes() == 0) {
    state().plan = {.micro_batches = accumulate};
    state().plan_reason = windows_ ? "no memory limit" : "no memory limit: plain training";
    return;
  }
  const PlannedTraining planned = choose(std::nullopt);
  const PlanChoice& choice = planned.choice;
  state().optimizer = planned.optimizer;
  state().plan = choice.plan;
  state().plan_reason = choice.reason;
  state().plain_peak_bytes = choice.plain_peak_bytes;
  passes_ = choice.passes;
}

PlannedTraining LanguageModelRun::choose(std::optional<Plan> only) {
  environment().out << (only ? "planning what the saved plan drops to fit "
                             : "measuring a step to fit ")
                    << base::format_bytes(limit_bytes()) << " ..." << std::endl;
  return plan_training(only ? planned_config() : config(), gpt_, amp(), data_.training,
                       {.batch = config().train.batch, .limit_bytes = limit_bytes(), .only = only},
                       environment());
}

std::string LanguageModelRun::describe(report::ReportData& report) {
  const auto& model = config().model;
  const std::int64_t batch = config().train.batch;
  const Plan& plan = state().plan;
  report.title = base::join("GPT on ", config().data.corpus);
  report.model = base::join("GPT, ", model.layers, " layers, width ", model.width, ", ",
                            model.heads, " heads, context ", model.context, ", vocabulary ",
                            data_.prepared.tokenizer->vocabulary_size());
  report.plan = describe_plan(plan, batch, model.layers);
  report.plan_reason = state().plan_reason;
  report.microbatch_size = plan.largest(batch);
  report.microbatches_per_step = plan.micro_batches;
  report.recomputed_segments = plan.recomputed;
  report.segments = plan.budget ? 0 : model.layers;  // whose choice it is not
  report.plain_peak_bytes = state().plain_peak_bytes;
  report.plain_source = "predicted from measured steps of two and three sequences";
  std::string lines = base::join("plan: ", report.plan, ": ", report.plan_reason, '\n');
  if (windows_) {
    lines += base::join(windows_->size(), " windows of ", model.context + 1,
                        " tokens to train on, each an example of its own; ", steps(), " steps of ",
                        batch, "\n");
  }
  return lines;
}

LanguageModelRun::PassBudget::PassBudget(LanguageModelRun& run) : passes_(run.passes_) {
  if (!run.state().plan.budget) return;
  const auto how = compress_options(run.config(), run.state().step);
  if (how && passes_.compress()) compression_.emplace(*how);
  budget_.emplace(
      recompute::MemoryBudgetOptions{.limit_bytes = run.limit_bytes(),
                                     .stash = run.stash_,
                                     .encoder = compression_ ? compression_->encoder() : nullptr});
  attribution_.emplace(*run.gpt_);
}

void LanguageModelRun::PassBudget::begin(std::int64_t size, bool later) {
  if (budget_) budget_->set_plan(passes_.find(size, later));
}

// Phases of the recorded step: its first micro-batch, all others, the optimizer.
void LanguageModelRun::begin_micro_batch(std::int64_t micro_batch, std::int64_t micro_batches) {
  if (micro_batch >= 2) return;
  begin_phase(micro_batches == 1 ? "forward and backward"
              : micro_batch == 0 ? "first micro-batch"
                                 : "further micro-batches");
}

bool LanguageModelRun::gradients(report::StepMetrics& metrics) {
  return windows_ ? private_gradients(metrics) : plain_gradients(metrics);
}

bool LanguageModelRun::plain_gradients(report::StepMetrics& metrics) {
  const data::Batch batch = [&] {
    const base::MemoryCategoryScope category(MemoryCategory::inputs);
    return data_.training.next();
  }();
  metrics.tokens = batch.inputs.numel();
  window_->expect_total_weight(static_cast<double>(metrics.tokens));
  const std::vector<std::int64_t> sizes = state().plan.sizes(batch.size());
  const auto count = static_cast<std::int64_t>(sizes.size());
  std::int64_t begin = 0;
  {
    PassBudget budget(*this);
    for (std::int64_t i = 0; i < count; ++i) {
      begin_micro_batch(i, count);
      const std::int64_t size = sizes[static_cast<std::size_t>(i)];
      budget.begin(size, i > 0);
      const at::Tensor inputs = batch.inputs.narrow(0, begin, size).to(device());
      const at::Tensor targets = batch.targets.narrow(0, begin, size).to(device());
      begin += size;
      language_model_backward(*gpt_, amp(), optimizer(), *window_, inputs, targets,
                              state().plan.recomputed, /*judge=*/i + 1 == count);
      if (amp().properties().casts_to_half()) {
        for (const at::Tensor& weight : amp().master_params(optimizer())) {
          if (weight.grad().defined())
            tracker().attribute(weight.grad(), MemoryCategory::gradients);
        }
      }
      if (environment().should_stop()) return false;
    }
  }
  metrics.loss = window_->finish().loss;
  if (!scales_loss() && !std::isfinite(metrics.loss))
    refuse_non_finite(base::join("loss must stay finite; it is ", metrics.loss));
  return true;
}

at::Tensor LanguageModelRun::losses(const persample::Batch& rows) {
  const amp::Region region = amp().region();
  return language_model_losses(*gpt_, rows[0], rows[1], state().plan.recomputed);
}

persample::Batch LanguageModelRun::windows_at(const std::vector<std::int64_t>& indices) const {
  const base::MemoryCategoryScope category(MemoryCategory::inputs);
  const data::Batch rows = windows_->rows(indices);
  return {rows.inputs.to(device()), rows.targets.to(device())};
}

// A Poisson batch may be larger than the expected one that a limit was planned for.
std::int64_t LanguageModelRun::private_micro_batch() const {
  const Plan& plan = state().plan;
  return limit_bytes() > 0 || plan.micro_batches > 1 ? plan.largest(config().train.batch)
                                                     : config().privacy.micro_batch;
}

// The program is looked at on a few windows (persample::SampleGradients) before the first step, so
// that no step needs memory for that. Nothing of it is kept.
void LanguageModelRun::examine() {
  constexpr std::int64_t kWindows = 3;
  const base::RngGuard rng;
  std::vector<std::int64_t> some;
  for (std::int64_t i = 0; i < std::min({kWindows, windows_->size(), private_micro_batch()}); ++i)
    some.push_back(i);
  const PassBudget budget(*this);
  private_run()->hold();
  private_run()->accumulate([this](const persample::Batch& rows) { return losses(rows); },
                            windows_at(some));
  private_run()->abandon();
}

bool LanguageModelRun::private_gradients(report::StepMetrics& metrics) {
  const std::vector<std::int64_t> batch = private_run()->next_batch();
  const auto pieces = privacy::micro_batches(batch, private_micro_batch());
  const auto count = static_cast<std::int64_t>(pieces.size());
  std::vector<at::Tensor> all{at::empty({0}, at::kFloat)};
  {
    PassBudget budget(*this);
    for (std::int64_t i = 0; i < count; ++i) {
      begin_micro_batch(i, count);
      const auto& piece = pieces[static_cast<std::size_t>(i)];
      budget.begin(static_cast<std::int64_t>(piece.size()), i > 0);
      all.push_back(private_run()->accumulate(
          [this](const persample::Batch& rows) { return losses(rows); }, windows_at(piece)));
      if (environment().should_stop()) return false;
    }
  }
  metrics.tokens = static_cast<std::int64_t>(batch.size()) * config().model.context;
  take_losses(at::cat(all), metrics);
  return true;
}

std::string LanguageModelRun::evaluate_now(report::StepMetrics& metrics) {
  if (!data_.validation) return "";
  const std::int64_t sequences =
      std::min(config().train.eval_sequences, data_.validation->sequences_per_epoch());
  const amp::Region region = amp().region();
  metrics.validation_loss =
      evaluate(*gpt_, *data_.validation, sequences, state().plan.largest(config().train.batch));
  return base::join("validation loss ", *metrics.validation_loss);
}

void LanguageModelRun::complete(TrainOutcome& outcome) {
  if (outcome.interrupted || config().sample.tokens == 0) return;
  const amp::Region region = amp().region();
  outcome.sample = generate(*gpt_, *data_.prepared.tokenizer,
                            {.prompt = config().sample.prompt,
                             .tokens = config().sample.tokens,
                             .temperature = config().sample.temperature,
                             .top_k = config().sample.top_k,
                             .seed = static_cast<std::uint64_t>(config().train.seed)});
}

}  // namespace

TrainOutcome train(const TrainConfig& config, bool resume, const TrainerEnvironment& environment) {
  if (is_classifier(config)) return train_classifier(config, resume, environment);
  return LanguageModelRun(config, resume, environment).execute();
}

}  // namespace gradus::train
