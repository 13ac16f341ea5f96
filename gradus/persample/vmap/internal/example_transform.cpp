#include <gradus/persample/vmap/internal/example_transform.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample::internal {
namespace {

using plane::op::Call;
using plane::op::Frame;

// Give the host a value, or a tensor whose shape depends on values. None has a derivative.
const std::unordered_set<std::string_view>& host_operators() {
  static const std::unordered_set<std::string_view> names{"aten::_local_scalar_dense",
                                                          "aten::equal",
                                                          "aten::allclose",
                                                          "aten::is_nonzero",
                                                          "aten::nonzero",
                                                          "aten::is_same_size",
                                                          "aten::bincount",
                                                          "aten::_unique2",
                                                          "aten::unique_consecutive",
                                                          "aten::unique_dim",
                                                          "aten::_unique",
                                                          "aten::histc",
                                                          "aten::repeat_interleave",
                                                          "aten::_is_all_true",
                                                          "aten::_is_any_true",
                                                          "aten::_fused_sdp_choice"};
  return names;
}

// Random operators whose result depends on no argument in a differentiable way, or with a
// derivative of zero.
bool derivative_is_zero(std::string_view name) {
  static constexpr std::array<std::string_view, 6> prefixes{"aten::bernoulli", "aten::multinomial",
                                                            "aten::poisson",   "aten::normal",
                                                            "aten::rand",      "aten::binomial"};
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// A random operator may be told to draw nothing.
bool draws(const Call& call) {
  if (!call.op().hasTag(at::Tag::nondeterministic_seeded)) return false;
  const auto& arguments = call.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = call.arguments()[i];
    const std::string& name = arguments[i].name();
    if ((name == "dropout_p" || name == "dropout") && value.isDouble() && value.toDouble() == 0) {
      return false;
    }
    if ((name == "train" || name == "training") && value.isBool() && !value.toBool()) return false;
  }
  return true;
}

bool any_tensor(const c10::IValue& value, const std::function<bool(const at::Tensor&)>& test) {
  bool found = false;
  map_tensors(value, [&](const at::Tensor& tensor) {
    found = found || test(tensor);
    return tensor;
  });
  return found;
}

// Same bits, same way: NaN equals NaN.
std::string bits(const c10::IValue& value) {
  if (value.isBool()) return value.toBool() ? "t" : "f";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isNone()) return "-";
  std::string text(1, 'd');
  const auto put = [&](double number) {
    std::array<char, sizeof number> raw{};
    std::memcpy(raw.data(), &number, sizeof number);
    text.append(raw.data(), raw.size());
  };
  if (value.isDouble()) {
    put(value.toDouble());
  } else {
    TORCH_CHECK(value.isComplexDouble(), "a result of type ", value.tagKind(),
                " cannot be compared between examples");
    put(value.toComplexDouble().real());
    put(value.toComplexDouble().imag());
  }
  return text;
}

template <typename Value, typename Key>
void require_agreement(const std::vector<Value>& values, std::string_view op, const Key& key) {
  std::map<std::string, std::int64_t> ways;
  std::vector<std::int64_t> group;
  for (const Value& value : values) {
    group.push_back(ways.emplace(key(value), static_cast<std::int64_t>(ways.size())).first->second);
  }
  if (ways.size() > 1) throw Diverged(std::move(group), std::string(op));
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text;
  for (const std::int64_t size : tensor.sizes()) text += std::to_string(size) + ",";
  return text;
}

}  // namespace

