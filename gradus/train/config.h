#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace gradus::compress {
enum class Lossy : std::uint8_t;
}

namespace gradus::train {

/// Everything a run is made of: one tree, from which the TOML keys, the command-line flags and the
/// report are made (see config_keys).
struct TrainConfig {
  struct Model {
    std::int64_t layers = 6;
    std::int64_t heads = 6;
    std::int64_t width = 384;
    std::int64_t context = 128;  ///< Tokens of a sequence.
    double dropout = 0.1;
    bool bias = true;
    std::string activation = "tanh";  ///< Of image and table classifiers: "tanh" or "relu".
    std::int64_t frozen_layers = 5;   ///< Lower layers of a BERT encoder that are not trained.
  } model;
  struct Data {
    std::string task = "language-model";  ///< One of task_names().
    /// Of a classifier's files; empty: where their package puts them. MNIST's file names for
    /// fashion-mnist, adult.data and adult.test for adult, LANGUAGE/text for help texts.
    std::string directory{};
    std::int64_t limit = 0;  ///< Examples that a classifier trains on, spread over the set; 0: all.
    std::string corpus = "bible-kjv";  ///< As data::load_corpus takes it.
    std::string tokenizer = "sentencepiece";
    std::int64_t vocabulary = 2000;
    std::string cache = "build/data";
    double validation_ratio = 0.05;
  } data;
  struct Train {
    std::int64_t steps = 200;
    double epochs = 0.0;  ///< Of a classifier, in place of steps where it is above 0.
    /// Sequences of one optimizer step: the effective batch, which no plan changes. Of private
    /// training: the expected examples of a Poisson batch.
    std::int64_t batch = 32;
    std::int64_t seed = 1;
    std::int64_t accumulate = 0;     ///< Micro-batches of a step; 0: the plan decides.
    std::string precision = "fp32";  ///< As precision_options() takes it.
    std::string loss_scale{};        ///< "dynamic" or a number; empty: as the precision has it.
    std::int64_t threads = 0;        ///< 0: LibTorch's default.
    std::string device = "cpu";
    std::int64_t eval_every = 50;
    std::int64_t eval_sequences = 64;
    std::int64_t save_every = 50;
    std::int64_t keep = 2;  ///< Training states kept on disk.
    std::string out{};      ///< Run directory; empty: runs/<name of the configuration>-<date>.
  } train;
  struct Optimizer {
    std::string kind = "adamw";  ///< One of optimizer_kinds().
    double lr = 1e-3;
    std::int64_t warmup = 20;
    double min_lr_ratio = 0.1;
    double weight_decay = 0.1;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double momentum = 0.9;
    double clip_norm = 1.0;   ///< 0: no clipping.
    double clip_value = 0.0;  ///< 0: no clipping. After clip_norm.
  } optimizer;
  struct Memory {
    std::string limit{};                ///< "600MiB"; empty: none.
    std::string plan = "auto";          ///< "auto", "none", or "micro-batch=4,recompute=3".
    std::string offload = "none";       ///< "none", "host", or a folder on a disk.
    std::string compress = "lossless";  ///< "none", "lossless", or a lossy form: see parse_lossy().
    /// "exact": as optimizer.kind says. "8bit": an automatic plan may take the 8-bit form of that
    /// optimizer in its place.
    std::string optimizer_state = "exact";
  } memory;
  /// Differential privacy (gradus/privacy/training).
  struct Privacy {
    bool enabled = false;
    double epsilon = 0.0;  ///< Budget; 0: noise_multiplier says how much noise there is.
    double delta = 1e-5;
    double noise_multiplier = 0.0;   ///< 0: the least that keeps epsilon to the end of the run.
    double max_grad_norm = 1.0;      ///< Largest norm of an example's gradient.
    std::string clipping = "flat";   ///< "flat", "per-layer", "automatic" or "adaptive".
    std::string accountant = "pld";  ///< "pld", "rdp" or "prv".
    /// False: sampling and noise from train.seed, which makes runs repeatable, and private from
    /// nobody who knows the seed.
    bool secure = true;
    std::int64_t micro_batch = 256;  ///< Examples computed at once; changes memory, not results.
  } privacy;
  struct Sample {
    std::string prompt = "In the beginning";
    std::int64_t tokens = 80;
    double temperature = 0.8;
    std::int64_t top_k = 40;  ///< 0: all.
  } sample;
};

/// What data.task may be: "language-model" (the only one that memory limits and plans are for), and
/// the classifiers "fashion-mnist", "adult", "help-text" and "bert-help-text".
const std::vector<std::string>& task_names();

/// True for every task but the language model.
bool is_classifier(const TrainConfig& config);

/// The lossy form that memory.compress allows: "bf16", "fp16", "fp10", "fp8", "int8", "int4",
/// "int2"; none for "none" and "lossless". @throws UserError on anything else.
compress::Lossy parse_lossy(const std::string& text);

/// One key of the configuration.
struct ConfigKey {
  template <typename T>
  using Access = T& (*)(TrainConfig&);

  std::string table;  ///< TOML table: "model".
  std::string name;   ///< Key in it: "layers".
  std::string flag;   ///< "--layers".
  std::string help;
  std::variant<Access<std::int64_t>, Access<double>, Access<bool>, Access<std::string>> access;

  std::string path() const { return table + "." + name; }
};

/// All keys, in the order of TrainConfig. Every key is a TOML key and a flag.
const std::vector<ConfigKey>& config_keys();

/// Reads a TOML file over the defaults.
/// @throws UserError with file and line: missing file, bad TOML, unknown key (with the nearest
/// known one),
///   wrong type.
TrainConfig load_config(const std::string& path);

/// Sets one key from text, as a flag does. @throws UserError on a wrong type.
void set_key(TrainConfig& config, const ConfigKey& key, const std::string& text);

/// The value of one key as text.
std::string key_text(const TrainConfig& config, const ConfigKey& key);

/// The configuration as TOML that load_config reads back to the same values.
std::string config_toml(const TrainConfig& config);

/// Every key and its value: ("model.layers", "6").
std::vector<std::pair<std::string, std::string>> describe_config(const TrainConfig& config);

/// Refuses what cannot be trained. @throws UserError that names the key, the requirement and the
/// value.
void validate(const TrainConfig& config);

}  // namespace gradus::train
