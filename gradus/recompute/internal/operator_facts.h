#pragma once

// What operators do that their schemas may not say.

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace gradus::recompute::internal {

/// Whether a call of @p schema changes its argument @p index. Batch-norm schemas claim to change
/// nothing; they change the running statistics when they train. @p value_of gives an argument's
/// value.
template <typename ValueOf>
bool changes_argument(const c10::FunctionSchema& schema, std::size_t index, ValueOf&& value_of) {
  const c10::Argument& argument = schema.arguments()[index];
  if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return true;
  if (argument.name() != "running_mean" && argument.name() != "running_var") return false;
  static constexpr std::array<std::string_view, 6> kNorms{
      "aten::batch_norm",       "aten::native_batch_norm", "aten::_batch_norm_impl_index",
      "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::instance_norm"};
  if (std::find(kNorms.begin(), kNorms.end(), schema.name()) == kNorms.end()) return false;
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "training" || arguments[i].name() == "use_input_stats")
      return value_of(i).toBool();
  }
  return true;
}

}  // namespace gradus::recompute::internal
