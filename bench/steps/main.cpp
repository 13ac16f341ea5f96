// gradus_bench_step NAME [--threads N] [--seed N] ...: one of the live programs of
// bench/compare.py.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>

#include "protocol.h"
#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <gradus/base/host_heap.h>

namespace {

gradus::bench::StepOptions parse(int argc, char** argv) {
  gradus::bench::StepOptions options;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--threads") options.threads = std::stoi(value);
    if (flag == "--seed") options.seed = std::stoull(value);
    if (flag == "--model") options.model = value;
    if (flag == "--mode") options.mode = value;
    if (flag == "--bytes") options.bytes = std::stoll(value);
    if (flag == "--track") options.track = value == "1";
    if (flag == "--folder") options.folder = value;
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gradus::bench;
  try {
    const std::string name = argc > 1 ? argv[1] : "";
    const StepOptions options = parse(argc, argv);
    const char* const heap = std::getenv("GRADUS_BENCH_HEAP");
    if (heap == nullptr || std::string(heap) != "default") gradus::base::keep_freed_memory();
    at::set_num_threads(options.threads);
    torch::manual_seed(options.seed);
    const std::map<std::string, Program (*)(const StepOptions&)> programs{
        {"gpt-step", make_gpt_step},        {"mlp-step", make_mlp_step},
        {"budget", make_budget_step},       {"offload", make_offload_step},
        {"compress", make_compress_step},   {"optim", make_optim_step},
        {"optim-gpt", make_optim_training}, {"amp", make_amp_step},
        {"levels", make_levels_step},       {"private", make_private_step}};
    const auto found = programs.find(name);
    if (found != programs.end()) return serve(name, found->second(options));
    std::fprintf(stderr,
                 "usage: gradus_bench_step gpt-step|mlp-step|budget|offload|compress|amp|private "
                 "[--threads N] "
                 "[--seed N] [--model NAME] [--mode NAME] [--bytes N] "
                 "[--track 1] [--folder PATH]; got '%s'\n",
                 name.c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[bench] %s\n", error.what());
    return 1;
  }
}
