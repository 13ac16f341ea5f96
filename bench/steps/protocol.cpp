#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include <time.h>

#include "protocol.h"
#include <ATen/Parallel.h>
#include <torch/version.h>

namespace gradus::bench {

namespace {

// Of all threads of the process.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int serve(const std::string& name, const Program& program) {
  std::printf("{\"ready\": \"%s\", \"torch\": \"%s\", \"threads\": %d}\n", name.c_str(),
              TORCH_VERSION, at::get_num_threads());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const auto request = program.requests.find(line);
    if (request != program.requests.end()) {
      std::printf("%s\n", request->second().c_str());
      std::fflush(stdout);
      continue;
    }
    if (line != "step") {
      std::string known = "'step'";
      for (const auto& [other, answer] : program.requests) known += ", '" + other + "'";
      std::fprintf(stderr, "[bench] requests are %s; got '%s'\n", known.c_str(), line.c_str());
      return 1;
    }
    const double cpu_start = cpu_seconds();
    const auto start = std::chrono::steady_clock::now();
    const double loss = program.step();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("{\"seconds\": %.9f, \"cpu_seconds\": %.9f, \"loss\": %.17g}\n", seconds,
                cpu_seconds() - cpu_start, loss);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace gradus::bench
