#include <gradus/persample/graph/internal/rules.h>

namespace gradus::persample::internal {

std::optional<std::vector<OperandTerm>> convolution_rule(const NodeUse& /*use*/) {
  return std::nullopt;
}

}  // namespace gradus::persample::internal
