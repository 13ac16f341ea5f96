#include <gradus/optim/adam_mini.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <utility>

#include <ATen/ops/index_add.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/working_set.h>

namespace gradus::optim {
namespace {

constexpr const char* kComponent = "adam_mini";

enum State { kStep, kMean, kSquare };

bool has_part(std::string_view name, std::string_view part) {
  while (true) {
    const auto dot = name.find('.');
    if (name.substr(0, dot) == part) return true;
    if (dot == std::string_view::npos) return false;
    name.remove_prefix(dot + 1);
  }
}

// The heads of a part of the matrix: `heads` blocks of equal size.
void append_heads(std::vector<std::int64_t>& blocks, std::int64_t heads, std::int64_t rows) {
  blocks.insert(blocks.end(), static_cast<std::size_t>(heads), rows);
}

std::vector<std::int64_t> blocks_by_rule(const std::string& name, const at::Tensor& parameter,
                                         AdamMiniBlocks kind, const AdamMiniOptions& options) {
  const auto rows = parameter.size(0);
  if (kind == AdamMiniBlocks::element) return {};
  if (kind == AdamMiniBlocks::tensor) return {rows};
  if (kind == AdamMiniBlocks::row)
    return std::vector<std::int64_t>(static_cast<std::size_t>(rows), 1);

  GRADUS_CHECK(kComponent, options.heads > 0, "parameter '", name,
               "' is divided by attention heads, so heads must be given; got ", options.heads,
               ". Set heads, or take the rule out of rules");
  const auto key_heads = options.key_heads > 0 ? options.key_heads : options.heads;
  const bool queries =
      kind == AdamMiniBlocks::query_head || kind == AdamMiniBlocks::query_key_value;
  const bool keys = kind != AdamMiniBlocks::query_head;
  const bool values = kind == AdamMiniBlocks::query_key_value || kind == AdamMiniBlocks::key_value;
  const auto all_heads =
      (queries ? options.heads : 0) + (keys ? key_heads : 0) + (values ? key_heads : 0);
  GRADUS_CHECK(kComponent, rows % all_heads == 0, "parameter '", name,
               "' must have a number of rows divisible by its ", all_heads, " heads; got ", rows,
               ". Check heads and key_heads, or state its block_rows");
  const auto head_rows = rows / all_heads;
  std::vector<std::int64_t> blocks;
  if (queries) append_heads(blocks, options.heads, head_rows);
  if (keys) append_heads(blocks, key_heads, head_rows);
  if (values) blocks.insert(blocks.end(), static_cast<std::size_t>(key_heads * head_rows), 1);
  return blocks;
}

bool all_equal(const std::vector<std::int64_t>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(), [&](auto rows) { return rows == blocks[0]; });
}

// The index of each row's block, shape [rows].
at::Tensor block_of_row(const std::vector<std::int64_t>& blocks, const at::Device& device) {
  return at::repeat_interleave(at::tensor(blocks, at::kLong)).to(device);
}

// The mean of the squares in each block, shape [blocks]; all rows have equally many elements, so
// the mean over a block is the mean of its rows' means.
at::Tensor mean_squares(const at::Tensor& gradient, const std::vector<std::int64_t>& blocks) {
  if (blocks.empty()) return gradient.square();
  const auto rows = std::accumulate(blocks.begin(), blocks.end(), std::int64_t{0});
  const auto count = static_cast<std::int64_t>(blocks.size());
  if (count == 1) return gradient.square().mean().reshape({1});
  const auto by_row = gradient.reshape({rows, -1}).square().mean(1);
  if (count == rows) return by_row;
  if (all_equal(blocks)) return by_row.view({count, -1}).mean(1);
  const auto sizes = at::tensor(blocks, by_row.options());
  return at::zeros({count}, by_row.options())
      .index_add_(0, block_of_row(blocks, gradient.device()), by_row)
      .div_(sizes);
}

// A value a block as something that broadcasts over the parameter.
at::Tensor spread(const at::Tensor& value, const std::vector<std::int64_t>& blocks,
                  const at::Tensor& parameter) {
  if (blocks.empty() || blocks.size() == 1) return blocks.empty() ? value : value.squeeze(0);
  const auto rows = parameter.size(0);
  const auto count = static_cast<std::int64_t>(blocks.size());
  const auto by_row = count == rows ? value
                      : all_equal(blocks)
                          ? value.unsqueeze(1).expand({count, blocks[0]}).reshape({rows})
                          : value.index_select(0, block_of_row(blocks, value.device()));
  std::vector<std::int64_t> shape(static_cast<std::size_t>(parameter.dim()), 1);
  shape[0] = rows;
  return by_row.view(shape);
}

}  // namespace

std::vector<AdamMiniRule> adam_mini_transformer_rules() {
  return {{{"qkv", "qkv_proj", "in_proj_weight"}, AdamMiniBlocks::query_key_value},
          {{"key_value", "kv", "kv_proj"}, AdamMiniBlocks::key_value},
          {{"query", "q_proj", "wq", "to_q"}, AdamMiniBlocks::query_head},
          {{"key", "k_proj", "wk", "to_k"}, AdamMiniBlocks::key_head}};
}

AdamMini::AdamMini(std::vector<at::Tensor> parameters, const AdamMiniOptions& options)
    : AdamMini(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                            .lr = options.lr,
                                            .weight_decay = options.weight_decay}},
               options) {}

