#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/base/error.h>
#include <gradus/persample/vmap/examples.h>

namespace gradus::persample {

/// The loss does something that cannot be computed for several examples at once; nothing was
/// changed, and loop_gradients() can compute it.
class Unsupported : public UserError {
 public:
  Unsupported(std::string operator_name, const std::string& reason);
  /// "aten::rrelu_with_noise"; empty if it happened outside any operator.
  const std::string& operator_name() const { return operator_name_; }

 private:
  std::string operator_name_;
};

/// What a call of vmap_gradients() did.
struct VmapReport {
  std::int64_t passes = 0;         ///< Calls of the loss function that were needed.
  std::int64_t splits = 0;         ///< Passes given up because examples took different ways.
  std::int64_t largest_chunk = 0;  ///< Most examples in one pass.
  std::int64_t peak_bytes = 0;     ///< Highest working memory of a pass; 0 without memory_bytes.
  std::string first_split{};       ///< The operator at which examples first took different ways.
};

struct VmapOptions {
  std::int64_t chunk = 0;  ///< Most examples at once; 0: all.
  /// Bound of the working memory: what a pass takes beyond what was live when called and beyond the
  /// results. Passes are sized by measurement, the first with one example. CPU only; installs
  /// base::MemoryTracker and resets its peak. 0: no bound.
  std::int64_t memory_bytes = 0;
  /// Seeds the random numbers of each example as LoopOptions::seed does: dropout draws the masks
  /// that the loop draws. Unset: a seed drawn from the CPU's default generator.
  std::optional<std::uint64_t> seed = std::nullopt;
  /// Where control flow or a shape depends on the values of an example (item(), a boolean mask, the
  /// lengths of packed sequences): runs the examples in groups that take the same way. Off:
  /// refuses, naming the operator.
  bool split = true;
  VmapReport* report = nullptr;  ///< Filled if set, also when an exception passes.
};

/// One gradient an example by functorch's vmap(grad(loss)): the loss function is called with one
/// example that stands for all, its parameters replaced in the operator plane.
///
/// Works for an unmodified module: recurrent ones, attention, packed sequences, writes into fresh
/// tensors, control flow that depends on values, torch::autograd::Function. Leaves .grad,
/// parameters and generators (but for the one draw of a seed) as they were. Works under
/// at::NoGradGuard.
/// @return As loop_gradients(); examples in batch order.
/// @throws Unsupported where only the loop can help: a write into a tensor made outside the loss
/// (running statistics), access to a data pointer, a random operator without a rule; never gives a
/// wrong number instead. UserError on a malformed batch, parameter, loss or option, if one example
/// alone passes memory_bytes, and inside another functorch transform. What @p loss throws passes.
std::vector<at::Tensor> vmap_gradients(const std::vector<NamedParameter>& parameters,
                                       const LossFunction& loss, const Batch& batch,
                                       const VmapOptions& options = {});

}  // namespace gradus::persample
