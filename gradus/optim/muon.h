#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/adamw.h>
#include <gradus/optim/optimizer.h>

namespace gradus::optim {

/// How Muon's learning rate depends on the shape [A, B] of a matrix.
enum class MuonRate : std::uint8_t {
  original,         ///< sqrt(max(1, A / B)): Jordan 2024.
  match_rms_adamw,  ///< 0.2 * sqrt(max(A, B)): updates as large as AdamW's (Liu et al. 2025).
};

struct MuonOptions {
  double lr = 1e-3;           ///< Learning rate of the single group. Finite, >= 0.
  double weight_decay = 0.1;  ///< Decoupled: each step multiplies by 1 - lr * weight_decay.
  double momentum = 0.95;     ///< Share of the buffer that is kept. In [0, 1].
  bool nesterov = true;       ///< Orthogonalise the gradient and the buffer mixed.
  std::array<double, 3> coefficients = {3.4445, -4.7750, 2.0315};  ///< Of the quintic iteration.
  double eps = 1e-7;            ///< Least norm that the update is divided by. Finite, > 0.
  std::int64_t iterations = 5;  ///< Newton-Schulz iterations. In [1, 99].
  MuonRate rate = MuonRate::original;
  /// Of the iteration: bfloat16 as in torch.optim.Muon, float32 or float64.
  at::ScalarType iteration_dtype = at::kBFloat16;
};

/// Momentum whose every update is brought near the closest orthogonal matrix by Newton-Schulz
/// iterations (Jordan 2024), as torch.optim.Muon. For the matrices of hidden layers: parameters of
/// other than two dimensions are refused by name, and embeddings and output layers are better left
/// to AdamW. @see MuonWithAdamW
///
/// State of a parameter: momentum_buffer (the parameter's shape; float32 for 16-bit parameters,
/// which are updated in float32). Option of a group: momentum.
class Muon final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range and on a parameter that is no matrix.
  explicit Muon(std::vector<at::Tensor> parameters, const MuonOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Muon(std::vector<ParameterGroup> groups, const MuonOptions& options);

  const MuonOptions& options() const { return options_; }

 private:
  friend class MuonWithAdamW;

  static void check_ranges(const std::string& component, const MuonOptions& options);
  static void check_matrices(const std::string& component, const ParameterGroup& group);
  static MuonOptions with_group(const MuonOptions& options, const ParameterGroup& group);
  static std::vector<StateSpec> specs_of(const at::Tensor& parameter);
  static void apply(const MuonOptions& options, const ParameterGroup& group,
                    std::span<Slot* const> slots);
  static std::vector<NamedOption> named_options(const MuonOptions& options,
                                                const ParameterGroup& group);

  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  MuonOptions options_;
};

struct MuonWithAdamWOptions {
  MuonOptions muon = {};    ///< For groups with the option use_muon = 1.
  AdamWOptions adamw = {};  ///< For groups with use_muon = 0.
};

/// Muon for some groups and AdamW for the others, as one optimizer.
///
/// Each group states {"use_muon", 1} or {"use_muon", 0} in its options (muon_groups() makes such
/// groups) and brings its own lr and weight_decay. Its other options are those of its rule.
class MuonWithAdamW final : public Optimizer {
 public:
  /// @throws UserError on a group without use_muon, and as Muon and AdamW do.
  explicit MuonWithAdamW(std::vector<ParameterGroup> groups,
                         const MuonWithAdamWOptions& options = {});

  const MuonWithAdamWOptions& options() const { return options_; }

 private:
  static bool use_muon(const ParameterGroup& group);
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  std::vector<StateSpec> slot_state_specs(const Slot& slot) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  bool fixes_state(const std::string& option) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  MuonWithAdamWOptions options_;
};

struct MuonGroupsOptions {
  MuonWithAdamWOptions rates = {};  ///< The groups' lr and weight_decay.
  /// Matrices with one of these in their name go to AdamW: embeddings and output layers.
  std::vector<std::string> adamw_names = {"embed", "embd", "wte", "wpe", "lm_head", "head"};
};

/// Two groups for MuonWithAdamW: the matrices of @p named_parameters (name and tensor), and the
/// rest. A group that would be empty is left out.
std::vector<ParameterGroup> muon_groups(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters,
    const MuonGroupsOptions& options = {});

}  // namespace gradus::optim
