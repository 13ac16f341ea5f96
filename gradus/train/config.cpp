#include <gradus/train/config.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <sstream>

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/compress/policy.h>
#include <gradus/models/gpt.h>
#include <gradus/train/internal/one_of.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/plan.h>
#include <gradus/train/precision.h>

namespace gradus::train {
namespace {

using internal::check_one_of;

// A captureless lambda as the accessor of one field.
#define GRADUS_KEY(table, name, flag, help)                                      \
  ConfigKey {                                                                    \
    #table, #name, flag, help,                                                   \
        +[](TrainConfig& c) -> decltype((c.table.name)) { return c.table.name; } \
  }

std::vector<ConfigKey> make_keys() {
  return {
      GRADUS_KEY(model, layers, "--layers", "Transformer blocks"),
      GRADUS_KEY(model, heads, "--heads", "Attention heads; divides the width"),
      GRADUS_KEY(model, width, "--width", "Width of the residual stream"),
      GRADUS_KEY(model, context, "--context", "Tokens of a sequence"),
      GRADUS_KEY(model, dropout, "--dropout", "Dropout probability, in [0, 1)"),
      GRADUS_KEY(model, bias, "--bias", "Linear layers have a bias"),
      GRADUS_KEY(model, activation, "--activation",
                 "Activation of image and table classifiers: tanh or relu"),
      GRADUS_KEY(model, frozen_layers, "--frozen-layers",
                 "Lower layers of a BERT encoder that are not trained, its embeddings with them"),
      GRADUS_KEY(data, task, "--task",
                 "language-model, or a classifier: fashion-mnist, adult, help-text, "
                 "bert-help-text"),
      GRADUS_KEY(data, directory, "--data-directory",
                 "Folder of a classifier's files; empty: where their package puts them"),
      GRADUS_KEY(data, limit, "--limit",
                 "Examples that a classifier trains on, spread over the set; 0 is all"),
      GRADUS_KEY(data, corpus, "--corpus", "Text to train on: bible-kjv or file:PATH"),
      GRADUS_KEY(data, tokenizer, "--tokenizer", "sentencepiece or bytes"),
      GRADUS_KEY(data, vocabulary, "--vocabulary", "Tokens of a sentencepiece tokenizer"),
      GRADUS_KEY(data, cache, "--cache", "Directory for tokenised corpora"),
      GRADUS_KEY(data, validation_ratio, "--validation-ratio",
                 "Share of the text kept for validation"),
      GRADUS_KEY(train, steps, "--steps", "Optimizer steps of the whole run"),
      GRADUS_KEY(train, epochs, "--epochs",
                 "Epochs of a classifier, in place of the steps; 0 is none"),
      GRADUS_KEY(train, batch, "--batch",
                 "Sequences or examples of one optimizer step; memory plans never change it"),
      GRADUS_KEY(train, seed, "--seed", "Seed of weights, order and dropout"),
      GRADUS_KEY(train, accumulate, "--accumulate",
                 "Micro-batches that a step's batch is split into; 0: the memory plan decides"),
      GRADUS_KEY(train, precision, "--precision",
                 "fp32, bf16, fp16, O0, O1, O2, O3, bf16-weights or bf16-stochastic"),
      GRADUS_KEY(train, loss_scale, "--loss-scale",
                 "dynamic or a number; empty: as the precision has it"),
      GRADUS_KEY(train, threads, "--threads", "Compute threads; 0 is LibTorch's default"),
      GRADUS_KEY(train, device, "--device", "cpu, or an accelerator of this build such as cuda:0"),
      GRADUS_KEY(train, eval_every, "--eval-every", "Steps between evaluations; 0 is never"),
      GRADUS_KEY(train, eval_sequences, "--eval-sequences",
                 "Validation sequences of one evaluation"),
      GRADUS_KEY(train, save_every, "--save-every",
                 "Steps between saved training states; 0 is at the end only"),
      GRADUS_KEY(train, keep, "--keep", "Training states kept on disk"),
      GRADUS_KEY(train, out, "--out", "Run directory; empty: runs/<configuration>-<date>"),
      GRADUS_KEY(optimizer, kind, "--optimizer", "adamw or sgd"),
      GRADUS_KEY(optimizer, lr, "--lr", "Peak learning rate"),
      GRADUS_KEY(optimizer, warmup, "--warmup", "Steps of linear warm-up"),
      GRADUS_KEY(optimizer, min_lr_ratio, "--min-lr-ratio", "Last learning rate over the peak"),
      GRADUS_KEY(optimizer, weight_decay, "--weight-decay",
                 "Weight decay of matrices (norms and biases have none)"),
      GRADUS_KEY(optimizer, beta1, "--beta1", "AdamW's decay of the mean"),
      GRADUS_KEY(optimizer, beta2, "--beta2", "AdamW's decay of the mean square"),
      GRADUS_KEY(optimizer, eps, "--eps", "AdamW's epsilon"),
      GRADUS_KEY(optimizer, momentum, "--momentum", "SGD's momentum"),
      GRADUS_KEY(optimizer, clip_norm, "--clip-norm", "Largest gradient norm; 0 is no clipping"),
      GRADUS_KEY(optimizer, clip_value, "--clip-value",
                 "Largest absolute value of a gradient's element; 0 is no clipping"),
      GRADUS_KEY(memory, limit, "--memory",
                 "Hard limit of device memory, such as 600MiB; empty is none"),
      GRADUS_KEY(memory, plan, "--plan", "auto, none, or micro-batch=N,recompute=N"),
      GRADUS_KEY(memory, offload, "--offload",
                 "Where an automatic plan may move activations: none, host, or an existing folder"),
      GRADUS_KEY(memory, optimizer_state, "--optimizer-state",
                 "exact, or 8bit: an automatic plan may keep the optimizer's state in 8 bits"),
      GRADUS_KEY(memory, compress, "--compress",
                 "What an automatic plan may compress: none, lossless (equal gradients), or in a "
                 "lossy form: bf16, fp16, fp10, fp8, int8, int4, int2"),
      GRADUS_KEY(privacy, enabled, "--private", "Train with differential privacy"),
      GRADUS_KEY(privacy, epsilon, "--epsilon",
                 "Privacy budget; the noise follows from it. 0: --noise-multiplier is given"),
      GRADUS_KEY(privacy, delta, "--delta", "Delta of the budget; below 1 over the examples"),
      GRADUS_KEY(privacy, noise_multiplier, "--noise-multiplier",
                 "Noise over the largest gradient norm; 0: the least that keeps --epsilon"),
      GRADUS_KEY(privacy, max_grad_norm, "--max-grad-norm",
                 "Largest gradient norm of an example; takes the place of --clip-norm"),
      GRADUS_KEY(privacy, clipping, "--clipping", "flat, per-layer, automatic or adaptive"),
      GRADUS_KEY(privacy, accountant, "--accountant", "pld, rdp or prv"),
      GRADUS_KEY(privacy, secure, "--secure",
                 "Noise from the system's random source; false: repeatable, from --seed"),
      GRADUS_KEY(privacy, micro_batch, "--micro-batch",
                 "Examples of a classifier, or of private training, computed at once; changes "
                 "memory, not results"),
      GRADUS_KEY(sample, prompt, "--prompt", "Text that the sample continues"),
      GRADUS_KEY(sample, tokens, "--sample-tokens", "Tokens to generate; 0 is no sample"),
      GRADUS_KEY(sample, temperature, "--temperature",
                 "Softmax temperature; 0 takes the likeliest token"),
      GRADUS_KEY(sample, top_k, "--top-k", "Choose among the k likeliest tokens; 0 is all"),
  };
}
#undef GRADUS_KEY

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

[[noreturn]] void refuse_unknown(const std::string& where, const std::string& path) {
  const auto& keys = config_keys();
  const auto nearest =
      std::min_element(keys.begin(), keys.end(), [&](const ConfigKey& l, const ConfigKey& r) {
        return edit_distance(path, l.path()) < edit_distance(path, r.path());
      });
  throw UserError(base::join("[config] ", where, ": unknown key '", path, "'; did you mean '",
                             nearest->path(), "'?"));
}

std::string type_name(const ConfigKey& key) {
  static constexpr const char* kNames[] = {"a whole number", "a number", "true or false", "a text"};
  return kNames[key.access.index()];
}

void set_from_toml(TrainConfig& config, const ConfigKey& key, const toml::node& node,
                   const std::string& where) {
  const auto refuse = [&] {
    std::ostringstream value;
    value << toml::node_view<const toml::node>(node);
    throw UserError(base::join("[config] ", where, ": ", key.path(), " must be ", type_name(key),
                               "; got ", value.str()));
  };
  std::visit(
      [&](auto access) {
        using T = std::remove_reference_t<decltype(access(config))>;
        if constexpr (std::is_same_v<T, double>) {
          if (!node.is_number()) refuse();
          access(config) = *node.value<double>();
        } else {
          const auto value = node.value_exact<T>();
          if (!value) refuse();
          access(config) = *value;
        }
      },
      key.access);
}

template <typename T>
T parse_number(const ConfigKey& key, const std::string& text) {
  T value{};
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size()) {
    throw UserError(
        base::join("[config] ", key.flag, " must be ", type_name(key), "; got '", text, "'"));
  }
  return value;
}

std::string toml_string(const std::string& text) {
  std::ostringstream out;
  out << toml::value<std::string>(text);
  return out.str();
}

std::string number_text(double value) {
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  std::string result(text, end);
  // TOML tells floating from whole numbers by their look.
  if (result.find_first_of(".einf") == std::string::npos) result += ".0";
  return result;
}

void at_least(const char* key, std::int64_t value, std::int64_t least) {
  GRADUS_CHECK("config", value >= least, key, " must be at least ", least, "; got ", value);
}

void within(const char* key, double value, double low, double high) {
  GRADUS_CHECK("config", value >= low && value <= high, key, " must be between ", low, " and ",
               high, "; got ", value);
}

void validate_privacy(const TrainConfig& config) {
  const auto& privacy = config.privacy;
  within("privacy.epsilon", privacy.epsilon, 0.0, 1e6);
  within("privacy.noise_multiplier", privacy.noise_multiplier, 0.0, 1e4);
  check_one_of("privacy.clipping", privacy.clipping,
               {"flat", "per-layer", "automatic", "adaptive"});
  check_one_of("privacy.accountant", privacy.accountant, {"pld", "rdp", "prv"});
  at_least("privacy.micro_batch", privacy.micro_batch, 1);
  GRADUS_CHECK("config", privacy.delta > 0.0 && privacy.delta < 1.0,
               "privacy.delta must be in (0, 1); got ", privacy.delta);
  GRADUS_CHECK("config", privacy.max_grad_norm > 0.0 && privacy.max_grad_norm <= 1e30,
               "privacy.max_grad_norm must be above 0; got ", privacy.max_grad_norm);
  const bool budget = privacy.epsilon > 0.0, noise = privacy.noise_multiplier > 0.0;
  GRADUS_CHECK("config", privacy.enabled || (!budget && !noise),
               "privacy.epsilon and privacy.noise_multiplier are for private training; got ",
               budget ? privacy.epsilon : privacy.noise_multiplier,
               " without it. Give --private, or leave them 0");
  GRADUS_CHECK("config", !privacy.enabled || budget != noise,
               "private training needs either privacy.epsilon or privacy.noise_multiplier above 0, "
               "as one follows from the other; got ",
               budget ? "both" : "neither");
}

// What would make a private step depend on the data without noise, or lose its gradients.
void validate_private_language_model(const TrainConfig& config) {
  const std::string& precision = config.train.precision;
  const auto refuse = [&](const std::vector<std::string>& names, const char* reason) {
    const bool refused = std::ranges::find(names, precision) != names.end();
    GRADUS_CHECK("config", !refused,
                 "private training needs train.precision fp32, O0, bf16, bf16-weights or "
                 "bf16-stochastic; got ",
                 precision, ". ", reason);
  };
  refuse({"fp16", "O1", "O2"},
         "A loss scale skips the steps whose gradients overflow, and whether a step was skipped "
         "follows from the data: it would be released without noise");
  refuse({"O3"}, "In float16 without a loss scale small gradients of single windows become 0");
  GRADUS_CHECK("config", config.train.loss_scale.empty(),
               "train.loss_scale must be empty in private training; got '", config.train.loss_scale,
               "'. A step that is skipped because gradients overflow would be released without "
               "noise");
  GRADUS_CHECK("config", parse_lossy(config.memory.compress) == compress::Lossy::none,
               "memory.compress must be lossless or none in private training; got '",
               config.memory.compress,
               "'. Lossy forms share a scale among the values of a block: one example's rounding, "
               "and so its gradient, would depend on others");
}

// What only the language model's trainer can do.
void validate_classifier(const TrainConfig& config) {
  const auto refuse = [&](bool refused, const char* key, const std::string& value,
                          const char* cure) {
    GRADUS_CHECK("config", !refused, key, " is for data.task language-model; got '", value,
                 "' with data.task ", config.data.task, ". ", cure);
  };
  const auto& memory = config.memory;
  refuse(!memory.limit.empty(), "memory.limit", memory.limit,
         "Leave it empty; privacy.micro_batch bounds the memory of a classifier's step");
  refuse(memory.plan != "auto" && memory.plan != "none", "memory.plan", memory.plan,
         "Leave it auto");
  refuse(memory.offload != "none", "memory.offload", memory.offload, "Leave it none");
  refuse(memory.optimizer_state != "exact", "memory.optimizer_state", memory.optimizer_state,
         "Leave it exact, and name the 8-bit optimizer in optimizer.kind");
  refuse(parse_lossy(memory.compress) != compress::Lossy::none, "memory.compress", memory.compress,
         "Leave it lossless");
  refuse(config.train.accumulate > 0, "train.accumulate", std::to_string(config.train.accumulate),
         "Leave it 0 and set privacy.micro_batch");
  refuse(config.train.precision != "fp32" && config.train.precision != "bf16", "train.precision",
         config.train.precision, "Use fp32 or bf16");
  refuse(!config.train.loss_scale.empty(), "train.loss_scale", config.train.loss_scale,
         "Leave it empty");
  check_one_of("model.activation", config.model.activation, {"tanh", "relu"});
  within("model.dropout", config.model.dropout, 0.0, 0.999);
  at_least("model.layers", config.model.layers, 1);
  at_least("model.width", config.model.width, 1);
  at_least("model.context", config.model.context, 2);
  at_least("model.frozen_layers", config.model.frozen_layers, 0);
}

void validate_language_model(const TrainConfig& config) {
  const std::string model_defect =
      models::defect({.vocabulary = std::max<std::int64_t>(config.data.vocabulary, 1),
                      .context = config.model.context,
                      .layers = config.model.layers,
                      .heads = config.model.heads,
                      .width = config.model.width,
                      .dropout = config.model.dropout,
                      .bias = config.model.bias});
  GRADUS_CHECK("config", model_defect.empty(), "model: ", model_defect);
  GRADUS_CHECK("config", config.data.limit == 0, "data.limit is for classifiers; got ",
               config.data.limit, " with data.task language-model");
  GRADUS_CHECK("config", config.data.directory.empty(), "data.directory is for classifiers; got '",
               config.data.directory, "' with data.task language-model. Set data.corpus");
  GRADUS_CHECK("config", config.train.epochs == 0.0, "train.epochs is for classifiers; got ",
               config.train.epochs, " with data.task language-model. Set train.steps");
  parse_plan_request(config.memory.plan, config.train.batch, config.model.layers);
  if (config.privacy.enabled) validate_private_language_model(config);
}

}  // namespace

