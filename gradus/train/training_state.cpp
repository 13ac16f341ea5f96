#include <gradus/train/training_state.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include <nlohmann/json.hpp>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/state/atomic_file.h>
#include <gradus/state/content_hash.h>
#include <gradus/state/safetensors.h>

namespace gradus::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 1;
constexpr const char* kModel = "model.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kRng = "rng.safetensors";
constexpr const char* kPrecision = "precision.safetensors";
constexpr const char* kPrivacy = "privacy.safetensors";
constexpr const char* kFiles[] = {kModel, kOptimizer, kRng, kPrecision, kPrivacy};

// States of before there was such a file do without.
bool is_optional(std::string_view file) { return file == kPrecision || file == kPrivacy; }

fs::path states_directory(const std::string& run_directory) {
  return fs::path(run_directory) / "states";
}

std::string step_name(std::int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%09lld", static_cast<long long>(step));
  return name;
}

json to_json(const RunState& run) {
  return {{"step", run.step},
          {"epoch", run.position.epoch},
          {"index", run.position.index},
          {"elapsed_s", run.elapsed_s},
          {"first_loss", run.first_loss},
          {"last_loss", run.last_loss},
          {"peak_bytes", run.peak_bytes},
          {"micro_batches", run.plan.micro_batches},
          {"recomputed", run.plan.recomputed},
          {"budget", run.plan.budget},
          {"optimizer", run.optimizer},
          {"plan_inputs", run.plan_inputs},
          {"corpus_hash", run.corpus_hash},
          {"tokenizer_hash", run.tokenizer_hash},
          {"plan_reason", run.plan_reason},
          {"plain_peak_bytes", run.plain_peak_bytes},
          {"noise_multiplier", run.noise_multiplier},
          {"privacy_inputs", run.privacy_inputs}};
}

RunState from_json(const json& j) {
  RunState run;
  run.step = j.at("step").get<std::int64_t>();
  run.position.epoch = j.at("epoch").get<std::int64_t>();
  run.position.index = j.at("index").get<std::int64_t>();
  run.elapsed_s = j.at("elapsed_s").get<double>();
  run.first_loss = j.at("first_loss").get<double>();
  run.last_loss = j.at("last_loss").get<double>();
  run.peak_bytes = j.at("peak_bytes").get<std::int64_t>();
  run.plan.micro_batches = j.at("micro_batches").get<std::int64_t>();
  run.plan.recomputed = j.at("recomputed").get<std::int64_t>();
  run.plan.budget = j.value("budget", false);  // older states have none
  run.optimizer = j.value("optimizer", "");
  run.plan_inputs = j.at("plan_inputs").get<std::string>();
  run.corpus_hash = j.at("corpus_hash").get<std::uint64_t>();
  run.tokenizer_hash = j.at("tokenizer_hash").get<std::uint64_t>();
  run.plan_reason = j.at("plan_reason").get<std::string>();
  run.plain_peak_bytes = j.at("plain_peak_bytes").get<std::int64_t>();
  run.noise_multiplier = j.value("noise_multiplier", 0.0);
  run.privacy_inputs = j.value("privacy_inputs", "");
  return run;
}

std::string checksum(const fs::path& file) {
  return state::hash_text(state::content_hash(state::read_file(file)));
}

// Of the rest of state.json, which holds it.
std::string checksum_of(const json& content) {
  return state::hash_text(state::content_hash(content.dump()));
}

