#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/vmap/examples.h>

namespace gradus::persample {

struct LoopOptions {
  /// Which examples, in this order; unset: all. Their gradients only are computed.
  std::optional<std::vector<std::int64_t>> examples = std::nullopt;
  /// Draws the random numbers of example i from default generators seeded with
  /// example_seed(seed, i), and puts the generators back afterwards. Unset: they run on from
  /// example to example.
  std::optional<std::uint64_t> seed = std::nullopt;
};

/// One gradient an example by a forward and a backward pass each: slow, and the oracle of all other
/// engines, because it does nothing but train on a batch of one.
///
/// @return For each parameter a dense tensor [B, *shape] on its device and of its dtype, row i the
/// gradient of example i's loss (zeros where the loss does not use it); undefined for a parameter
/// that wants no gradient. Leaves .grad alone; what the backward pass itself adds there (a
/// checkpoint that runs backward() inside) is counted in. Works under at::NoGradGuard too. What @p
/// loss changes elsewhere (running statistics) it changes once an example.
/// @throws UserError on a malformed batch, parameter or loss; what @p loss throws passes.
std::vector<at::Tensor> loop_gradients(const std::vector<NamedParameter>& parameters,
                                       const LossFunction& loss, const Batch& batch,
                                       const LoopOptions& options = {});

}  // namespace gradus::persample
