#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include "protocol.h"
#include <ATen/Parallel.h>
#include <torch/version.h>

namespace gradus::bench {

int serve(const std::string& name, const Step& step) {
  std::printf("{\"ready\": \"%s\", \"torch\": \"%s\", \"threads\": %d}\n", name.c_str(),
              TORCH_VERSION, at::get_num_threads());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    if (line != "step") {
      std::fprintf(stderr, "[bench] requests are 'step'; got '%s'\n", line.c_str());
      return 1;
    }
    const auto start = std::chrono::steady_clock::now();
    const double loss = step();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("{\"seconds\": %.9f, \"loss\": %.17g}\n", seconds, loss);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace gradus::bench
