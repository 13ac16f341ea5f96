#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/version.h>

// What the programs share that bench/compare.py runs as a Measurement.

namespace gradus::bench {

struct MeasurementOptions {
  int threads = 1;
  int pairs = 60;
  std::uint64_t seed = 0;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The line that compare.py reads. @p calls: what a sample stands for.
inline void print_samples(const char* name, long long calls, const std::vector<double>& samples) {
  std::string text;
  for (const double sample : samples) text += (text.empty() ? "" : ", ") + std::to_string(sample);
  std::printf(
      "{\"ready\": \"%s\", \"torch\": \"%s\", \"threads\": %d, \"calls\": %lld, \"samples\": "
      "[%s]}\n",
      name, TORCH_VERSION, at::get_num_threads(), calls, text.c_str());
}

/// Reads the flags and calls @p run with as many threads as they say; returns its exit code, or 1
/// after an exception.
inline int measurement_main(int argc, char** argv, int (*run)(const MeasurementOptions& options)) {
  try {
    MeasurementOptions options;
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string flag = argv[i];
      if (flag == "--threads") options.threads = std::stoi(argv[i + 1]);
      if (flag == "--pairs") options.pairs = std::stoi(argv[i + 1]);
      if (flag == "--seed") options.seed = std::stoull(argv[i + 1]);
    }
    at::set_num_threads(options.threads);
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[bench] %s\n", error.what());
    return 1;
  }
}

}  // namespace gradus::bench
