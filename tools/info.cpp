#include <tools/info.h>

#include <ostream>
#include <string>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/ivalue.h>
#include <ATen/cpu/Utils.h>
#include <torch/headeronly/version.h>

#include <gradus/train/device.h>

namespace gradus::tools {
namespace {

// A dtype is fast on a CPU that multiplies matrices of it in hardware; elsewhere kernels convert,
// or loop.
std::string fast_cpu_dtypes() {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto has = [&](const char* name) {
    const auto found = capabilities.find(name);
    return found != capabilities.end() && found->second.isBool() && found->second.toBool();
  };
  std::string dtypes = "float32";
  if (has("avx512_bf16") || has("amx_bf16") || has("bf16")) dtypes += ", bfloat16";
  if (has("avx512_fp16") || has("amx_fp16") || has("fp16")) dtypes += ", float16";
  if (has("avx512_vnni") || has("avx_vnni") || has("amx_int8") || has("amx_tile"))
    dtypes += ", int8";
  return dtypes;
}

}  // namespace

void print_info(std::ostream& out) {
  out << "gradus    " << GRADUS_VERSION << '\n'
      << "LibTorch  " << TORCH_VERSION << '\n'
      << "threads   " << at::get_num_threads() << '\n'
      << "devices\n"
      << "  cpu     " << at::get_cpu_capability() << "; fast dtypes: " << fast_cpu_dtypes() << '\n';
  if (const auto accelerator = at::getAccelerator()) {
    for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i) {
      out << "  " << c10::Device(*accelerator, i).str()
          << "  fast dtypes: float32, float16, bfloat16 (never tried with this release)\n";
    }
  }
  out << "this build\n"
      << "  trains on      cpu" << (at::getAccelerator() ? ", accelerators (never tried)" : "")
      << '\n'
      << "  memory limits  cpu, enforced\n"
      << "  distributed    c10d " <<
#ifdef USE_C10D_GLOO
      "with gloo"
#else
      "without gloo"
#endif
      << "; this release starts ranks, and trains in one process\n";
}

}  // namespace gradus::tools
