#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace gradus::bench {

/// What every comparison fixes from outside.
struct StepOptions {
  int threads = 1;
  std::uint64_t seed = 0;
  std::string model = "";   ///< Of programs that know several.
  std::string mode = "";    ///< Of programs that know several.
  std::int64_t bytes = 0;   ///< A memory limit.
  bool track = false;       ///< Count tensor bytes although the mode does not need it.
  std::string folder = "";  ///< Where files go.
};

/// Runs one training step and returns its loss.
using Step = std::function<double()>;

/// What a program answers.
struct Program {
  Step step = nullptr;
  /// Other requests by name; each answers one line of JSON.
  std::map<std::string, std::function<std::string()>> requests = {};
};

/// Answers bench/compare.py: prints a "ready" line, then for each line "step" on standard input
/// runs @p program's step once and prints {"seconds": ..., "cpu_seconds": ..., "loss": ...}, and
/// for each of its other requests prints the answer. Returns at end of input.
/// @return Exit code: 0, or 1 after an unknown request.
int serve(const std::string& name, const Program& program);

// Each builds its model and data.
Program make_gpt_step(const StepOptions& options);
Program make_mlp_step(const StepOptions& options);
Program make_budget_step(const StepOptions& options);
Program make_offload_step(const StepOptions& options);
Program make_compress_step(const StepOptions& options);
Program make_optim_step(const StepOptions& options);
Program make_optim_training(const StepOptions& options);
Program make_amp_step(const StepOptions& options);
Program make_levels_step(const StepOptions& options);
Program make_private_step(const StepOptions& options);

}  // namespace gradus::bench
