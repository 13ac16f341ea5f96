#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::base {

/// Names for parameters and buffers, for messages: while it lives, tensor_name() knows them.
/// Thread-safe. Of two names for one storage (tied weights) the first registered is given.
class [[nodiscard]] NamedTensors {
 public:
  explicit NamedTensors(std::vector<std::pair<std::string, at::Tensor>> tensors);
  ~NamedTensors();
  NamedTensors(NamedTensors&&) noexcept;
  NamedTensors& operator=(NamedTensors&&) noexcept;

 private:
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::uint64_t>> keys_;
};

/// The name of the tensor whose storage @p tensor shares, or "" if none was registered.
std::string tensor_name(const at::Tensor& tensor);

/// "blocks.0.weight (float [4, 4])" or "an unnamed tensor (float [4, 4])".
std::string describe_tensor(const at::Tensor& tensor);

}  // namespace gradus::base