const std::vector<std::string>& task_names() {
  static const std::vector<std::string> names{"language-model", "fashion-mnist", "adult",
                                              "help-text", "bert-help-text"};
  return names;
}

bool is_classifier(const TrainConfig& config) { return config.data.task != "language-model"; }

compress::Lossy parse_lossy(const std::string& text) {
  using compress::Lossy;
  static constexpr std::pair<const char*, Lossy> kForms[] = {
      {"none", Lossy::none}, {"lossless", Lossy::none}, {"bf16", Lossy::bf16},
      {"fp16", Lossy::fp16}, {"fp10", Lossy::fp10},     {"fp8", Lossy::fp8},
      {"int8", Lossy::int8}, {"int4", Lossy::int4},     {"int2", Lossy::int2}};
  for (const auto& [name, lossy] : kForms)
    if (text == name) return lossy;
  throw UserError(base::join(
      "[config] memory.compress must be none, lossless, bf16, fp16, fp10, fp8, int8, int4 or int2; "
      "got '",
      text, "'"));
}

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

TrainConfig load_config(const std::string& path) {
  GRADUS_CHECK("config", std::filesystem::is_regular_file(path),
               "a configuration file is required; '", path, "' is not one");
  toml::table root;
  try {
    root = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    throw UserError(
        base::join("[config] ", path, ":", error.source().begin.line, ": ", error.description()));
  }
  TrainConfig config;
  for (const auto& [table_name, table_node] : root) {
    const std::string table(table_name.str());
    const auto where = [&](const toml::node& node) {
      return base::join(path, ":", node.source().begin.line);
    };
    if (!table_node.is_table()) refuse_unknown(where(table_node), table);
    for (const auto& [name, node] : *table_node.as_table()) {
      const std::string key_path = table + "." + std::string(name.str());
      const auto& keys = config_keys();
      const auto key = std::find_if(keys.begin(), keys.end(),
                                    [&](const ConfigKey& k) { return k.path() == key_path; });
      if (key == keys.end()) refuse_unknown(where(node), key_path);
      set_from_toml(config, *key, node, where(node));
    }
  }
  return config;
}