AdamMini::AdamMini(std::vector<ParameterGroup> groups, const AdamMiniOptions& options)
    : Optimizer(kComponent, std::move(groups), {"beta1", "beta2", "eps"}), options_(options) {
  GRADUS_CHECK(component(), options.heads >= 0 && options.key_heads >= 0,
               "heads and key_heads must be >= 0; got ", options.heads, " and ", options.key_heads);
  GRADUS_CHECK(component(), options.key_heads == 0 || options.heads % options.key_heads == 0,
               "heads must be a multiple of key_heads; got ", options.heads, " and ",
               options.key_heads);
  check_groups();
  const auto names = parameter_names();
  for (const auto& [name, rows] : options.block_rows) {
    GRADUS_CHECK(component(), std::find(names.begin(), names.end(), name) != names.end(),
                 "block_rows must name parameters of this optimizer; got '", name, "'");
  }
  partition();  // refuses, before training, what cannot be divided
}

std::vector<std::int64_t> AdamMini::blocks_of(const std::string& name,
                                              const at::Tensor& parameter) const {
  if (const auto own = options_.block_rows.find(name); own != options_.block_rows.end()) {
    const auto& blocks = own->second;
    const auto rows = parameter.dim() == 0 ? 1 : parameter.size(0);
    const bool positive =
        std::all_of(blocks.begin(), blocks.end(), [](auto count) { return count >= 1; });
    GRADUS_CHECK(component(),
                 positive && std::accumulate(blocks.begin(), blocks.end(), std::int64_t{0}) == rows,
                 "block_rows of parameter '", name, "' must be >= 1 and add up to its ", rows,
                 " rows; got ", at::IntArrayRef(blocks));
    return blocks;
  }
  if (parameter.dim() < 2) return {parameter.dim() == 0 ? 1 : parameter.size(0)};
  for (const auto& rule : options_.rules) {
    for (const auto& part : rule.parts) {
      if (has_part(name, part)) return blocks_by_rule(name, parameter, rule.blocks, options_);
    }
  }
  return blocks_by_rule(name, parameter, AdamMiniBlocks::row, options_);
}

std::vector<AdamMiniPartition> AdamMini::partition() const {
  std::vector<AdamMiniPartition> result;
  for (const auto& slot : slots()) {
    result.push_back({slot.name, blocks_of(slot.name, slot.parameter)});
  }
  return result;
}

AdamMiniOptions AdamMini::with_group(const ParameterGroup& group) const {
  auto own = options_;
  own.beta1 = option_of(group, "beta1", own.beta1);
  own.beta2 = option_of(group, "beta2", own.beta2);
  own.eps = option_of(group, "eps", own.eps);
  return own;
}

void AdamMini::check_group(const ParameterGroup& group) const {
  const auto own = with_group(group);
  for (const double beta : {own.beta1, own.beta2}) {
    GRADUS_CHECK(component(), beta >= 0.0 && beta < 1.0, "beta1 and beta2 must be in [0, 1); got ",
                 beta);
  }
  GRADUS_CHECK(component(), std::isfinite(own.eps) && own.eps >= 0.0,
               "eps must be finite and >= 0; got ", own.eps);
  for (std::size_t i = 0; i < group.names.size() && i < group.parameters.size(); ++i) {
    if (group.parameters[i].defined()) blocks_of(group.names[i], group.parameters[i]);
  }
}

std::vector<NamedOption> AdamMini::options_of(const ParameterGroup& group) const {
  const auto own = with_group(group);
  return {{"lr", group.lr},
          {"betas", std::vector<double>{own.beta1, own.beta2}},
          {"eps", own.eps},
          {"weight_decay", group.weight_decay}};
}

std::vector<Optimizer::StateSpec> AdamMini::state_specs(const at::Tensor&) const {
  GRADUS_INTERNAL_CHECK(kComponent, false, "the state depends on the parameter's name");
  return {};
}

std::vector<Optimizer::StateSpec> AdamMini::slot_state_specs(const Slot& slot) const {
  const auto& parameter = slot.parameter;
  const auto sizes = parameter.sizes().vec();
  const auto dtype = internal::working_dtype(parameter);
  const auto blocks = blocks_of(slot.name, parameter);
  const auto moment =
      blocks.empty() ? sizes : std::vector<std::int64_t>{static_cast<std::int64_t>(blocks.size())};
  return {{"step", {}, at::kFloat}, {"exp_avg", sizes, dtype}, {"exp_avg_sq", moment, dtype}};
}

void AdamMini::check_slot(const Slot& slot) const {
  internal::check_working_dtype(component(), slot.name, slot.parameter);
}

void AdamMini::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto own = with_group(group);
  internal::for_each_run(slots, [&](std::span<Slot* const> run) {
    std::vector<at::Tensor> steps;
    for (const Slot* slot : run) steps.push_back(slot->state[kStep].add_(1));
    const auto counts = internal::values_of(steps);
    for (std::size_t i = 0; i < run.size(); ++i) {
      const internal::WorkingSet work(run.subspan(i, 1));
      const auto& parameter = work.parameters[0];
      const auto& gradient = work.gradients[0];
      const auto& state = run[i]->state;
      const auto blocks = blocks_of(run[i]->name, run[i]->parameter);
      state[kMean].lerp_(gradient, 1.0 - own.beta1);
      state[kSquare].lerp_(mean_squares(gradient, blocks), 1.0 - own.beta2);
      const auto root =
          state[kSquare].sqrt().div_(std::sqrt(1.0 - std::pow(own.beta2, counts[i]))).add_(own.eps);
      if (group.weight_decay != 0.0) parameter.mul_(1.0 - group.lr * group.weight_decay);
      parameter.addcdiv_(state[kMean], spread(root, blocks, parameter),
                         -group.lr / (1.0 - std::pow(own.beta1, counts[i])));
      work.store();
    }
  });
}

}  // namespace gradus::optim
