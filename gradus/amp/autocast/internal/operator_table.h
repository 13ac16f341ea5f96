#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gradus/amp/autocast/operator_lists.h>

namespace c10 {
class FunctionSchema;
class OperatorHandle;
}  // namespace c10

namespace gradus::amp::internal {

/// What autocast has to know of one overload.
struct OperatorRule {
  Policy policy = Policy::none;
  std::int16_t dtype_argument = -1;       ///< Index of "dtype", of fp32_result.
  std::uint32_t saturated_arguments = 0;  ///< A bit for each number that must fit a tensor's type.
  std::uint32_t kept_arguments = 0;       ///< A bit for each tensor that is never cast.
};

/// OperatorLists made ready for use at each operator: rules by the address of the schema, which is
/// an operator's own for as long as it is registered.
class OperatorTable {
 public:
  static std::shared_ptr<const OperatorTable> of(const OperatorLists& lists);

  explicit OperatorTable(const OperatorLists& lists);

  /// The rule of the operator, or null: nothing to do.
  const OperatorRule* find(const c10::FunctionSchema& schema) const {
    for (std::size_t at = slot(&schema);; at = (at + 1) & mask_) {
      if (slots_[at].schema == &schema) return &slots_[at].rule;
      if (slots_[at].schema == nullptr) return nullptr;
    }
  }

 private:
  struct Slot {
    const c10::FunctionSchema* schema = nullptr;
    OperatorRule rule{};
  };

  std::size_t slot(const c10::FunctionSchema* schema) const {
    // Fibonacci hashing: addresses differ in their middle bits.
    return (reinterpret_cast<std::uintptr_t>(schema) * 0x9E3779B97F4A7C15u >> 32) & mask_;
  }
  void insert(const c10::OperatorHandle& op, OperatorRule rule);

  std::vector<Slot> slots_;
  std::size_t mask_ = 0;
};

/// Overloads by operator name ("aten::sum" -> "", "dim_IntList") as registered now.
std::vector<std::string> overloads_of(const std::string& name);

}  // namespace gradus::amp::internal
