// A training step of one of memory_models.h with its saved activations on disk, read ahead of
// backward (mode prefetch) or only when asked for (mode on-demand).

#include <chrono>
#include <memory>
#include <sstream>
#include <string>

#include "memory_models.h"
#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/offload/offload.h>
#include <gradus/optim/sgd.h>

namespace gradus::bench {

namespace {

struct Training {
  MemoryModel model;
  optim::SGD optimizer;
  offload::OffloadOptions offload = {};
  offload::OffloadStatistics last = {};
  double last_seconds = 0.0;

  explicit Training(const StepOptions& options)
      : model(make_memory_model(options.model,
                                at::make_generator<at::CPUGeneratorImpl>(options.seed))),
        optimizer(model.module->parameters(), {.lr = model.learning_rate}) {
    offload.target = offload::Target::disk;
    offload.disk.directory = options.folder;
    offload.resident = model.module->parameters();
    offload.resident.insert(offload.resident.end(), model.batch.begin(), model.batch.end());
    if (options.mode == "on-demand") offload.window_bytes = 0;
  }

  double run() {
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    const offload::OffloadGuard guard(offload);
    const at::Tensor loss = model.loss();
    loss.backward();
    optimizer.step();
    const double value = loss.item<double>();
    last = guard.statistics();
    last_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return value;
  }

  // Of the last step.
  std::string stall() const {
    std::ostringstream answer;
    answer << "{\"seconds\": " << last_seconds << ", \"write_wait_s\": " << last.write_wait_s
           << ", \"read_wait_s\": " << last.read_wait_s << ", \"bytes_out\": " << last.bytes_out
           << ", \"bytes_in\": " << last.bytes_in << ", \"prefetch_hits\": " << last.prefetch_hits
           << ", \"prefetch_late\": " << last.prefetch_late
           << ", \"prefetch_misses\": " << last.prefetch_misses
           << ", \"resident_hits\": " << last.resident_hits << ", \"access\": \"" << last.access
           << "\"}";
    return answer.str();
  }
};

}  // namespace

Program make_offload_step(const StepOptions& options) {
  GRADUS_CHECK("bench", options.mode == "prefetch" || options.mode == "on-demand",
               "--mode must be prefetch or on-demand; got '", options.mode, "'");
  const auto training = std::make_shared<Training>(options);
  return {.step = [training] { return training->run(); },
          .requests = {{"stall", [training] { return training->stall(); }}}};
}

}  // namespace gradus::bench
