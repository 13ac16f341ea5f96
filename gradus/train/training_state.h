#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/base/rng.h>
#include <gradus/data/batches.h>
#include <gradus/optim/optimizer.h>
#include <gradus/train/plan.h>

namespace gradus::train {

/// What a run is at a step boundary, besides tensors.
struct RunState {
  std::int64_t step = 0;  ///< Optimizer steps done.
  data::DataPosition position;
  double elapsed_s = 0.0;
  double first_loss = 0.0;
  double last_loss = 0.0;
  std::int64_t peak_bytes = 0;  ///< Highest of the run.
  Plan plan;
  std::string plan_reason;
  std::int64_t plain_peak_bytes = 0;
  std::string optimizer;    ///< Kind: of the configuration, or what an automatic plan took instead.
  std::string plan_inputs;  ///< What the plan was made for; another plan is made if it changes.
  std::uint64_t corpus_hash = 0;     ///< Of the text trained on.
  std::uint64_t tokenizer_hash = 0;  ///< Of the tokenizer it was read with.
  double noise_multiplier = 0.0;     ///< Of private training; 0 otherwise.
  std::string privacy_inputs;        ///< What the noise was chosen for; must never change.
};

/// A training state on disk: a directory `states/step-000000120` of the run directory with
/// model.safetensors, optimizer.safetensors, rng.safetensors, precision.safetensors (loss scales),
/// privacy.safetensors (what was released, sampler, noise) and state.json. Directories appear whole
/// or not at all; state.json holds the checksums of the others. Weights are float32 whatever the
/// run computes in.
struct SavedState {
  std::string path;
  RunState run;
};

/// The tensors of a training state.
struct StateTensors {
  std::vector<std::pair<std::string, at::Tensor>> model{};
  std::vector<std::pair<std::string, at::Tensor>> precision{};  ///< As Amp::state gives them.
  /// As PrivateTraining::state gives them, without the optimizer's state, which has its own file.
  std::vector<std::pair<std::string, at::Tensor>> privacy{};
};

/// Writes one and then removes older ones but for the newest @p keep, the one just written among
/// them.
/// @throws UserError if writing fails (full disk): earlier states still stand.
SavedState save_training_state(const std::string& run_directory, std::int64_t keep,
                               const RunState& run, const StateTensors& tensors,
                               const optim::Optimizer& optimizer, const base::RngState& rng);

/// What find_training_state found.
struct FoundState {
  std::optional<SavedState> newest;  ///< The newest good one.
  struct Damaged {
    std::string path;
    std::string reason;
  };
  std::vector<Damaged> damaged;  ///< Newer ones, passed over.
};

/// Looks for the newest state whose files are whole; removes what killed writers left.
FoundState find_training_state(const std::string& run_directory);

/// Renames damaged states to `damaged-step-...`, so that a run can go on beside them.
void set_aside(const std::vector<FoundState::Damaged>& damaged);

/// Copies a state's weights into @p model, in place. @throws UserError on any difference of names
/// or shapes.
void load_model(const SavedState& state,
                const std::vector<std::pair<std::string, at::Tensor>>& model);

/// What was given as StateTensors::precision.
std::vector<std::pair<std::string, at::Tensor>> load_precision(const SavedState& state);

/// What was given as StateTensors::privacy.
std::vector<std::pair<std::string, at::Tensor>> load_privacy(const SavedState& state);

/// The entries of the optimizer's file.
std::vector<optim::NamedState> load_optimizer_entries(const SavedState& state);

/// Replaces the state of @p optimizer.
void load_optimizer(const SavedState& state, optim::Optimizer& optimizer);

/// Replaces the states in @p rng by the saved ones; restore() puts them into the generators.
void load_rng(const SavedState& state, base::RngState& rng);

}  // namespace gradus::train
