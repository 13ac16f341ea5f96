#include <gradus/privacy/nn/multihead_attention.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <torch/nn/init.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <gradus/base/error.h>
#include <gradus/privacy/nn/internal/plain_slots.h>

namespace gradus::privacy::nn {

namespace {

constexpr const char* kComponent = "dp_multihead_attention";

using Options = torch::nn::MultiheadAttentionOptions;

void check_options(const Options& options) {
  GRADUS_CHECK(kComponent, options.embed_dim() >= 1, "embed_dim must be at least 1; got ",
               options.embed_dim());
  GRADUS_CHECK(kComponent, options.num_heads() >= 1, "num_heads must be at least 1; got ",
               options.num_heads());
  GRADUS_CHECK(kComponent, options.embed_dim() % options.num_heads() == 0,
               "num_heads must divide embed_dim; got ", options.num_heads(), " heads and ",
               options.embed_dim());
  GRADUS_CHECK(kComponent, options.kdim() >= 1 && options.vdim() >= 1,
               "kdim and vdim must be at least 1; got ", options.kdim(), " and ", options.vdim());
  GRADUS_CHECK(kComponent, options.dropout() >= 0.0 && options.dropout() <= 1.0,
               "dropout must be in [0, 1]; got ", options.dropout());
}

void check_inputs(const Options& options, const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value) {
  GRADUS_CHECK(kComponent, query.dim() == 3 && query.size(2) == options.embed_dim(),
               "query must have shape [queries, batch, ", options.embed_dim(), "]; got ",
               query.sizes());
  GRADUS_CHECK(kComponent,
               key.dim() == 3 && key.size(1) == query.size(1) && key.size(2) == options.kdim(),
               "key must have shape [keys, ", query.size(1), ", ", options.kdim(),
               "], the query's batch and kdim; got ", key.sizes());
  GRADUS_CHECK(kComponent,
               value.dim() == 3 && value.size(0) == key.size(0) && value.size(1) == key.size(1) &&
                   value.size(2) == options.vdim(),
               "value must have shape [", key.size(0), ", ", key.size(1), ", ", options.vdim(),
               "], the key's positions and batch and vdim; got ", value.sizes());
}

void check_mask(const char* name, const at::Tensor& mask) {
  GRADUS_CHECK(kComponent, mask.scalar_type() == at::kBool || mask.is_floating_point(), name,
               " must be bool (true: left out) or floating (added to the scores); got ",
               mask.scalar_type(), ". Call .to(torch::kBool) on a mask of bytes");
}

// Applies a mask that broadcasts to [B, H, L, S'] once its last dimension has the @p added keys
// that no mask leaves out.
at::Tensor masked(const at::Tensor& scores_BHLS, const at::Tensor& mask, std::int64_t added) {
  const at::Tensor whole = added == 0 ? mask : at::constant_pad_nd(mask, {0, added});
  if (mask.scalar_type() == at::kBool) {
    return scores_BHLS.masked_fill(whole, -std::numeric_limits<double>::infinity());
  }
  return scores_BHLS + whole.to(scores_BHLS.scalar_type());
}

}  // namespace

DPMultiheadAttentionImpl::DPMultiheadAttentionImpl(const Options& options) : options(options) {
  check_options(options);
  DPMultiheadAttentionImpl::reset();
}

void DPMultiheadAttentionImpl::reset() {
  const std::int64_t E = options.embed_dim();
  q_proj_weight = register_parameter("q_proj_weight", torch::empty({E, E}));
  k_proj_weight = register_parameter("k_proj_weight", torch::empty({E, options.kdim()}));
  v_proj_weight = register_parameter("v_proj_weight", torch::empty({E, options.vdim()}));
  if (options.bias()) {
    q_proj_bias = register_parameter("q_proj_bias", torch::empty({E}));
    k_proj_bias = register_parameter("k_proj_bias", torch::empty({E}));
    v_proj_bias = register_parameter("v_proj_bias", torch::empty({E}));
  }
  out_proj = register_module(
      "out_proj", torch::nn::Linear(torch::nn::LinearOptions(E, E).bias(options.bias())));
  // The rest is drawn in torch::nn's order: projections, then bias_k and bias_v as they are made.
  bias_k = nullptr;
  bias_v = nullptr;
  reset_parameters();
  if (options.add_bias_kv()) {
    bias_k = register_module("bias_k", SequenceBias(E));
    bias_v = register_module("bias_v", SequenceBias(E));
  }
}

void DPMultiheadAttentionImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  const std::int64_t E = options.embed_dim();
  if (options.kdim() == E && options.vdim() == E) {
    // As one matrix [3E, E], whose fan-out is 3E.
    at::Tensor joint = at::empty({3 * E, E}, q_proj_weight.options());
    torch::nn::init::xavier_uniform_(joint);
    const auto parts = joint.chunk(3);
    q_proj_weight.copy_(parts[0]);
    k_proj_weight.copy_(parts[1]);
    v_proj_weight.copy_(parts[2]);
  } else {
    for (auto* weight : {&q_proj_weight, &k_proj_weight, &v_proj_weight}) {
      torch::nn::init::xavier_uniform_(*weight);
    }
  }
  if (options.bias()) {
    for (auto* bias : {&q_proj_bias, &k_proj_bias, &v_proj_bias, &out_proj->bias}) bias->zero_();
  }
  if (bias_k) {
    bias_k->reset_parameters();
    bias_v->reset_parameters();
  }
}

