#include <gradus/base/rng.h>

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>

namespace gradus::base {

RngState RngState::capture(const std::vector<at::Generator>& custom) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (const auto accelerator = at::getAccelerator()) {
    const auto count = at::accelerator::deviceCount();
    for (c10::DeviceIndex i = 0; i < count; ++i) {
      generators.push_back(at::globalContext().defaultGenerator(c10::Device(*accelerator, i)));
    }
  }
  generators.insert(generators.end(), custom.begin(), custom.end());
  const ArenaScope host(Arena::host);  // the state of a device's generator lives on the host too
  RngState state;
  for (at::Generator& generator : generators) {
    GRADUS_CHECK("rng", generator.defined(),
                 "every generator must be defined; got an undefined one");
    const std::lock_guard lock(generator.mutex());
    at::Tensor bytes = generator.get_state();
    state.states_.emplace_back(generator, std::move(bytes));
  }
  return state;
}

void RngState::restore() const {
  for (const auto& [generator, bytes] : states_) {
    at::Generator target = generator;
    const std::lock_guard lock(target.mutex());
    target.set_state(bytes);
  }
}

std::vector<at::Tensor> RngState::tensors() const {
  std::vector<at::Tensor> result;
  for (const auto& entry : states_) result.push_back(entry.second);
  return result;
}

void RngState::load(const std::vector<at::Tensor>& tensors) {
  GRADUS_CHECK("rng", tensors.size() == states_.size(), "the saved random state must hold ",
               states_.size(), " generators (one for the CPU and for each device here); got ",
               tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    GRADUS_CHECK("rng", tensors[i].numel() == states_[i].second.numel(), "the state of generator ",
                 i, " must have ", states_[i].second.numel(), " bytes; got ", tensors[i].numel());
    states_[i].second = tensors[i].clone();
  }
}

}  // namespace gradus::base