void set_key(TrainConfig& config, const ConfigKey& key, const std::string& text) {
  std::visit(
      [&](auto access) {
        using T = std::remove_reference_t<decltype(access(config))>;
        if constexpr (std::is_same_v<T, std::string>) {
          access(config) = text;
        } else if constexpr (std::is_same_v<T, bool>) {
          GRADUS_CHECK("config", text == "true" || text == "false", key.flag,
                       " must be true or false; got '", text, "'");
          access(config) = text == "true";
        } else {
          access(config) = parse_number<T>(key, text);
        }
      },
      key.access);
}

std::string key_text(const TrainConfig& config, const ConfigKey& key) {
  TrainConfig copy = config;
  return std::visit(
      [&](auto access) -> std::string {
        using T = std::remove_reference_t<decltype(access(copy))>;
        const T& value = access(copy);
        if constexpr (std::is_same_v<T, std::string>) return value;
        if constexpr (std::is_same_v<T, bool>) return value ? "true" : "false";
        if constexpr (std::is_same_v<T, double>) return number_text(value);
        if constexpr (std::is_same_v<T, std::int64_t>) return std::to_string(value);
      },
      key.access);
}

std::string config_toml(const TrainConfig& config) {
  std::string text, table;
  for (const ConfigKey& key : config_keys()) {
    if (key.table != table) {
      text += (table.empty() ? "[" : "\n[") + key.table + "]\n";
      table = key.table;
    }
    const std::string value = key_text(config, key);
    const bool is_text = std::holds_alternative<ConfigKey::Access<std::string>>(key.access);
    text += key.name + " = " + (is_text ? toml_string(value) : value) + "\n";
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> describe_config(const TrainConfig& config) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const ConfigKey& key : config_keys()) rows.emplace_back(key.path(), key_text(config, key));
  return rows;
}

