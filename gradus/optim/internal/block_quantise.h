#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <gradus/optim/internal/loops.h>

namespace gradus::optim::internal {

/// The dynamic map of Dettmers et al. 2022 ("8-bit Optimizers via Block-wise Quantization",
/// section 2.2, made as in their released code): 0, 1, and in each decade from 10^-6 to 1 the
/// middles of equal cells of [0.1, 1] times the decade's top. Signed, the decades have 1, 2, 4,
/// ..., 64 cells on either side of zero; unsigned 2, 4, ..., 128. Signed has no -1. Each value goes
/// to the nearest, up to float32's rounding of the place. Lives as long as the process.
const CodeMap& dynamic_map(bool is_signed);

/// Blocks that @p values values fill.
constexpr std::int64_t block_count(std::int64_t values) { return (values + kBlock - 1) / kBlock; }

/// x [n] float32 on any device to codes (uint8 [n]) and absmax (float32 [blocks]), written in
/// place, with tensor operations: what CodeLoops does on the CPU, for the other devices.
void quantise_by_operations(const at::Tensor& x, bool is_signed, const at::Tensor& codes,
                            const at::Tensor& absmax);
/// The float32 [n] that codes and absmax stand for.
at::Tensor dequantise_by_operations(const at::Tensor& codes, bool is_signed,
                                    const at::Tensor& absmax);

}  // namespace gradus::optim::internal
