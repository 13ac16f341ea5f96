#include <gradus/recompute/internal/operator_traits.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/flat_hash_map.h>

namespace gradus::recompute::internal {
namespace {

// Their schemas claim to change nothing; they change the running statistics when they train.
constexpr std::array<std::string_view, 6> kNorms{
    "aten::batch_norm",       "aten::native_batch_norm", "aten::_batch_norm_impl_index",
    "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::instance_norm"};

OperatorTraits find_traits(const plane::op::Call& call) {
  OperatorTraits traits;
  const bool norm = std::find(kNorms.begin(), kNorms.end(), call.name()) != kNorms.end();
  const auto& arguments = call.schema().arguments();
  for (std::size_t i = 0; i < arguments.size() && i < 64; ++i) {
    const auto* const alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) traits.writes |= std::uint64_t{1} << i;
    if (!norm) continue;
    const std::string& name = arguments[i].name();
    if (name == "running_mean" || name == "running_var") traits.statistics |= std::uint64_t{1} << i;
    if (name == "training" || name == "use_input_stats") {
      traits.train_flag = static_cast<std::int32_t>(i);
    }
  }
  traits.detaches = call.name() == "aten::detach";
  for (const auto& result : call.schema().returns()) {
    traits.aliases = traits.aliases || result.alias_info() != nullptr;
  }
  traits.seeded = call.op().hasTag(at::Tag::nondeterministic_seeded);
  return traits;
}

}  // namespace

const OperatorTraits& traits_of(const plane::op::Call& call) {
  // By thread, so that no lock is needed; boxed, so that the reference outlasts a growing table.
  thread_local ska::flat_hash_map<const c10::FunctionSchema*, std::unique_ptr<OperatorTraits>>
      table;
  std::unique_ptr<OperatorTraits>& traits = table[&call.schema()];
  if (traits == nullptr) traits = std::make_unique<OperatorTraits>(find_traits(call));
  return *traits;
}

bool writes(const plane::op::Call& call, const OperatorTraits& traits, std::size_t index) {
  if (index >= 64 || ((traits.writes | traits.statistics) >> index & 1) == 0) return false;
  if ((traits.writes >> index & 1) != 0 || traits.train_flag < 0) return true;
  return call.arguments()[static_cast<std::size_t>(traits.train_flag)].toBool();
}

}  // namespace gradus::recompute::internal
