#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace gradus::bench {

/// What every comparison fixes from outside.
struct StepOptions {
  int threads = 1;
  std::uint64_t seed = 0;
};

/// Runs one training step and returns its loss.
using Step = std::function<double()>;

/// A program named on the command line: builds its model and data, and returns its step.
using MakeStep = Step (*)(const StepOptions& options);

/// Answers bench/compare.py: prints a "ready" line, then for each line "step" on standard input
/// runs @p step once and prints {"seconds": ..., "loss": ...}. Returns at end of input.
/// @return Exit code: 0, or 1 after an unknown request.
int serve(const std::string& name, const Step& step);

Step make_gpt_step(const StepOptions& options);
Step make_mlp_step(const StepOptions& options);

}  // namespace gradus::bench
