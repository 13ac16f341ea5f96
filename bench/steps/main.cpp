// gradus_bench_step NAME [--threads N] [--seed N]: one of the two live programs of
// bench/compare.py.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "protocol.h"
#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <gradus/base/host_heap.h>

int main(int argc, char** argv) {
  using namespace gradus::bench;
  try {
    const std::string name = argc > 1 ? argv[1] : "";
    StepOptions options;
    for (int i = 2; i + 1 < argc; i += 2) {
      const std::string flag = argv[i];
      if (flag == "--threads") options.threads = std::stoi(argv[i + 1]);
      if (flag == "--seed") options.seed = std::stoull(argv[i + 1]);
    }
    const char* const heap = std::getenv("GRADUS_BENCH_HEAP");
    if (heap == nullptr || std::string(heap) != "default") gradus::base::keep_freed_memory();
    at::set_num_threads(options.threads);
    torch::manual_seed(options.seed);
    if (name == "gpt-step") return serve(name, make_gpt_step(options));
    if (name == "mlp-step") return serve(name, make_mlp_step(options));
    std::fprintf(stderr,
                 "usage: gradus_bench_step gpt-step|mlp-step [--threads N] [--seed N]; got '%s'\n",
                 name.c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[bench] %s\n", error.what());
    return 1;
  }
}
