#pragma once

#include <gradus/persample/graph/rule.h>

// The rules of LibTorch's own operators; each gives nullopt for what it does not know.

namespace gradus::persample::internal {

std::optional<std::vector<OperandTerm>> product_rule(const NodeUse& use);
std::optional<std::vector<OperandTerm>> convolution_rule(const NodeUse& use);
std::optional<std::vector<OperandTerm>> normalisation_rule(const NodeUse& use);
std::optional<std::vector<OperandTerm>> embedding_rule(const NodeUse& use);
std::optional<std::vector<OperandTerm>> embedding_bag_rule(const NodeUse& use);
std::optional<std::vector<OperandTerm>> elementwise_rule(const NodeUse& use);
std::optional<std::vector<OperandTerm>> recurrent_rule(const NodeUse& use);

/// Sums @p gradient, whose examples lie as @p layout says, to [B, *sizes]: the per-sample gradient
/// of an operand of @p sizes that was broadcast. Nullopt where the example dimension is one that
/// the operand has too.
std::optional<at::Tensor> reduced_by_example(const at::Tensor& gradient, const Layout& layout,
                                             const std::vector<std::int64_t>& sizes);

}  // namespace gradus::persample::internal
