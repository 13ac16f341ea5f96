#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace c10 {
struct IValue;
}  // namespace c10

namespace gradus::recompute {

/// What a checkpoint does with an operator's results. "must" is not to be overridden by a planner;
/// otherwise it differs from "prefer" only where keeping is impossible: a view, or an operator that
/// changes its argument, has no results of its own to keep.
enum class Keep : std::uint8_t {
  must_save,         ///< Keep; an error by name where that is impossible.
  prefer_save,       ///< Keep where possible.
  must_recompute,    ///< Make again for backward.
  prefer_recompute,  ///< Make again for backward.
  offload,  ///< Keep, and leave the place to a saved-tensor guard of Order::offload; prefer_save
            ///< without one.
};

/// One operator of the region, after its first run.
struct OperatorCall {
  std::string_view name;                 ///< "aten::mm". Composite operators ("aten::linear") come
                                         ///< too, after their parts; keeping one frees its parts.
  c10::ArrayRef<c10::IValue> arguments;  ///< By position, before the call.
  c10::ArrayRef<c10::IValue> results;
};

/// Which operators' results a checkpointed region keeps (torch's
/// create_selective_checkpoint_contexts). Asked once an operator, in the first run: the second
/// gives the kept results instead of running the operators that made them. Bits are those of a
/// plain run.
struct SelectivePolicy {
  std::function<Keep(const OperatorCall&)> decide = nullptr;  ///< None: everything is recomputed.
  /// Allow in-place operators on kept results inside the region, at the price of a copy of them.
  /// Otherwise such an operator is an error that names both if the result must be saved; one that
  /// is only preferred is made again.
  bool allow_mutation = false;

  explicit operator bool() const { return decide != nullptr; }
};

/// Keeps (must_save) the results of the operators named, recomputes all others.
/// @throws UserError if a name does not look like "aten::mm", or no operator has it.
SelectivePolicy save_operators(const std::vector<std::string>& names);

/// Keeps every matrix product, convolution and fused attention; recomputes the rest.
SelectivePolicy save_matrix_products();

/// Megatron's selective recomputation (Korthikanti et al. 2022, "Reducing Activation Recomputation
/// in Large Transformer Models", section 5): keeps the products with weights (mm, addmm,
/// convolution), recomputes attention's scores, softmax, dropout and products with values, whose
/// memory grows with the square of the length.
SelectivePolicy recompute_attention();

/// Keeps everything but pointwise operators (activations, dropout, sums), which are cheap to make
/// again and dear to keep.
SelectivePolicy recompute_pointwise();

}  // namespace gradus::recompute
