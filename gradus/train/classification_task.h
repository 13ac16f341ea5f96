#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/train/config.h>

namespace torch::nn {
class Module;
}

namespace gradus::train {

// Shapes: N examples, B of a batch, K classes.

/// Examples as a data set stores them; dimension 0 of each tensor counts them.
struct LabelledExamples {
  std::vector<at::Tensor> inputs{};
  at::Tensor labels{};  ///< int64 [N].
  std::int64_t size() const { return labels.size(0); }
};

/// Data and model of a classifier.
struct ClassificationTask {
  std::string title{};       ///< "Fashion-MNIST": what the report is about.
  std::string model_name{};  ///< "Convolutional network, tanh".
  std::string item{};        ///< What an example is, in the singular: "image".
  std::int64_t classes = 0;
  LabelledExamples train{};
  LabelledExamples test{};
  std::uint64_t content_hash = 0;  ///< Of all examples: a run goes on with the data it began with.
  std::shared_ptr<torch::nn::Module> model{};
  at::Tensor lengths{};  ///< int64 [N] of the training inputs; undefined if all are alike.
  /// What the model takes of stored inputs [B, ...]: bytes to numbers, padding cut.
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor> stored)> prepare{};
  /// Logits [B, K] of prepared inputs.
  std::function<at::Tensor(const std::vector<at::Tensor>& inputs)> logits{};
};

/// Reads the data of data.task and makes its model, with weights drawn from the default generator
/// (or, for bert-help-text, the file's, all but the head).
/// @param run_directory  The tokenizer of help-text is saved there.
/// @param made_before  The run is there already: its tokenizer is read, not made again.
/// @throws UserError if the data are not installed, which names the package, or make no task.
ClassificationTask make_classification_task(const TrainConfig& config,
                                            const std::string& run_directory, bool made_before);

/// The examples at @p indices, prepared, with their labels last: what a loss is made of.
std::vector<at::Tensor> rows_of(const ClassificationTask& task, const LabelledExamples& examples,
                                const std::vector<std::int64_t>& indices);

/// @p indices of training examples with those of like length together, so that a micro-batch has
/// little padding; as they are where all are alike.
std::vector<std::int64_t> by_length(const ClassificationTask& task,
                                    std::vector<std::int64_t> indices);

/// The share of examples whose largest logit is their label's, and their mean cross entropy, in
/// evaluation mode, @p micro_batch at a time. Leaves mode and random state as they were.
struct Evaluation {
  double accuracy = 0.0;
  double loss = 0.0;  ///< Nats an example.
};
Evaluation evaluate_classifier(const ClassificationTask& task, const LabelledExamples& examples,
                               std::int64_t micro_batch);

}  // namespace gradus::train
