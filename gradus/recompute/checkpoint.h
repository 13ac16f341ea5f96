#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::recompute {

struct CheckpointOptions {
  /// Draw the same random numbers again: default generators, and custom ones that operators take.
  bool preserve_rng_state = true;
  /// Refuse, by the operator's name, a region that computes otherwise the second time.
  bool check_determinism = true;
  /// Stop the second run once it has made everything that backward wants.
  bool early_stop = true;
};

namespace internal {

/// Runs @p first on @p inputs now, keeping none of what autograd saves; runs @p again on detached
/// inputs when backward wants it.
void run_checkpointed(const CheckpointOptions& options, std::vector<at::Tensor> inputs,
                      const std::function<void(std::vector<at::Tensor>)>& first,
                      std::function<void(std::vector<at::Tensor>)> again);

// Calls visit on every tensor in a value: tensors themselves and the containers of the standard
// library.
template <typename Visit>
void for_each_tensor(at::Tensor& tensor, Visit&& visit) {
  visit(tensor);
}
template <typename T, typename Visit>
void for_each_tensor(T&, Visit&&) {}
template <typename T, typename Visit>
void for_each_tensor(std::vector<T>& values, Visit&& visit);
template <typename T, typename Visit>
void for_each_tensor(std::optional<T>& value, Visit&& visit);
template <typename T, std::size_t N, typename Visit>
void for_each_tensor(std::array<T, N>& values, Visit&& visit);
template <typename A, typename B, typename Visit>
void for_each_tensor(std::pair<A, B>& values, Visit&& visit);
template <typename... T, typename Visit>
void for_each_tensor(std::tuple<T...>& values, Visit&& visit);
template <typename K, typename T, typename Visit>
void for_each_tensor(std::map<K, T>& values, Visit&& visit);
template <typename K, typename T, typename Visit>
void for_each_tensor(std::unordered_map<K, T>& values, Visit&& visit);

template <typename T, typename Visit>
void for_each_tensor(std::vector<T>& values, Visit&& visit) {
  if constexpr (!std::is_same_v<T, bool>) {
    for (T& value : values) for_each_tensor(value, visit);
  }
}
template <typename T, typename Visit>
void for_each_tensor(std::optional<T>& value, Visit&& visit) {
  if (value) for_each_tensor(*value, visit);
}
template <typename T, std::size_t N, typename Visit>
void for_each_tensor(std::array<T, N>& values, Visit&& visit) {
  for (T& value : values) for_each_tensor(value, visit);
}
template <typename A, typename B, typename Visit>
void for_each_tensor(std::pair<A, B>& values, Visit&& visit) {
  for_each_tensor(values.first, visit);
  for_each_tensor(values.second, visit);
}
template <typename... T, typename Visit>
void for_each_tensor(std::tuple<T...>& values, Visit&& visit) {
  std::apply([&](T&... value) { (for_each_tensor(value, visit), ...); }, values);
}
template <typename K, typename T, typename Visit>
void for_each_tensor(std::map<K, T>& values, Visit&& visit) {
  for (auto& entry : values) for_each_tensor(entry.second, visit);
}
template <typename K, typename T, typename Visit>
void for_each_tensor(std::unordered_map<K, T>& values, Visit&& visit) {
  for (auto& entry : values) for_each_tensor(entry.second, visit);
}

}  // namespace internal

/// Calls fn(args...) and keeps none of the tensors that autograd saves inside; backward calls fn
/// once more to make them (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
/// Semantics of torch.utils.checkpoint with use_reentrant=False.
///
/// Gradients flow to the tensors among @p args (also inside vectors, tuples, optionals and maps)
/// and to whatever fn captures: parameters get theirs even if no argument needs one. What fn
/// captures must live until backward: capture modules by value (their handles are shared pointers).
/// Random numbers and autocast settings are those of the first call. What the region changes in
/// place outside itself (running statistics) is changed once. Nests; allows double backward and
/// retain_graph.
/// @throws UserError in backward, by name, if a tensor the region read was changed since, or if fn
/// computes
///   otherwise than the first time. See CheckpointOptions.
template <typename Fn, typename... Args>
auto checkpoint(const CheckpointOptions& options, Fn fn, Args... args) {
  using Result = std::invoke_result_t<Fn&, Args&...>;
  using Arguments = std::tuple<Args...>;
  Arguments arguments(std::move(args)...);
  std::vector<at::Tensor> inputs;
  internal::for_each_tensor(
      arguments, [&](at::Tensor& tensor) { inputs.push_back(std::exchange(tensor, {})); });
  const auto region =
      std::make_shared<std::pair<Fn, Arguments>>(std::move(fn), std::move(arguments));
  const auto call = [region](std::vector<at::Tensor> tensors) -> Result {
    Arguments filled = region->second;
    std::size_t next = 0;
    internal::for_each_tensor(filled,
                              [&](at::Tensor& tensor) { tensor = std::move(tensors.at(next++)); });
    return std::apply(region->first, filled);
  };
  if constexpr (std::is_void_v<Result>) {
    internal::run_checkpointed(options, std::move(inputs), call, call);
  } else {
    std::optional<Result> result;
    internal::run_checkpointed(
        options, std::move(inputs),
        [&](std::vector<at::Tensor> tensors) { result.emplace(call(std::move(tensors))); },
        [call](std::vector<at::Tensor> tensors) { call(std::move(tensors)); });
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
