#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gradus/plane/op/op_plane.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::accumulate {

/// One BatchNorm layer of a model.
struct BatchNormLayer {
  std::string name{};  ///< "features.1"; "" if the model itself is one.
  std::string type{};  ///< "BatchNorm2d".
  std::int64_t features = 0;
  /// In training, or without running statistics: it normalises over the micro-batch. A frozen layer
  /// (eval()) does not care how a batch is cut.
  bool uses_batch_statistics = true;
  /// Why convert_batch_norm_to_group_norm() cannot replace it; empty if it can.
  std::string obstacle{};
};

/// Every BatchNorm1d, 2d and 3d layer of @p module, in the order of its modules, each once.
std::vector<BatchNormLayer> batch_norm_layers(const torch::nn::Module& module);

/// What accumulation does to the BatchNorm layers of @p module, by name, and the cure; "" if there
/// is none that uses batch statistics or if a step has one micro-batch.
std::string batch_norm_warning(const torch::nn::Module& module, std::int64_t micro_batches);

/// Gives that text to LibTorch's warning handler (TORCH_WARN: stderr, unless the program set
/// another). Returns whether there was something to warn of.
bool warn_about_batch_norm(const torch::nn::Module& module, std::int64_t micro_batches);

/// Runs @p forward and names the BatchNorm layers of @p module that it used, once a call;
/// "a batch_norm of no layer" for functional calls. Sees what a forward really does, whatever is
/// registered. Without gradients; random generators are put back, running statistics are not.
std::vector<std::string> batch_norm_calls(const torch::nn::Module& module,
                                          const std::function<void()>& forward);

struct GroupNormOptions {
  /// Groups a layer, at most: the largest divisor of its features that leaves two channels a group
  /// or more is taken (Wu and He 2018 use 32). >= 1.
  std::int64_t groups = 32;
  /// Runs the model's forward once. If it still normalises over the batch after the conversion, the
  /// conversion is undone and refused. Only BatchNorm that is no layer can escape without it.
  std::function<void()> probe{};
};

/// A layer that was replaced.
struct ConvertedLayer {
  std::string name{};
  std::int64_t features = 0;
  std::int64_t groups = 0;
};

/// Replaces BatchNorm layers by GroupNorm, which treats each example by itself, so that
/// accumulation is exact. Weight, bias, requires_grad, eps, dtype, device and training mode are
/// copied; running statistics are dropped. Values change: train or fine-tune with it. Parameters
/// become other tensors: make the optimizer afterwards.
///
/// What a C++ forward calls can be replaced in a Sequential only, wherever that stands. A member of
/// type BatchNorm2d, and an element of a ModuleList, which a forward has to cast to its type, would
/// stay in use, or crash: such layers are refused by name, before anything is changed.
/// GroupNormGuard takes those.
/// @throws UserError if a layer cannot be replaced, or if the probe finds batch normalisation.
std::vector<ConvertedLayer> convert_batch_norm_to_group_norm(torch::nn::Module& module,
                                                             const GroupNormOptions& options = {});

/// While it lives, the BatchNorm layers of a model compute group normalisation on this thread (and
/// where plane::op handlers go), in training and eval, however the forward reaches them: their
/// calls of batch_norm are answered by group_norm with their weight, bias and eps. Running
/// statistics stay as they are. The model itself is not changed.
class [[nodiscard]] GroupNormGuard {
 public:
  /// @param groups  As in GroupNormOptions.
  /// @throws UserError on a layer with neither weight nor running statistics, by which its calls
  /// could be told, and if there is no BatchNorm layer.
  explicit GroupNormGuard(const torch::nn::Module& module, std::int64_t groups = 32);
  ~GroupNormGuard();
  GroupNormGuard(const GroupNormGuard&) = delete;
  GroupNormGuard& operator=(const GroupNormGuard&) = delete;

  /// Calls answered so far.
  std::int64_t calls() const;

 private:
  class Handler;
  std::shared_ptr<Handler> handler_;
  plane::op::Guard guard_;
};

}  // namespace gradus::accumulate