void validate(const TrainConfig& config) {
  check_one_of("data.task", config.data.task, task_names());
  at_least("data.limit", config.data.limit, 0);
  within("train.epochs", config.train.epochs, 0.0, 1e9);
  check_one_of("data.tokenizer", config.data.tokenizer, {"sentencepiece", "bytes"});
  within("data.validation_ratio", config.data.validation_ratio, 0.0, 0.5);
  at_least("train.steps", config.train.steps, 1);
  at_least("train.batch", config.train.batch, 1);
  at_least("train.seed", config.train.seed, 0);
  GRADUS_CHECK("config",
               config.train.accumulate >= 0 && config.train.accumulate <= config.train.batch,
               "train.accumulate must be between 0 and train.batch (", config.train.batch,
               "); got ", config.train.accumulate);
  GRADUS_CHECK("config", config.train.accumulate == 0 || !config.memory.plan.starts_with("micro"),
               "train.accumulate and memory.plan must not both say how many micro-batches a step "
               "has; got ",
               config.train.accumulate, " and '", config.memory.plan, "'");
  precision_options(config);
  at_least("train.threads", config.train.threads, 0);
  at_least("train.eval_every", config.train.eval_every, 0);
  at_least("train.eval_sequences", config.train.eval_sequences, 1);
  at_least("train.save_every", config.train.save_every, 0);
  at_least("train.keep", config.train.keep, 1);
  check_one_of("optimizer.kind", config.optimizer.kind, optimizer_kinds());
  within("optimizer.lr", config.optimizer.lr, 0.0, 1e6);
  at_least("optimizer.warmup", config.optimizer.warmup, 0);
  // With epochs the number of steps follows from the data.
  GRADUS_CHECK("config", config.train.epochs > 0.0 || config.optimizer.warmup < config.train.steps,
               "optimizer.warmup must be below train.steps (", config.train.steps, "); got ",
               config.optimizer.warmup);
  const auto decay = [](const char* key, double value) {
    GRADUS_CHECK("config", value >= 0.0 && value < 1.0, key, " must be in [0, 1); got ", value);
  };
  decay("optimizer.beta1", config.optimizer.beta1);
  decay("optimizer.beta2", config.optimizer.beta2);
  within("optimizer.eps", config.optimizer.eps, 0.0, 1.0);
  within("optimizer.weight_decay", config.optimizer.weight_decay, 0.0, 1e6);
  within("optimizer.momentum", config.optimizer.momentum, 0.0, 1e6);
  within("optimizer.min_lr_ratio", config.optimizer.min_lr_ratio, 0.0, 1.0);
  within("optimizer.clip_norm", config.optimizer.clip_norm, 0.0, 1e30);
  within("optimizer.clip_value", config.optimizer.clip_value, 0.0, 1e30);
  if (!config.memory.limit.empty()) {
    GRADUS_CHECK("config", base::parse_bytes(config.memory.limit) > 0,
                 "memory.limit must be above 0; got '", config.memory.limit, "'");
  }
  GRADUS_CHECK("config", !config.memory.offload.empty(),
               "memory.offload must be none, host or a folder; got ''");
  GRADUS_CHECK("config", config.memory.offload == "none" || config.memory.plan == "auto",
               "memory.offload is for automatic plans; got '", config.memory.offload,
               "' with memory.plan ", config.memory.plan);
  check_one_of("memory.optimizer_state", config.memory.optimizer_state, {"exact", "8bit"});
  GRADUS_CHECK(
      "config",
      config.memory.optimizer_state == "exact" ||
          (config.memory.plan == "auto" && eight_bit_kind(config.optimizer.kind)),
      "memory.optimizer_state = 8bit is for automatic plans and for optimizers that have an "
      "8-bit form (adam, adamw, sgd); got memory.plan ",
      config.memory.plan, " and optimizer.kind ", config.optimizer.kind);
  GRADUS_CHECK(
      "config",
      parse_lossy(config.memory.compress) == compress::Lossy::none || config.memory.plan == "auto",
      "lossy compression is for automatic plans; got memory.compress ", config.memory.compress,
      " with memory.plan ", config.memory.plan);
  is_classifier(config) ? validate_classifier(config) : validate_language_model(config);
  validate_privacy(config);
  at_least("sample.tokens", config.sample.tokens, 0);
  GRADUS_CHECK("config",
               config.sample.temperature == 0.0 ||
                   (config.sample.temperature >= 1e-3 && config.sample.temperature <= 1e6),
               "sample.temperature must be 0 (the likeliest token) or between 0.001 and 1e6; got ",
               config.sample.temperature);
  at_least("sample.top_k", config.sample.top_k, 0);
  GRADUS_CHECK("config", config.sample.tokens == 0 || !config.sample.prompt.empty(),
               "sample.prompt must not be empty; give a text or set sample.tokens to 0");
}

}  // namespace gradus::train
