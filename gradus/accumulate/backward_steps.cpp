#include <gradus/accumulate/backward_steps.h>

#include <mutex>
#include <unordered_map>

#include <gradus/accumulate/internal/accumulators.h>
#include <gradus/base/error.h>
#include <gradus/base/names.h>

namespace gradus::accumulate {
namespace {

// One entry a parameter and owner.
struct Stepping {
  const void* owner = nullptr;
  bool accumulates = false;
};
struct Accumulating {
  const void* owner = nullptr;
  internal::Obstacles obstacles{};
};
struct Registry {
  std::mutex mutex{};
  std::unordered_multimap<const void*, Stepping> steppers{};
  std::unordered_multimap<const void*, Accumulating> accumulators{};
};

Registry& registry() {
  static auto* const kept = new Registry;  // outlives owners of static storage
  return *kept;
}

const std::string& obstacle(const internal::Obstacles& obstacles, bool accumulates) {
  return obstacles.always.empty() && !accumulates ? obstacles.if_each_pass_steps : obstacles.always;
}

void check(const char* component, const at::Tensor& parameter, const std::string& obstacle) {
  GRADUS_CHECK(component, obstacle.empty(),
               "an OptimizerInBackward frees each gradient inside backward and must not share a "
               "parameter, ",
               base::describe_tensor(parameter), ", with what needs it later: ", obstacle);
}

template <typename Entries>
void remove(Entries& entries, const void* owner) {
  std::erase_if(entries, [&](const auto& entry) { return entry.second.owner == owner; });
}

}  // namespace

BackwardSteps::BackwardSteps(const std::vector<at::Tensor>& parameters, bool accumulates) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  for (const at::Tensor& parameter : parameters) {
    const auto [begin, end] = known.accumulators.equal_range(parameter.unsafeGetTensorImpl());
    for (auto it = begin; it != end; ++it)
      check("in_backward", parameter, obstacle(it->second.obstacles, accumulates));
  }
  for (const at::Tensor& parameter : parameters)
    known.steppers.emplace(parameter.unsafeGetTensorImpl(), Stepping{this, accumulates});
}

BackwardSteps::~BackwardSteps() {
  const std::lock_guard lock(registry().mutex);
  remove(registry().steppers, this);
}

namespace internal {

Accumulator::Accumulator(const char* component, const std::vector<at::Tensor>& parameters,
                         const Obstacles& obstacles) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  for (const at::Tensor& parameter : parameters) {
    const auto [begin, end] = known.steppers.equal_range(parameter.unsafeGetTensorImpl());
    for (auto it = begin; it != end; ++it)
      check(component, parameter, obstacle(obstacles, it->second.accumulates));
  }
  if (obstacles.always.empty() && obstacles.if_each_pass_steps.empty()) return;
  for (const at::Tensor& parameter : parameters)
    known.accumulators.emplace(parameter.unsafeGetTensorImpl(), Accumulating{this, obstacles});
}

Accumulator::~Accumulator() {
  const std::lock_guard lock(registry().mutex);
  remove(registry().accumulators, this);
}

}  // namespace internal
}  // namespace gradus::accumulate