c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& fn) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(fn(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? fn(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool any = tensor && tensor->defined();
      list.push_back(any ? std::optional<at::Tensor>(fn(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

ExampleTransform::ExampleTransform(Layers& layers,
                                   std::unordered_map<c10::TensorImpl*, at::Tensor> parameters,
                                   RandomStreams streams)
    : layers_(layers), parameters_(std::move(parameters)), streams_(std::move(streams)) {
  for (const auto& [impl, wrapper] : parameters_) {
    const at::Tensor& value = unwrapped(wrapper);
    if (value.has_storage()) {
      captured_.emplace(value.storage().unsafeGetStorageImpl(), value.storage());
    }
  }
}

void ExampleTransform::call(Call& call) {
  if (transform_active() && !layers_.both_on()) {  // part of a call that was seen before
    call.proceed_whole();
    return;
  }
  // The call was dispatched without the layers: a set argument has it dispatched anew, in them.
  if (!transform_active() && !call.arguments().empty()) {
    call.set_argument(0, call.arguments()[0]);
  }
  const Layers::Inside inside(layers_);
  const Frame frame = call.frame();
  const bool is_leaf = frame == Frame::autograd;
  if (is_leaf) blamed_.clear();
  try {
    substitute(call);
    if (pack_sequences(*this, call)) return;
    if (is_leaf) {
      leaf(call);
    } else {
      call.proceed();
    }
  } catch (const c10::Error&) {
    if (blamed_.empty()) blamed_ = call.name();
    throw;
  }
}

bool ExampleTransform::substitute(Call& call) {
  const auto& arguments = call.schema().arguments();
  bool changed = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = call.arguments()[i];
    bool differs = false;
    c10::IValue mapped = map_tensors(value, [&](const at::Tensor& tensor) {
      at::Tensor other = substituted(tensor, call.name());
      differs = differs || !other.is_same(tensor);
      return other;
    });
    // A sparse gradient has no example dimension: embeddings give dense ones here.
    if (value.isBool() && value.toBool() && arguments[i].name() == "sparse" &&
        call.name().find("embedding") != std::string_view::npos) {
      mapped = false;
      differs = true;
    }
    if (!differs) continue;
    call.set_argument(i, std::move(mapped));
    changed = true;
  }
  return changed;
}

at::Tensor ExampleTransform::substituted(const at::Tensor& tensor, std::string_view op) {
  if (const auto found = parameters_.find(tensor.unsafeGetTensorImpl());
      found != parameters_.end()) {
    return found->second;
  }
  if (is_wrapped(tensor)) {
    if (is_dead(tensor)) {
      throw Unsupported(std::string(op),
                        "an argument was kept from an earlier call of the loss function");
    }
    resolve(tensor);
    return tensor;
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  if (tensor.requires_grad() && !tensor.is_leaf() && at::GradMode::is_enabled()) {
    throw Unsupported(std::string(op),
                      "an argument was computed outside the loss function and requires a gradient: "
                      "compute it inside");
  }
  if (tensor.has_storage()) {
    captured_.emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
  }
  return tensor;
}

void ExampleTransform::resolve(const at::Tensor& tensor) {
  if (owned_.empty() || !is_wrapped(tensor)) return;
  const at::Tensor value = unwrapped(tensor);
  if (is_batched(value) || !value.has_storage()) return;
  const auto found = owned_.find(value.storage().unsafeGetStorageImpl());
  if (found == owned_.end()) return;
  const OutsideLayers outside;
  const at::NoGradGuard no_grad;
  const at::Tensor& flat = found->second.flat;
  TORCH_CHECK(flat.scalar_type() == value.scalar_type() && !value.is_conj() && !value.is_neg(),
              "a view as another dtype, or a lazily conjugated one, was written to");
  std::vector<std::int64_t> sizes = value.sizes().vec(), strides = value.strides().vec();
  sizes.insert(sizes.begin(), flat.size(0));
  strides.insert(strides.begin(), flat.size(1));
  rebind(tensor, layers_.batched(flat.as_strided(sizes, strides, value.storage_offset())));
}

void ExampleTransform::own_by_example(const at::Tensor& tensor) {
  const at::Tensor value = unwrapped(tensor);
  if (is_batched(value)) return;
  TORCH_CHECK(value.layout() == c10::kStrided && value.has_storage(),
              "a write into a tensor of layout ", value.layout());
  const c10::Storage storage = value.storage();
  if (!owned_.contains(storage.unsafeGetStorageImpl())) {
    const OutsideLayers outside;
    const at::NoGradGuard no_grad;
    const auto elements = static_cast<std::int64_t>(storage.nbytes() / value.dtype().itemsize());
    const at::Tensor one = at::empty({0}, value.options()).set_(storage, 0, {elements}, {1});
    at::Tensor flat = one.unsqueeze(0).expand({layers_.examples(), elements}).contiguous();
    // With one example, expand() is contiguous as it is, and contiguous() no copy.
    if (flat.is_alias_of(one)) flat = flat.clone();
    owned_.emplace(storage.unsafeGetStorageImpl(), Owned{storage, std::move(flat)});
  }
  resolve(tensor);
}

void ExampleTransform::prepare_writes(Call& call) {
  const auto& arguments = call.schema().arguments();
  std::vector<at::Tensor> written;
  bool batched = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool write = writes(arguments[i]);
    map_tensors(call.arguments()[i], [&](const at::Tensor& tensor) {
      if (write) written.push_back(tensor);
      batched = batched || is_batched(tensor);
      return tensor;
    });
  }
  for (const at::Tensor& tensor : written) {
    const at::Tensor& value = unwrapped(tensor);
    const bool outside =
        !is_wrapped(tensor) || (!is_batched(value) && value.has_storage() &&
                                captured_.contains(value.storage().unsafeGetStorageImpl()));
    if (outside) {
      throw Unsupported(std::string(call.name()),
                        "it writes to a tensor made outside the loss function (a parameter, a "
                        "buffer, running statistics), which each example would change in turn");
    }
    if (batched) own_by_example(tensor);
  }
}

void ExampleTransform::by_example(Call& call, bool random, bool loses_gradient) {
  const std::string_view name = call.name();
  const auto& schema = call.schema();
  std::vector<std::vector<c10::IValue>> results;
  const std::vector<c10::IValue> arguments = call.arguments().vec();
  {
    const OutsideLayers outside;
    const at::NoGradGuard no_grad;
    if (random) streams_.begin();
    for (std::int64_t example = 0; example < layers_.examples(); ++example) {
      std::vector<c10::IValue> stack;
      for (const c10::IValue& argument : arguments) {
        // A generator of the program's own would give its numbers to examples in another order.
        if (argument.isGenerator()) {
          stack.emplace_back();
          continue;
        }
        stack.push_back(map_tensors(
            argument, [&](const at::Tensor& tensor) { return plain_of(plain(tensor), example); }));
      }
      if (random) streams_.enter(static_cast<std::size_t>(example));
      call.op().callBoxed(&stack);
      if (random) streams_.leave(static_cast<std::size_t>(example));
      results.push_back(std::move(stack));
    }
    if (random) streams_.end();
  }
  std::vector<c10::IValue> given;
  for (std::size_t k = 0; k < schema.returns().size(); ++k) {
    if (writes(schema.returns()[k])) {  // in place: the first argument, of which slices were filled
      arguments[0].toTensor().unsafeGetTensorImpl()->bump_version();
      given.push_back(arguments[0]);
    } else if (results[0][k].isTensor()) {
      std::vector<at::Tensor> values;
      for (const auto& result : results) values.push_back(result[k].toTensor());
      if (loses_gradient && at::isFloatingType(values[0].scalar_type())) {
        throw Unsupported(std::string(name),
                          "its result depends on values in shape, and no rule "
                          "takes a gradient through it");
      }
      given.emplace_back(joined(values, name));
    } else {
      require_agreement(results, name, [k](const auto& result) { return bits(result[k]); });
      given.push_back(results[0][k]);
    }
  }
  call.replace(std::move(given));
}

at::Tensor ExampleTransform::joined(const std::vector<at::Tensor>& values, std::string_view op) {
  require_agreement(values, op, shape_text);
  at::Tensor stacked;
  {
    const OutsideLayers outside;
    const at::NoGradGuard no_grad;
    stacked = at::stack(values);
  }
  return layers_.wrapped(layers_.batched(stacked));
}

std::vector<std::int64_t> ExampleTransform::agreed_integers(const at::Tensor& tensor,
                                                            std::string_view op) {
  const Plain value = plain(tensor);
  const OutsideLayers outside;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> rows;
  const std::int64_t examples = value.batched ? layers_.examples() : 1;
  for (std::int64_t example = 0; example < examples; ++example) {
    rows.push_back(plain_of(value, example).to(c10::kCPU, c10::kLong).contiguous());
  }
  require_agreement(rows, op, [](const at::Tensor& row) {
    return shape_text(row) + std::string(static_cast<const char*>(row.const_data_ptr()),
                                         static_cast<std::size_t>(row.nbytes()));
  });
  const std::int64_t* const data = rows[0].const_data_ptr<std::int64_t>();
  return {data, data + rows[0].numel()};
}

// Under autocast a norm takes 16-bit values and 32-bit weights, which functorch's rules cannot mix.
// The kernels compute in the wider dtype anyway.
bool ExampleTransform::widen_norm(Call& call) {
  const bool layer = call.name() == "aten::native_layer_norm";
  if (!layer && call.name() != "aten::native_group_norm") return false;
  const at::Tensor input = call.arguments()[0].toTensor();
  const c10::IValue& weight = call.arguments()[layer ? 2 : 1];
  if (!weight.isTensor() || !weight.toTensor().defined()) return false;
  const c10::ScalarType wide = weight.toTensor().scalar_type();
  if (wide == input.scalar_type()) return false;
  std::vector<c10::IValue> values = call.arguments().vec();
  values[0] = input.to(wide);
  call.op().callBoxed(&values);
  values[0] = values[0].toTensor().to(input.scalar_type());
  call.replace(std::move(values));
  return true;
}

void ExampleTransform::leaf(Call& call) {
  const std::string_view name = call.name();
  if (widen_norm(call)) return;
  if (index_masks(*this, call)) return;
  const auto any = [&](const std::function<bool(const at::Tensor&)>& test) {
    const auto values = call.arguments();
    return std::any_of(values.begin(), values.end(),
                       [&](const c10::IValue& value) { return any_tensor(value, test); });
  };
  const bool wants_gradient = at::GradMode::is_enabled() &&
                              any([](const at::Tensor& tensor) { return tensor.requires_grad(); });
  if (host_operators().contains(name) && any([](const at::Tensor& t) { return is_batched(t); })) {
    by_example(call, /*random=*/false, wants_gradient);
    return;
  }
  if (draws(call)) {
    const auto& arguments = call.schema().arguments();
    const bool in_place = !arguments.empty() && writes(arguments[0]);
    if (wants_gradient && (in_place || !derivative_is_zero(name))) {
      throw Unsupported(std::string(name),
                        "a random operator through which a gradient flows has no rule");
    }
    prepare_writes(call);
    // Filling one tensor differently for each example writes by example, whatever the arguments.
    if (in_place) own_by_example(call.arguments()[0].toTensor());
    by_example(call, /*random=*/true, /*loses_gradient=*/false);
    return;
  }
  prepare_writes(call);
  call.proceed_whole();
}

}  // namespace gradus::persample::internal
