#include <gradus/recompute/internal/reentrant.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/internal/region.h>
#include <gradus/recompute/internal/storage.h>
#include <gradus/recompute/internal/surroundings.h>

namespace gradus::recompute::internal {
namespace {

using Tensors = std::vector<at::Tensor>;
using RegionFunction = std::function<Tensors(Tensors)>;

// What the node keeps beside its inputs.
struct ReentrantRegion final : torch::CustomClassHolder {
  explicit ReentrantRegion(const CheckpointOptions& with) : options(with), surroundings(with) {}

  const CheckpointOptions options;
  RegionFunction again;
  RegionRecord record;
  const Surroundings surroundings;
  std::vector<bool> given;          // which inputs are defined; only those are the node's
  std::vector<bool> requires_grad;  // of those
  std::vector<bool> defined;        // which outputs are

  Compare compare() const {
    return options.determinism_check == DeterminismCheck::none ? Compare::nothing
                                                               : Compare::program;
  }

  // Fills in the inputs that are not defined.
  Tensors all_inputs(Tensors inputs) const {
    Tensors all(given.size());
    std::size_t next = 0;
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (given[i]) all[i] = std::move(inputs[next++]);
    }
    return all;
  }
};

// Made as the library is loaded: an operator here would be one that an outer region sees in one of
// its runs only. Never gets a gradient.
const at::Tensor kNeedsGradient = at::empty({0}).requires_grad_();

void refuse_changed_inputs(const RegionRecord& record, const Tensors& inputs) {
  for (const at::Tensor& input : inputs) {
    if (!record.changed.contains(storage_of(input))) continue;
    throw UserError(base::join(
        "[checkpoint] a reentrant region must not change its arguments in place; it changed ",
        base::describe_tensor(input),
        ". Change a clone, or leave CheckpointOptions::reentrant "
        "off."));
  }
}

// Keeps nothing of the first run, whose graph goes with it.
class KeepNothing final : public plane::saved::Hooks {
 public:
  std::optional<plane::saved::Packed> pack(const plane::saved::Value&) override {
    return plane::saved::Packed{{}, [](const Tensors&) -> at::Tensor {
                                  throw UserError(
                                      "[checkpoint] a reentrant region keeps nothing of its first "
                                      "run, and a backward pass inside it asked for it. Leave "
                                      "CheckpointOptions::reentrant off.");
                                }};
  }
  bool reads_data() const override { return false; }
};

class Reentrant : public torch::autograd::Function<Reentrant> {
 public:
  // The last argument needs a gradient, so that there is a node though no input needs one; it also
  // tells whether a backward pass computes all gradients (see backward()).
  static Tensors forward(torch::autograd::AutogradContext* context,
                         const c10::intrusive_ptr<ReentrantRegion>& region,
                         const RegionFunction* first, at::TensorList list, const at::Tensor&) {
    const Tensors inputs = list.vec();
    const auto recorder = std::make_shared<Recorder>(
        region->record,
        Recorder::Options{.debug = region->options.debug, .compare = region->compare()});
    Tensors results;
    {
      // As in the second run: where nothing is recorded, kernels may round otherwise (oneDNN's
      // LSTM does with AVX2).
      const at::AutoGradMode grad(true);
      const InnermostRegion innermost(recorder.get());
      const auto watch = plane::op::push(plane::op::Order::record, recorder);
      const auto saving =
          plane::saved::push(plane::saved::Order::checkpoint, std::make_shared<KeepNothing>());
      const std::shared_ptr<void> held =
          region->options.context ? region->options.context(RegionRun::first) : nullptr;
      results = (*first)(region->all_inputs(inputs));
    }
    recorder->finish();
    refuse_changed_inputs(region->record, inputs);
    Tensors outputs;
    for (const at::Tensor& result : results) {
      region->defined.push_back(result.defined());
      if (result.defined()) outputs.push_back(result.detach());
    }
    bool wanted = region->record.read_requires_grad;
    for (const at::Tensor& input : inputs) {
      region->requires_grad.push_back(input.requires_grad());
      wanted = wanted || input.requires_grad();
    }
    if (!wanted) context->mark_non_differentiable(outputs);
    context->save_for_backward(inputs);
    context->saved_data["region"] = c10::IValue::make_capsule(region);
    context->set_materialize_grads(false);
    return outputs;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto region = c10::static_intrusive_pointer_cast<ReentrantRegion>(
        context->saved_data.at("region").toCapsule());
    const std::size_t count = region->requires_grad.size();
    GRADUS_CHECK("checkpoint", context->needs_input_grad(count),
                 "a reentrant region computes all gradients, in a backward pass of its own; "
                 "torch::autograd::grad() and backward(inputs=) ask for some. Leave "
                 "CheckpointOptions::reentrant off, or call backward() without inputs");
    GRADUS_CHECK("checkpoint", !at::GradMode::is_enabled(),
                 "a reentrant region has no double backward; backward was called with "
                 "create_graph. Leave CheckpointOptions::reentrant off");
    check_unchanged(region->record);
    const Tensors saved = context->get_saved_variables();
    Tensors inputs;
    for (std::size_t i = 0; i < count; ++i) {
      inputs.push_back(saved[i].detach().requires_grad_(region->requires_grad[i]));
    }
    Tensors results = run_again(*region, inputs);
    Tensors roots, root_gradients;
    std::size_t next = 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!region->defined[i]) continue;
      const at::Tensor& gradient = gradients[next++];
      if (!gradient.defined() || !results[i].requires_grad()) continue;
      roots.push_back(results[i]);
      root_gradients.push_back(gradient);
    }
    results.clear();
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    // One for each argument of forward(): the region and the function have none.
    Tensors all(2);
    for (const at::Tensor& input : inputs) all.push_back(input.grad());
    all.emplace_back();
    return all;
  }

 private:
  static Tensors run_again(const ReentrantRegion& region, const Tensors& inputs) {
    const auto replayer =
        std::make_shared<Replayer>(region.record, &region, region.compare(), region.options.debug);
    const Surroundings::Scope entered(region.surroundings, region.record);
    const GradientsAside gradients(region.record);
    const at::AutoGradMode grad(true);
    const InnermostRegion innermost(replayer.get());
    const auto watch = plane::op::push(plane::op::Order::record, replayer);
    const std::shared_ptr<void> held =
        region.options.context ? region.options.context(RegionRun::second) : nullptr;
    Tensors results = region.again(region.all_inputs(inputs));
    replayer->finish();
    GRADUS_CHECK("checkpoint", results.size() == region.defined.size(),
                 "a checkpointed region must return the same tensors again; it returned ",
                 region.defined.size(), " and now ", results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      GRADUS_CHECK("checkpoint", results[i].defined() == region.defined[i],
                   "a checkpointed region must return the same tensors again; number ", i, " was ",
                   region.defined[i] ? "defined" : "not defined", " the first time only");
    }
    return results;
  }
};

}  // namespace

void refuse_opaque_result(const char* type) {
  throw UserError(base::join(
      "[checkpoint] a reentrant region must return what visit_tensors() can see through; got a ",
      type, ". Write a for_each_tensor() beside it, or leave CheckpointOptions::reentrant off."));
}

Tensors run_reentrant_node(const CheckpointOptions& options, Tensors inputs,
                           const RegionFunction& first, RegionFunction again) {
  if (!at::GradMode::is_enabled()) return first(std::move(inputs));
  GRADUS_CHECK("checkpoint", !options.selective,
               "a selective policy needs CheckpointOptions::reentrant off; it is on");
  auto region = c10::make_intrusive<ReentrantRegion>(options);
  region->again = std::move(again);
  Tensors given;
  for (at::Tensor& input : inputs) {
    region->given.push_back(input.defined());
    if (input.defined()) given.push_back(std::move(input));
  }
  const Tensors outputs = Reentrant::apply(region, &first, at::TensorList(given), kNeedsGradient);
  Tensors results(region->defined.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (region->defined[i]) results[i] = outputs[next++];
  }
  return results;
}

}  // namespace gradus::recompute::internal
