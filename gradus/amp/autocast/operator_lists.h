#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace gradus::amp {

/// What autocast does with the floating-point arguments of an operator (never with float64 ones).
enum class Policy : std::uint8_t {
  none,             ///< Leaves them: the operator runs in the type of its arguments.
  lower_precision,  ///< Casts to the region's dtype.
  fp32,             ///< Casts float16 and bfloat16 to float32.
  fp32_result,      ///< Sets the operator's dtype argument to float32, unless the caller set it.
  widest,  ///< Casts to the widest type among them: the region's dtype only if all have it.
  banned,  ///< Refuses the call: the operator cannot be computed safely in this region.
};

/// "lower_precision", "fp32" and so on. Static storage.
std::string_view policy_name(Policy policy);

namespace internal {
class OperatorTable;
}

/// Which operator runs in which precision under autocast. Functional overloads only: in-place and
/// out= variants run in the type of what they write. An operator called inside a listed one runs in
/// the type of what it is given.
///
/// A name is "aten::linear", or "linear" for short, for all overloads of an operator, or
/// "aten::pow.Tensor_Scalar" for one; what is set for an overload comes before what is set for the
/// operator. Copies share their content until one changes. Not for use from two threads at once
/// while one changes it.
///
///     auto lists = OperatorLists::defaults(at::kCPU, at::kBFloat16);
///     lists.set("linear", Policy::fp32);
///     const AutocastGuard autocast({.dtype = at::kBFloat16, .lists = lists});
class OperatorLists {
 public:
  /// All operators have the policy `none`.
  OperatorLists();

  /// What a guard without lists uses: torch 2.13's lists for the device type and, beyond them, on
  /// the CPU float32 for what is sensitive and what torch's CPU list leaves out (sums, means,
  /// softmax, norms, powers, exponentials); in float16, float32 for masked_fill, whose values
  /// exceed the type, and a ban on binary_cross_entropy, whose gradient does. Or what
  /// set_defaults() put in place of these.
  /// @throws UserError if @p dtype is neither float16 nor bfloat16.
  static OperatorLists defaults(c10::DeviceType device, c10::ScalarType dtype);
  /// The lists of torch 2.13 as they are; for devices other than the CPU those of CUDA.
  static OperatorLists of_torch(c10::DeviceType device);
  /// Makes @p lists the process's default for regions of @p dtype on @p device that begin from now
  /// on. Thread-safe.
  static void set_defaults(c10::DeviceType device, c10::ScalarType dtype, OperatorLists lists);
  /// Takes back every set_defaults().
  static void reset_defaults();

  /// @throws UserError if no operator has that name; the message has near names. UserError for
  /// fp32_result if the operator has no dtype argument.
  OperatorLists& set(std::string_view name, Policy policy);
  OperatorLists& set_all(const std::vector<std::string>& names, Policy policy);
  /// @throws UserError as set().
  Policy policy(std::string_view name) const;
  /// Sorted; operators of the policy `none` only where they were set to it.
  std::vector<std::string> operators(Policy policy) const;
  /// A line for each policy with its operators, sorted.
  std::string text() const;

  bool operator==(const OperatorLists& other) const { return *policies_ == *other.policies_; }

 private:
  friend class internal::OperatorTable;
  using Policies = std::map<std::string, Policy, std::less<>>;

  std::shared_ptr<const Policies> policies_;
  mutable std::shared_ptr<const internal::OperatorTable> table_;  ///< Made at first need.
};

std::ostream& operator<<(std::ostream& out, const OperatorLists& lists);

}  // namespace gradus::amp
