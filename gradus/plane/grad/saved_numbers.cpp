#include <gradus/plane/grad/saved_numbers.h>

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeindex>
#include <unordered_map>

#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <gradus/plane/grad/internal/access.h>

namespace gradus::plane::grad {

namespace generated = torch::autograd::generated;
using torch::autograd::Node;

namespace {

enum class Role : std::uint8_t { none, dims, places, sizes, exact };

constexpr bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// By the name that LibTorch's derivatives give a field: the same word means the same everywhere.
constexpr Role role_of(std::string_view field) {
  for (const std::string_view name :
       {"batch_sizes", "input_lengths", "target_lengths", "retain_variables", "weight_stride0"}) {
    if (field == name) return Role::none;
  }
  if (contains(field, "_sym_strides")) return Role::none;
  if (contains(field, "dim") || field == "axis") return Role::dims;
  for (const std::string_view name : {"start", "end", "length", "index", "split_size", "shifts",
                                      "storage_offset", "offset", "diagonal"}) {
    if (field == name) return Role::places;
  }
  for (const std::string_view name : {"size", "output_size", "repeats", "normalized_shape", "N",
                                      "C", "H", "W", "HxW", "max_q", "max_k"}) {
    if (field == name) return Role::sizes;
  }
  for (const std::string_view part :
       {"sizes", "argsize", "sym_numel", "blocksize", "_info", "max_seqlen"}) {
    if (contains(field, part)) return Role::sizes;
  }
  return Role::exact;
}

std::int64_t hash_of(std::string_view text) {
  return static_cast<std::int64_t>(std::hash<std::string_view>{}(text));
}

class Reader {
 public:
  explicit Reader(SavedNumbers& numbers) : numbers_(numbers) {}

  template <Role role, typename Value>
  void read(const Value& value) {
    if constexpr (role != Role::none) {
      list_ = role == Role::dims     ? &numbers_.dims
              : role == Role::places ? &numbers_.places
              : role == Role::sizes  ? &numbers_.sizes
                                     : &numbers_.exact;
      add(value);
    }
  }

 private:
  static constexpr std::int64_t kNothing = -7046029254386353131;
  // Not numbers, beyond what whole ones are taken for.
  static constexpr double kLargestWhole = 1e15;
  enum Class : std::int64_t { kNan = -9000001, kInfinite, kMinusInfinite, kPositive, kNegative };

  void add(std::int64_t value) { list_->push_back(value); }
  void add(std::size_t value) { numbers_.exact.push_back(static_cast<std::int64_t>(value)); }
  void add(bool value) { numbers_.exact.push_back(value ? 1 : 0); }
  void add(double value) {
    const bool whole = std::abs(value) < kLargestWhole && value == std::floor(value);
    numbers_.exact.push_back(std::isnan(value)   ? std::int64_t{kNan}
                             : std::isinf(value) ? (value > 0 ? kInfinite : kMinusInfinite)
                             : whole             ? static_cast<std::int64_t>(value)
                             : value > 0         ? kPositive
                                                 : kNegative);
  }
  void add(const c10::SymInt& value) { add(value.expect_int()); }
  void add(const at::Scalar& value) {
    if (value.isComplex()) {
      add(value.toComplexDouble().real());
      add(value.toComplexDouble().imag());
    } else {
      add(value.toDouble());
    }
  }
  void add(at::ScalarType value) { numbers_.exact.push_back(static_cast<std::int64_t>(value)); }
  void add(at::Layout value) { numbers_.exact.push_back(static_cast<std::int64_t>(value)); }
  void add(const std::string& value) { numbers_.exact.push_back(hash_of(value)); }
  void add(const at::TensorOptions& value) {
    add(c10::typeMetaToScalarType(value.dtype()));
    add(value.layout());
  }
  void add(const torch::autograd::generated::TypeAndSize& value) {
    add(value.options);
    add(value.sym_sizes);
  }
  void add(const at::TensorGeometry& value) {
    list_ = &numbers_.sizes;
    add_all(value.sym_sizes());
    list_ = &numbers_.exact;
    add_all(value.sym_strides());
    list_ = &numbers_.places;
    add(value.sym_storage_offset());
  }
  template <typename Value>
  void add(const std::optional<Value>& value) {
    numbers_.exact.push_back(value ? 1 : kNothing);
    if (value) add(*value);
  }
  template <typename Value>
  void add(const c10::OptionalArray<Value>& value) {
    numbers_.exact.push_back(value.list ? 1 : kNothing);
    if (value.list) add(*value.list);
  }
  template <typename Value>
  void add(const std::vector<Value>& values) {
    add_all(values);
  }
  template <typename Values>
  void add_all(const Values& values) {
    numbers_.exact.push_back(static_cast<std::int64_t>(values.size()));
    for (const auto& value : values) add(value);
  }

  SavedNumbers& numbers_;
  std::vector<std::int64_t>* list_ = nullptr;
};

using Read = void (*)(const Node&, Reader&);

const std::unordered_map<std::type_index, Read>& readers() {
#define FIELD(name) reader.read<role_of(#name)>(found.name);
#define NODE(type, fields)                                          \
  {std::type_index(typeid(generated::type)),                        \
   [](const Node& node, [[maybe_unused]] Reader& reader) {          \
     const auto& found = static_cast<const generated::type&>(node); \
     static_cast<void>(found);                                      \
     fields                                                         \
   }},
  static const std::unordered_map<std::type_index, Read> table{
#include "saved_numbers.inc"
  };
#undef NODE
#undef FIELD
  return table;
}

// A custom function shows what it keeps to the compiler of graphs only: in bytes, and numbers that
// the compiler would make variables of.
void read_custom(const Node& node, SavedNumbers& numbers) {
  namespace compiler = torch::dynamo::autograd;
  try {
    compiler::AutogradCompilerCall call(compiler::SizeInput::STATIC);
    compiler::NodeCall& place = call.node_calls.lookup(const_cast<Node&>(node).getptr());
    compiler::CompiledNodeArgs arguments(call, place);
    node.compiled_args(arguments);
    const compiler::CacheKey key = arguments.key();
    numbers.exact.push_back(hash_of({reinterpret_cast<const char*>(key.key), key.key_size}));
    for (const auto& lifted : call.lifted_ivalue_args.args) {
      numbers.exact.push_back(static_cast<std::int64_t>(at::IValue::hash(*lifted.actual_ptr)));
    }
  } catch (const std::exception&) {
    // Its saved tensors are elsewhere, or gone.
  }
}

}  // namespace

void SavedNumbers::clear() {
  dims.clear();
  places.clear();
  sizes.clear();
  exact.clear();
}

void read_saved_numbers(const NodeView& view, SavedNumbers& numbers) {
  numbers.clear();
  const Node& node = Access::node(view);
  Reader reader(numbers);
  const auto found = readers().find(std::type_index(typeid(node)));
  if (found != readers().end()) return found->second(node, reader);
  if (const auto* const write = dynamic_cast<const torch::autograd::CopySlices*>(&node)) {
    reader.read<Role::exact>(write->base);
    reader.read<Role::exact>(write->view);
    if (write->fn == nullptr) return;
    numbers.exact.push_back(hash_of(write->fn->name()));
    const Node& inner = *write->fn;
    const auto how = readers().find(std::type_index(typeid(inner)));
    if (how != readers().end()) how->second(inner, reader);
    return;
  }
  if (view.name().find("CppNode") != std::string::npos) read_custom(node, numbers);
}

}  // namespace gradus::plane::grad
