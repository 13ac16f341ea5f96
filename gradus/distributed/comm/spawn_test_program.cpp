// For spawn_test.cpp. As a launcher:  program launch WORLD GRACE COMMAND...
//                     as a rank:      program rank      (computes in parallel, then writes "sum S
//                     of rank R") as both:        program warm WORLD (computes in parallel, then
//                     launches itself as ranks)

#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>

#include <gradus/base/error.h>
#include <gradus/distributed/comm/launch.h>
#include <gradus/distributed/comm/spawn.h>

namespace {

using namespace gradus::distributed::comm;

// A matrix product and a reduction over more elements than one thread takes: 256^3 ones.
std::int64_t compute_in_parallel() {
  at::set_num_threads(2);
  return static_cast<std::int64_t>(
      at::ones({256, 256}).mm(at::ones({256, 256})).sum().item<double>());
}

int launch(const SpawnOptions& options) {
  try {
    const auto result = run_ranks(options);
    return result.interrupted_by == 0 ? 0 : 128 + result.interrupted_by;
  } catch (const gradus::CommError& error) {
    std::cerr << error.what() << '\n';
    return 1;
  } catch (const gradus::UserError& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv, argv + argc);
  if (argc >= 5 && words[1] == "launch") {
    return launch({.world_size = std::stoi(words[2]),
                   .command = {words.begin() + 4, words.end()},
                   .grace_s = std::stod(words[3])});
  }
  if (argc == 3 && words[1] == "warm") {
    compute_in_parallel();
    return launch({.world_size = std::stoi(words[2]), .command = {words[0], "rank"}});
  }
  if (argc == 2 && words[1] == "rank") {
    const auto info = discover(process_environment());
    std::cout << "sum " << compute_in_parallel() << " of rank " << info.rank << '\n';
    return 0;
  }
  return 64;
}
