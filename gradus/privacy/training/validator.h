#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace gradus::privacy {

/// Something about a layer that private training cannot have, or had better not.
struct PrivacyIssue {
  std::string module{};  ///< "features.1"; "" if the model itself is meant.
  std::string type{};    ///< "BatchNorm2d".
  std::string reason{};
  std::string cure{};
  bool refused = true;   ///< False: only advice.
  bool fixable = false;  ///< fix() can cure it.
};

struct ValidatorOptions {
  /// An accumulate::GroupNormGuard lives wherever the model runs, so that its BatchNorm layers
  /// compute group normalisation.
  bool group_norm_guard = false;
  /// The optimizer steps on wider master weights of 16-bit parameters.
  bool master_weights = false;
};

/// What is wrong with @p model, in the order of its modules:
///  - BatchNorm in training mode, or without running statistics (an example's output depends on the
///    others), frozen or not; in eval mode it is fine;
///  - InstanceNorm in training mode that keeps running statistics (they are released without
///  noise);
///  - Embedding and EmbeddingBag with scale_grad_by_freq (an example's gradient depends on the
///  others)
///    or max_norm (the forward pass changes the weights, without noise, in the rows that it reads);
///  - advice: 16-bit parameters without master weights; RNN, LSTM and GRU on CUDA, whose fused
///    kernels hide the steps.
/// What a layer does that is none of torch::nn's is for SampleGradients to see, which changes
/// examples and compares, and for DPOptimizer, which watches buffers.
std::vector<PrivacyIssue> find_issues(const torch::nn::Module& model,
                                      const ValidatorOptions& options = {});

/// @throws UserError naming each layer that is refused and its cure.
void validate(const torch::nn::Module& model, const ValidatorOptions& options = {});

/// One line: "features.1 (BatchNorm2d): reason. Cure."
std::string describe(const PrivacyIssue& issue);

/// What fix() did, and what it could not do.
struct FixReport {
  std::vector<std::string> fixed{};       ///< "features.1: BatchNorm2d -> GroupNorm(32, 64)".
  std::vector<PrivacyIssue> remaining{};  ///< Refused still.
};

/// Cures what can be cured in place: BatchNorm in a Sequential becomes GroupNorm (groups: the
/// largest divisor of the C channels that is at most min(32, C / 2), weights copied), running
/// statistics of InstanceNorm, scale_grad_by_freq and max_norm are switched off.
///
/// A C++ forward calls its own handle to a layer, so that a BatchNorm which is a member of a custom
/// module, or stands in a ModuleList, cannot be replaced from outside: it remains, and is named.
/// Replaced layers have new parameters: make the optimizer afterwards.
FixReport fix(torch::nn::Module& model);

}  // namespace gradus::privacy
