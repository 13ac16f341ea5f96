#pragma once

// Operators by policy as torch 2.13 has them (aten/src/ATen/autocast_mode.cpp), for CPU and CUDA.
// operator_lists_test.cpp compares the names with what the running LibTorch registers.

#include <string>
#include <vector>

namespace gradus::amp::internal {

const std::vector<std::string>& torch_cpu_lower_precision();
const std::vector<std::string>& torch_cpu_fp32();
const std::vector<std::string>& torch_cpu_widest();
const std::vector<std::string>& torch_cuda_lower_precision();
const std::vector<std::string>& torch_cuda_fp32();
const std::vector<std::string>& torch_cuda_fp32_result();
const std::vector<std::string>& torch_cuda_widest();
const std::vector<std::string>& torch_cuda_banned();

/// Beyond torch's: what reduces or exponentiates, and so loses most in lower precision.
const std::vector<std::string>& sensitive_fp32();
const std::vector<std::string>& sensitive_fp32_result();
/// Beyond torch's, on the CPU: products of CUDA's list that fail on mixed types.
const std::vector<std::string>& further_cpu_lower_precision();

}  // namespace gradus::amp::internal
