#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/recompute/for_each_tensor.h>
#include <gradus/recompute/selective.h>

namespace gradus::recompute {

/// How much the second run of a region is compared with the first.
enum class DeterminismCheck : std::uint8_t {
  operators,  ///< Each operator with the shapes, dtypes and scalars it takes, and what is saved.
  none,       ///< Only that as many tensors are saved.
};

/// Which run of a region a CheckpointOptions::context is for.
enum class RegionRun : std::uint8_t { first, second };

struct CheckpointOptions {
  /// False: one backward pass, with saved tensors made again when it wants them. True: the region
  /// is one node of the graph, whose backward runs it again and a backward pass inside. That has no
  /// double backward, no torch::autograd::grad(), no selective policy and no change of its
  /// arguments, and adds a weight's gradient up in one part a region.
  bool reentrant = false;
  /// Draw the same random numbers again: default generators, and custom ones that operators take.
  bool preserve_rng_state = true;
  /// Refuse, by the operator's name, a region that computes otherwise the second time.
  DeterminismCheck determinism_check = DeterminismCheck::operators;
  /// Stop the second run once it has made everything that backward wants.
  bool early_stop = true;
  /// Keep a text for each operator; a difference lists both runs around it.
  bool debug = false;
  /// Operators whose results are kept.
  SelectivePolicy selective = {};
  /// Called as each run starts; what it returns is held until that run ends (a guard).
  std::function<std::shared_ptr<void>(RegionRun)> context = nullptr;
};

/// Overrides options of every checkpoint that this thread calls while it lives. Nests.
class [[nodiscard]] CheckpointOverride {
 public:
  struct Options {
    std::optional<bool> early_stop = std::nullopt;
    std::optional<bool> debug = std::nullopt;
  };
  explicit CheckpointOverride(const Options& options);
  ~CheckpointOverride();
  CheckpointOverride(const CheckpointOverride&) = delete;
  CheckpointOverride& operator=(const CheckpointOverride&) = delete;

 private:
  Options outer_;
};

/// While it lives, the backward passes of this thread share what non-reentrant regions made again:
/// several passes over different parts of a graph run each region once more in all, not once a pass
/// (torch's GraphExecGroup). What is made stays until autograd drops it or the group ends. Does not
/// nest.
class [[nodiscard]] BackwardGroup {
 public:
  /// @throws UserError if this thread is in a group already.
  BackwardGroup();
  ~BackwardGroup();
  BackwardGroup(const BackwardGroup&) = delete;
  BackwardGroup& operator=(const BackwardGroup&) = delete;
};

namespace internal {

/// Runs @p first on @p inputs now, keeping none of what autograd saves; runs @p again on detached
/// inputs when backward wants it.
void run_checkpointed(const CheckpointOptions& options, std::vector<at::Tensor> inputs,
                      const std::function<void(std::vector<at::Tensor>)>& first,
                      std::function<void(std::vector<at::Tensor>)> again);

/// Runs @p first on @p inputs now, without grad, as one node whose backward runs @p again. Both
/// return the tensors of the region's result; what comes back stands for those of @p first.
std::vector<at::Tensor> run_reentrant(
    const CheckpointOptions& options, std::vector<at::Tensor> inputs,
    const std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>& first,
    std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> again);

/// @throws UserError that asks for a for_each_tensor of @p type.
[[noreturn]] void refuse_opaque_result(const char* type);

}  // namespace internal

/// Calls fn(args...) and keeps none of the tensors that autograd saves inside; backward calls fn
/// once more to make them (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
/// Semantics of torch.utils.checkpoint.
///
/// Gradients flow to the tensors among @p args (also inside containers and structs:
/// visit_tensors()) and to whatever fn captures: parameters get theirs even if no argument needs
/// one. What fn captures must live until backward: capture modules by value (their handles are
/// shared pointers). Random numbers and autocast settings are those of the first call. What the
/// region changes in place outside itself (running statistics) is changed once. Nests; allows
/// double backward and retain_graph.
/// @throws UserError in backward, by name, if a tensor the region read was changed since, or if fn
/// computes
///   otherwise than the first time. See CheckpointOptions.
template <typename Fn, typename... Args>
auto checkpoint(const CheckpointOptions& options, Fn fn, Args... args) {
  using Result = std::decay_t<std::invoke_result_t<Fn&, Args&...>>;
  using Arguments = std::tuple<Args...>;
  Arguments arguments(std::move(args)...);
  std::vector<at::Tensor> inputs;
  visit_tensors(arguments,
                [&](at::Tensor& tensor) { inputs.push_back(std::exchange(tensor, {})); });
  const auto region =
      std::make_shared<std::pair<Fn, Arguments>>(std::move(fn), std::move(arguments));
  const auto call = [region](std::vector<at::Tensor> tensors) -> Result {
    Arguments filled = region->second;
    std::size_t next = 0;
    visit_tensors(filled, [&](at::Tensor& tensor) { tensor = std::move(tensors.at(next++)); });
    return std::apply(region->first, filled);
  };
  if constexpr (std::is_void_v<Result>) {
    internal::run_checkpointed(options, std::move(inputs), call, call);
  } else {
    std::optional<Result> result;
    if (options.reentrant) {
      if constexpr (!internal::sees_every_tensor<Result>()) {
        internal::refuse_opaque_result(typeid(Result).name());
      } else {
        const auto tensors_of = [](Result& value) {
          std::vector<at::Tensor> tensors;
          visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
          return tensors;
        };
        const std::vector<at::Tensor> outputs = internal::run_reentrant(
            options, std::move(inputs),
            [&](std::vector<at::Tensor> tensors) {
              result.emplace(call(std::move(tensors)));
              return tensors_of(*result);
            },
            [call, tensors_of](std::vector<at::Tensor> tensors) {
              Result again = call(std::move(tensors));
              return tensors_of(again);
            });
        std::size_t next = 0;
        visit_tensors(*result, [&](at::Tensor& tensor) { tensor = outputs.at(next++); });
      }
    } else {
      internal::run_checkpointed(
          options, std::move(inputs),
          [&](std::vector<at::Tensor> tensors) { result.emplace(call(std::move(tensors))); },
          [call](std::vector<at::Tensor> tensors) { call(std::move(tensors)); });
    }
    return std::move(*result);
  }
}

/// checkpoint() with the default options.
template <typename Fn, typename... Args>
  requires(!std::is_same_v<Fn, CheckpointOptions>)
auto checkpoint(Fn fn, Args... args) {
  return checkpoint(CheckpointOptions{}, std::move(fn), std::move(args)...);
}

using Stage = std::function<at::Tensor(at::Tensor)>;

/// Runs @p stages one after the other, checkpointed in @p segments runs of stages.size() / segments
/// each, but for the last one, whose values backward wants first: 7 stages in 3 segments run 2, 2,
/// 2, 2, 1, 1, 1 times.
/// @throws UserError unless 1 <= segments <= stages.size().
at::Tensor checkpoint_sequential(const std::vector<Stage>& stages, std::int64_t segments,
                                 at::Tensor input, const CheckpointOptions& options = {});

}  // namespace gradus::recompute
