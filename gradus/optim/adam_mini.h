#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

/// Which elements of a parameter share one second moment.
enum class AdamMiniBlocks : std::uint8_t {
  element,     ///< None: every element has its own, as in Adam.
  row,         ///< Each index of the first dimension: an output neuron, a token of an embedding.
  query_head,  ///< The rows of each of `heads` heads.
  key_head,    ///< The rows of each of `key_heads` heads.
  query_key_value,  ///< Queries by head, then keys by head, then values by row, in one matrix.
  key_value,        ///< Keys by head, then values by row.
  tensor,           ///< The whole parameter.
};

/// Parameters that have one of @p parts between the dots of their names, such as "qkv" in
/// "blocks.0.attn.qkv.weight".
struct AdamMiniRule {
  std::vector<std::string> parts;
  AdamMiniBlocks blocks = AdamMiniBlocks::row;
};

/// The paper's partition for transformers (Zhang et al. 2024, Algorithm 3) under the names that
/// models use: queries and keys by head. Its other rules, embeddings and output by token, and
/// values, projections and MLP by output neuron, are what parameters without a rule get.
std::vector<AdamMiniRule> adam_mini_transformer_rules();

struct AdamMiniOptions {
  double lr = 1e-3;            ///< Learning rate of the single group. Finite, >= 0.
  double beta1 = 0.9;          ///< Decay of the mean. In [0, 1).
  double beta2 = 0.999;        ///< Decay of the mean square. In [0, 1).
  double eps = 1e-8;           ///< Added to the root. Finite, >= 0.
  double weight_decay = 1e-2;  ///< Decoupled: each step multiplies by 1 - lr * weight_decay.
  std::int64_t heads = 0;      ///< Attention heads; needed where a rule is by head.
  std::int64_t key_heads = 0;  ///< Heads of keys and values (grouped queries); 0: as `heads`.
  /// For parameters of two or more dimensions; the first that fits counts. Without one: by row.
  /// Parameters of fewer dimensions are one block.
  std::vector<AdamMiniRule> rules = adam_mini_transformer_rules();
  /// By parameter name, before all rules: rows of the first dimension in each block, in order.
  std::map<std::string, std::vector<std::int64_t>> block_rows = {};
};

/// How one parameter is divided.
struct AdamMiniPartition {
  std::string name;
  std::vector<std::int64_t> block_rows;  ///< Rows in each block; empty: every element by itself.
};

/// Adam with one second moment for each block of a parameter (Zhang et al. 2024, Algorithms 1 and
/// 3): the mean over the block of the squared gradients. About half of Adam's state.
///
/// The partition is decided by the parameters' names (give groups names, or only rows and tensors
/// are told apart) and can be read: partition(). State of a parameter: step (float32 scalar),
/// exp_avg, exp_avg_sq (one value a block). 16-bit parameters are updated in float32 and have
/// float32 state. Options of a group: beta1, beta2, eps.
class AdamMini final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range, and on a parameter that a rule cannot divide (it is named).
  explicit AdamMini(std::vector<at::Tensor> parameters, const AdamMiniOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  AdamMini(std::vector<ParameterGroup> groups, const AdamMiniOptions& options);

  const AdamMiniOptions& options() const { return options_; }
  /// In the order of parameters.
  std::vector<AdamMiniPartition> partition() const;

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  std::vector<StateSpec> slot_state_specs(const Slot& slot) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;
  AdamMiniOptions with_group(const ParameterGroup& group) const;
  std::vector<std::int64_t> blocks_of(const std::string& name, const at::Tensor& parameter) const;

  AdamMiniOptions options_;
};

}  // namespace gradus::optim
