#include <gradus/recompute/selective.h>

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_set>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>

#include <gradus/base/error.h>

namespace gradus::recompute {
namespace {

using Names = std::unordered_set<std::string_view>;

const Names& weight_products() {
  static const Names names{"aten::linear",
                           "aten::mm",
                           "aten::addmm",
                           "aten::mv",
                           "aten::addmv",
                           "aten::convolution",
                           "aten::_convolution",
                           "aten::convolution_overrideable",
                           "aten::mkldnn_convolution",
                           "aten::_slow_conv2d_forward",
                           "aten::mkldnn_linear",
                           "aten::_addmm_activation",
                           "aten::_embedding_bag"};
  return names;
}

const Names& batched_products() {
  static const Names names{"aten::bmm",
                           "aten::baddbmm",
                           "aten::addbmm",
                           "aten::dot",
                           "aten::_scaled_dot_product_flash_attention",
                           "aten::_scaled_dot_product_flash_attention_for_cpu",
                           "aten::_scaled_dot_product_efficient_attention",
                           "aten::_scaled_dot_product_cudnn_attention"};
  return names;
}

// Reads one element for each it writes, or a few.
const Names& pointwise() {
  static const Names names{"aten::relu",
                           "aten::gelu",
                           "aten::silu",
                           "aten::sigmoid",
                           "aten::tanh",
                           "aten::leaky_relu",
                           "aten::elu",
                           "aten::hardswish",
                           "aten::softplus",
                           "aten::mish",
                           "aten::hardtanh",
                           "aten::hardsigmoid",
                           "aten::threshold",
                           "aten::prelu",
                           "aten::_prelu_kernel",
                           "aten::native_dropout",
                           "aten::dropout",
                           "aten::bernoulli",
                           "aten::add",
                           "aten::sub",
                           "aten::mul",
                           "aten::div",
                           "aten::neg",
                           "aten::exp",
                           "aten::log",
                           "aten::sqrt",
                           "aten::rsqrt",
                           "aten::pow",
                           "aten::sin",
                           "aten::cos",
                           "aten::abs",
                           "aten::where",
                           "aten::masked_fill",
                           "aten::clamp",
                           "aten::clamp_min",
                           "aten::clone",
                           "aten::_to_copy",
                           "aten::erf",
                           "aten::reciprocal",
                           "aten::square",
                           "aten::empty_like",
                           "aten::zeros_like",
                           "aten::ones_like",
                           "aten::empty",
                           "aten::log_sigmoid_forward",
                           "aten::rrelu_with_noise",
                           "aten::celu",
                           "aten::selu"};
  return names;
}

}  // namespace

SelectivePolicy save_operators(const std::vector<std::string>& names) {
  std::unordered_set<std::string> known;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) known.insert(name.name);
  for (const std::string& name : names) {
    GRADUS_CHECK("checkpoint", known.contains(name),
                 "a policy must name operators as \"aten::mm\", without overload; no operator is "
                 "called \"",
                 name, "\"");
  }
  return {.decide = [kept = std::unordered_set<std::string>(names.begin(), names.end())](
                        const OperatorCall& call) {
    return kept.contains(std::string(call.name)) ? Keep::must_save : Keep::prefer_recompute;
  }};
}

SelectivePolicy save_matrix_products() {
  return {.decide = [](const OperatorCall& call) {
    return weight_products().contains(call.name) || batched_products().contains(call.name)
               ? Keep::prefer_save
               : Keep::prefer_recompute;
  }};
}

SelectivePolicy recompute_attention() {
  return {.decide = [](const OperatorCall& call) {
    return weight_products().contains(call.name) ? Keep::prefer_save : Keep::prefer_recompute;
  }};
}

SelectivePolicy recompute_pointwise() {
  return {.decide = [](const OperatorCall& call) {
    return pointwise().contains(call.name) ? Keep::prefer_recompute : Keep::prefer_save;
  }};
}

}  // namespace gradus::recompute
