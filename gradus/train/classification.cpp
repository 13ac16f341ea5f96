#include <gradus/train/classification.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <gradus/base/error.h>
#include <gradus/persample/vmap/examples.h>
#include <gradus/privacy/training/losses.h>
#include <gradus/train/classification_task.h>
#include <gradus/train/language_model.h>
#include <gradus/train/run_loop.h>

namespace gradus::train {
namespace {

using base::MemoryCategory;
using Indices = std::vector<std::int64_t>;

class ClassifierRun final : public RunLoop {
 public:
  ClassifierRun(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);

 private:
  std::string describe(report::ReportData& report) override;
  bool gradients(report::StepMetrics& metrics) override;
  data::DataPosition position() const override { return position_; }
  void seek(data::DataPosition position) override { position_ = position; }
  std::string evaluate_now(report::StepMetrics& metrics) override;
  void complete(TrainOutcome& outcome) override { outcome.accuracy = accuracy_; }

  std::int64_t planned_steps() const;
  Indices next_batch();
  at::Tensor losses(const persample::Batch& rows);

  ClassificationTask task_;
  data::DataPosition position_;  // of a plain run
  at::Tensor order_;             // of its epoch
  std::int64_t ordered_epoch_ = -1;
  std::optional<double> accuracy_;
};

ClassifierRun::ClassifierRun(const TrainConfig& config, bool resume,
                             const TrainerEnvironment& environment)
    : RunLoop(config, resume, environment) {
  torch::manual_seed(static_cast<std::uint64_t>(config.train.seed));
  {
    const base::MemoryCategoryScope inputs(MemoryCategory::inputs);
    task_ = make_classification_task(config, config.train.out, resume);
    task_.model->to(device());
    for (const auto& [name, tensor] : named_tensors(*task_.model))
      tracker().attribute(tensor, MemoryCategory::parameters);
  }
  const std::int64_t steps = planned_steps();
  GRADUS_CHECK("train", !resumed() || state().corpus_hash == task_.content_hash,
               "a run goes on with the examples it began with; those of data.task ",
               config.data.task,
               " are others now. Put them back (data.limit, model.context and the tokenizer count "
               "too), or start a new run");
  state().corpus_hash = task_.content_hash;
  state().optimizer = config.optimizer.kind;
  position_ = state().position;
  take_model(task_.model);
  make_update({.steps = steps, .examples = task_.train.size(), .example = task_.item});
}

std::int64_t ClassifierRun::planned_steps() const {
  const std::int64_t examples = task_.train.size();
  GRADUS_CHECK("train", config().train.batch <= examples,
               "train.batch must be at most the number of examples (", examples, "); got ",
               config().train.batch);
  std::int64_t steps = config().train.steps;
  if (config().train.epochs > 0.0) {
    steps = std::max<std::int64_t>(
        1, std::llround(config().train.epochs * static_cast<double>(examples) /
                        static_cast<double>(config().train.batch)));
  }
  GRADUS_CHECK("train", config().optimizer.warmup < steps,
               "optimizer.warmup must be below the steps of the run (", steps, "); got ",
               config().optimizer.warmup);
  return steps;
}

std::string ClassifierRun::describe(report::ReportData& report) {
  report.title = task_.title;
  report.model = task_.model_name;
  report.item = task_.item;
  report.microbatch_size = std::min(config().privacy.micro_batch, config().train.batch);
  report.loss_label = base::join("Cross-entropy, nats per ", task_.item);
  return base::join(task_.train.size(), " ", task_.item, "s to train on, ", task_.test.size(),
                    " to test, ", task_.classes, " classes; ", steps(), " steps of ",
                    config().train.batch, "\n");
}

// Of a plain run: each example once an epoch, in an order that depends on seed and epoch only.
Indices ClassifierRun::next_batch() {
  if (private_run() != nullptr) return private_run()->next_batch();
  const std::int64_t examples = task_.train.size();
  if (position_.index >= examples) position_ = {.epoch = position_.epoch + 1, .index = 0};
  if (ordered_epoch_ != position_.epoch) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(
        persample::example_seed(static_cast<std::uint64_t>(config().train.seed), position_.epoch));
    order_ = at::randperm(examples, generator, at::kLong);
    ordered_epoch_ = position_.epoch;
  }
  const std::int64_t count = std::min(config().train.batch, examples - position_.index);
  const std::int64_t* first = order_.const_data_ptr<std::int64_t>() + position_.index;
  position_.index += count;
  return {first, first + count};
}

at::Tensor ClassifierRun::losses(const persample::Batch& rows) {
  const std::vector<at::Tensor> inputs(rows.begin(), rows.end() - 1);
  const at::Tensor logits_BK = [&] {
    const amp::Region region = amp().region();
    return task_.logits(inputs);
  }();
  return privacy::cross_entropy_per_example(logits_BK.to(at::kFloat), rows.back());
}

bool ClassifierRun::gradients(report::StepMetrics& metrics) {
  begin_phase("gradients");
  const Indices batch = next_batch();
  std::vector<at::Tensor> all{at::empty({0}, at::kFloat)};
  for (const Indices& piece :
       privacy::micro_batches(by_length(task_, batch), config().privacy.micro_batch)) {
    persample::Batch rows;
    {
      const base::MemoryCategoryScope category(MemoryCategory::inputs);
      rows = rows_of(task_, task_.train, piece);
      for (at::Tensor& tensor : rows) tensor = tensor.to(device());
    }
    if (private_run() != nullptr) {
      all.push_back(private_run()->accumulate(
          [this](const persample::Batch& some) { return losses(some); }, rows));
    } else {
      const at::Tensor each = losses(rows);
      (each.sum() / static_cast<double>(batch.size())).backward();
      all.push_back(each.detach().cpu());
    }
    if (environment().should_stop()) return false;
  }
  metrics.tokens = static_cast<std::int64_t>(batch.size());
  take_losses(at::cat(all), metrics);
  return true;
}

std::string ClassifierRun::evaluate_now(report::StepMetrics& metrics) {
  const amp::Region region = amp().region();
  const Evaluation found = evaluate_classifier(task_, task_.test, config().privacy.micro_batch);
  accuracy_ = metrics.extra["accuracy"] = found.accuracy;
  metrics.validation_loss = found.loss;
  return base::join("test accuracy ", 100.0 * found.accuracy, "%, loss ", found.loss);
}

}  // namespace

TrainOutcome train_classifier(const TrainConfig& config, bool resume,
                              const TrainerEnvironment& environment) {
  return ClassifierRun(config, resume, environment).execute();
}

}  // namespace gradus::train
