#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gradus/optim/optimizer.h>
#include <gradus/train/config.h>

namespace gradus::amp {
class Amp;
}
namespace torch::nn {
class Module;
}

namespace gradus::train {

/// What optimizer.kind may be. "muon" is Muon for the matrices between embedding and output, and
/// AdamW for the rest.
const std::vector<std::string>& optimizer_kinds();

/// The kind that does the same with its state in 8 bits: "adamw8bit" for "adamw". Unset where there
/// is none.
std::optional<std::string> eight_bit_kind(const std::string& kind);

/// The optimizer that @p config describes over @p module's weights as @p amp keeps them, at
/// learning rate @p lr. Weight decay goes to parameters of two or more dimensions.
/// @throws UserError on an unknown kind.
std::unique_ptr<optim::Optimizer> make_optimizer(const TrainConfig& config, const amp::Amp& amp,
                                                 const torch::nn::Module& module, double lr);

}  // namespace gradus::train
