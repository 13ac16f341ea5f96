#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::persample {

/// The inputs of a loss. Dimension 0 of each tensor counts examples: B of them, at least one.
using Batch = std::vector<at::Tensor>;

/// Gives one loss an example, shape [B], for a batch of any number B of examples. For one example a
/// scalar will do as well. It must not let one example change another's loss.
using LossFunction = std::function<at::Tensor(const Batch& batch)>;

/// A parameter and what messages call it.
struct NamedParameter {
  std::string name{};
  at::Tensor tensor{};
};

/// The number B of examples in @p batch.
/// @throws UserError unless it holds a tensor, all have the same size B >= 1 in dimension 0, and
/// none is sparse or undefined.
std::int64_t count_examples(const Batch& batch);

/// The examples at @p indices, in that order, as a batch of its own: a copy, detached, so that a
/// loss that changes its input in place changes nothing else.
/// @throws UserError as count_examples(), and if an index is not in [0, B) or there is none.
Batch examples_at(const Batch& batch, const std::vector<std::int64_t>& indices);

/// What a loss gave for @p examples examples, as their sum (a scalar that keeps its graph).
/// @throws UserError unless @p loss has shape [examples], or is a scalar and examples = 1, and is
/// of a real floating dtype.
at::Tensor summed_loss(const at::Tensor& loss, std::int64_t examples);

/// True if a gradient of @p parameter is wanted: it is a leaf that requires one.
/// @throws UserError if it is undefined, or requires a gradient and is no leaf.
bool wants_gradient(const NamedParameter& parameter);

/// The seed of the random numbers of example number @p index under @p seed: the same whatever batch
/// or chunk the example is in (SplitMix64; Steele, Lea and Flood 2014).
std::uint64_t example_seed(std::uint64_t seed, std::int64_t index);

}  // namespace gradus::persample
