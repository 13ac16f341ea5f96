#include <gradus/privacy/nn/plain_state.h>

#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/privacy/nn/internal/plain_slots.h>

namespace gradus::privacy::nn {

PlainState plain_state(const torch::nn::Module& module) {
  PlainState state("State");
  for (const auto& slot : internal::plain_slots(module)) state.insert(slot.name, slot.value());
  return state;
}

void load_plain_state(torch::nn::Module& module, const PlainState& state) {
  const auto slots = internal::plain_slots(module);
  torch::OrderedDict<std::string, bool> expected;
  std::string faults;
  for (const auto& slot : slots) {
    expected.insert(slot.name, true);
    const at::Tensor* value = state.find(slot.name);
    const std::string fault = value == nullptr ? "missing " + slot.name : slot.fault(*value);
    if (!fault.empty()) faults += "\n  " + fault;
  }
  for (const auto& item : state) {
    if (!expected.contains(item.key())) faults += "\n  unexpected " + item.key();
  }
  GRADUS_CHECK("plain_state", faults.empty(), "the state must fit the module; it does not:", faults,
               "\n");
  for (const auto& slot : slots) slot.set(state[slot.name]);
}

}  // namespace gradus::privacy::nn