std::tuple<at::Tensor, at::Tensor> DPMultiheadAttentionImpl::forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& key_padding_mask, bool need_weights, const at::Tensor& attn_mask,
    bool average_attn_weights) {
  check_inputs(options, query, key, value);
  const std::int64_t L = query.size(0), S = key.size(0), B = query.size(1);
  const std::int64_t H = options.num_heads(), D = options.embed_dim() / H;
  const std::int64_t added = (bias_k ? 1 : 0) + (options.add_zero_attn() ? 1 : 0);

  const at::Tensor q =
      at::linear(query, q_proj_weight, q_proj_bias) * (1.0 / std::sqrt(static_cast<double>(D)));
  at::Tensor k = at::linear(key, k_proj_weight, k_proj_bias);
  at::Tensor v = at::linear(value, v_proj_weight, v_proj_bias);
  if (bias_k) {
    k = bias_k->forward(k);
    v = bias_v->forward(v);
  }
  if (options.add_zero_attn()) {
    k = at::constant_pad_nd(k, {0, 0, 0, 0, 0, 1});
    v = at::constant_pad_nd(v, {0, 0, 0, 0, 0, 1});
  }
  // [positions, B, E] -> [B, H, positions, D]: the batch stays a dimension of its own.
  const auto heads = [&](const at::Tensor& x) {
    return x.reshape({x.size(0), B, H, D}).permute({1, 2, 0, 3});
  };
  at::Tensor scores = at::matmul(heads(q), heads(k).transpose(2, 3));
  if (attn_mask.defined()) {
    check_mask("attn_mask", attn_mask);
    const bool shared = attn_mask.sizes() == at::IntArrayRef{L, S};
    GRADUS_CHECK(kComponent, shared || attn_mask.sizes() == (at::IntArrayRef{B * H, L, S}),
                 "attn_mask must have shape [queries, keys] = [", L, ", ", S,
                 "] or [batch * heads, queries, keys] = [", B * H, ", ", L, ", ", S, "]; got ",
                 attn_mask.sizes());
    scores = masked(scores, shared ? attn_mask : attn_mask.unflatten(0, {B, H}), added);
  }
  if (key_padding_mask.defined()) {
    check_mask("key_padding_mask", key_padding_mask);
    GRADUS_CHECK(kComponent, key_padding_mask.sizes() == (at::IntArrayRef{B, S}),
                 "key_padding_mask must have shape [batch, keys] = [", B, ", ", S, "]; got ",
                 key_padding_mask.sizes());
    scores = masked(scores, key_padding_mask.unsqueeze(1).unsqueeze(2), added);
  }
  const at::Tensor weights = at::dropout(at::softmax(scores, -1), options.dropout(), is_training());
  const at::Tensor mixed =
      at::matmul(weights, heads(v)).permute({2, 0, 1, 3}).reshape({L, B, H * D});
  const at::Tensor output = at::linear(mixed, out_proj->weight, out_proj->bias);
  if (!need_weights) return {output, at::Tensor()};
  return {output, average_attn_weights ? weights.sum(1) / H : weights};
}

void DPMultiheadAttentionImpl::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& slot : internal::attention_slots(*this)) archive.write(slot.name, slot.value());
  torch::serialize::OutputArchive child(archive.compilation_unit());
  out_proj->save(child);
  archive.write("out_proj", child);
}

void DPMultiheadAttentionImpl::load(torch::serialize::InputArchive& archive) {
  constexpr std::string_view kChild = "out_proj.";
  torch::serialize::InputArchive child;
  GRADUS_CHECK(
      kComponent, archive.try_read("out_proj", child),
      "the archive must hold out_proj, as torch::nn::MultiheadAttention writes it; it does "
      "not: was it saved from another module?");
  // All is read and checked before anything changes.
  const auto slots = internal::plain_slots(*this);
  std::vector<at::Tensor> values;
  for (const auto& slot : slots) {
    at::Tensor value;
    const bool found = slot.name.starts_with(kChild)
                           ? child.try_read(slot.name.substr(kChild.size()), value)
                           : archive.try_read(slot.name, value);
    GRADUS_CHECK(kComponent, found, "the archive must hold ", slot.name, " of shape ",
                 at::IntArrayRef(slot.shape),
                 "; it does not: was it saved from a layer of the same options?");
    const std::string fault = slot.fault(value);
    GRADUS_CHECK(kComponent, fault.empty(), "the archive must fit the layer; ", fault);
    values.push_back(value);
  }
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i].set(values[i]);
}

void DPMultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "gradus::privacy::nn::DPMultiheadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads() << ", dropout=" << options.dropout()
         << std::boolalpha << ", bias=" << options.bias()
         << ", add_bias_kv=" << options.add_bias_kv()
         << ", add_zero_attn=" << options.add_zero_attn() << ", kdim=" << options.kdim()
         << ", vdim=" << options.vdim() << ")";
}

}  // namespace gradus::privacy::nn
