#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace gradus::privacy::internal {

/// The buffers of a model, which a forward pass must leave as they were: watched by value, since
/// not every way of writing is counted by versions.
class BufferWatch {
 public:
  /// Remembers all buffers as they are.
  void take(const torch::nn::Module& model);
  /// The name of a buffer that changed since, or none. All that changed are put back.
  std::optional<std::string> restore(const torch::nn::Module& model) const;

 private:
  struct Saved {
    std::string name{};
    at::Tensor buffer{};
    at::Tensor value{};
  };
  std::vector<Saved> saved_;
};

/// @throws UserError naming @p changed, if it is a buffer.
void refuse_buffer(const std::optional<std::string>& changed);

/// @throws UserError naming a layer that will keep running statistics when it is called: sums over
/// examples without noise, which go into the saved model.
void refuse_running_statistics(const torch::nn::Module& model);

}  // namespace gradus::privacy::internal