// Steps of the states in a directory, newest first.
std::vector<fs::path> saved_directories(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (entry.is_directory() && entry.path().filename().string().starts_with("step-"))
      found.push_back(entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

SavedState read_state(const fs::path& directory) {
  json j = json::parse(state::read_file(directory / "state.json"));
  const std::string self = j.at("self").get<std::string>();
  j.erase("self");
  GRADUS_CHECK("state", self == checksum_of(j), (directory / "state.json").string(),
               " is damaged: its checksum must be ", self, "; got ", checksum_of(j));
  GRADUS_CHECK("state", j.at("format").get<int>() == kFormat,
               "this build reads training states of format ", kFormat, "; got ",
               j.at("format").get<int>());
  for (const char* file : kFiles) {
    if (is_optional(file) && !j.at("checksums").contains(file)) continue;
    const std::string expected = j.at("checksums").at(file).get<std::string>();
    const std::string got = checksum(directory / file);
    GRADUS_CHECK("state", got == expected, (directory / file).string(),
                 " is damaged: its checksum must be ", expected, "; got ", got);
  }
  return {directory.string(), from_json(j.at("run"))};
}

std::vector<std::pair<std::string, at::Tensor>> load_optional(const SavedState& saved,
                                                              const char* name) {
  const base::ArenaScope host(base::Arena::host);
  const fs::path file = fs::path(saved.path) / name;
  if (!fs::exists(file)) return {};
  const auto content = state::load_safetensors(file.string());
  return {content.tensors.begin(), content.tensors.end()};
}

}  // namespace

SavedState save_training_state(const std::string& run_directory, std::int64_t keep,
                               const RunState& run, const StateTensors& tensors,
                               const optim::Optimizer& optimizer, const base::RngState& rng) {
  // Copies made for writing are not the device's.
  const base::ArenaScope host(base::Arena::host);
  const fs::path directory = states_directory(run_directory);
  fs::create_directories(directory);
  const fs::path target = directory / step_name(run.step);
  state::AtomicDirectory output(target.string());
  state::save_safetensors(output.file(kModel), tensors.model,
                          {{"format", "pt"}, {"step", std::to_string(run.step)}});
  std::vector<state::NamedTensor> optimizer_tensors;
  for (const auto& entry : optimizer.state())
    optimizer_tensors.emplace_back(entry.name, entry.tensor);
  state::save_safetensors(output.file(kOptimizer), optimizer_tensors);
  std::vector<state::NamedTensor> rng_tensors;
  for (const at::Tensor& tensor : rng.tensors())
    rng_tensors.emplace_back(std::to_string(rng_tensors.size()), tensor);
  state::save_safetensors(output.file(kRng), rng_tensors);
  state::save_safetensors(output.file(kPrecision), tensors.precision);
  state::save_safetensors(output.file(kPrivacy), tensors.privacy);
  json checksums;
  for (const char* file : kFiles) checksums[file] = checksum(output.file(file));
  json content{{"format", kFormat}, {"run", to_json(run)}, {"checksums", std::move(checksums)}};
  content["self"] = checksum_of(content);
  state::write_file_atomically(output.file("state.json"), content.dump(2) + "\n");
  output.commit();

  // Newest first; the one just written counts as the newest, whatever else lies there.
  std::int64_t kept = 1;
  for (const fs::path& old : saved_directories(directory)) {
    if (old == target || kept++ < keep) continue;
    std::error_code ignored;  // an old state that stays costs disk space only
    fs::remove_all(old, ignored);
  }
  return {target.string(), run};
}

FoundState find_training_state(const std::string& run_directory) {
  FoundState found;
  const fs::path directory = states_directory(run_directory);
  state::remove_stale_temporaries(directory.string());
  for (const fs::path& candidate : saved_directories(directory)) {
    try {
      found.newest = read_state(candidate);
      return found;
    } catch (const std::exception& error) {
      found.damaged.push_back({candidate.string(), error.what()});
    }
  }
  return found;
}

void set_aside(const std::vector<FoundState::Damaged>& damaged) {
  for (const auto& [path, reason] : damaged) {
    const fs::path from(path);
    fs::path to = from.parent_path() / ("damaged-" + from.filename().string());
    for (int n = 2; fs::exists(to); ++n) {
      to = from.parent_path() / ("damaged-" + from.filename().string() + "-" + std::to_string(n));
    }
    fs::rename(from, to);
  }
}

void load_model(const SavedState& saved,
                const std::vector<std::pair<std::string, at::Tensor>>& model) {
  const base::ArenaScope host(base::Arena::host);
  state::load_into((fs::path(saved.path) / kModel).string(), model);
}

std::vector<std::pair<std::string, at::Tensor>> load_precision(const SavedState& saved) {
  return load_optional(saved, kPrecision);
}

std::vector<std::pair<std::string, at::Tensor>> load_privacy(const SavedState& saved) {
  return load_optional(saved, kPrivacy);
}

std::vector<optim::NamedState> load_optimizer_entries(const SavedState& saved) {
  const base::ArenaScope host(base::Arena::host);
  std::vector<optim::NamedState> entries;
  for (auto& [name, tensor] :
       state::load_safetensors((fs::path(saved.path) / kOptimizer).string()).tensors) {
    entries.push_back({name, std::move(tensor)});
  }
  return entries;
}

void load_optimizer(const SavedState& saved, optim::Optimizer& optimizer) {
  const std::vector<optim::NamedState> entries = load_optimizer_entries(saved);
  const base::MemoryCategoryScope category(base::MemoryCategory::optimizer_state);
  optimizer.load_state(entries);
}

void load_rng(const SavedState& saved, base::RngState& rng) {
  const auto content = state::load_safetensors((fs::path(saved.path) / kRng).string());
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < content.tensors.size(); ++i) {
    const auto entry = content.tensors.find(std::to_string(i));
    GRADUS_CHECK("state", entry != content.tensors.end(), saved.path, " must hold random state ", i,
                 "; it is missing");
    tensors.push_back(entry->second);
  }
  rng.load(tensors);
}

}  // namespace gradus::train
