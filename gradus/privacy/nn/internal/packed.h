#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/utils/rnn.h>

namespace gradus::privacy::nn::internal {

// A packed sequence laid out as [T, B, ...] with the batch in the caller's order, and the way back.
//
// A step behind a sequence's end holds that sequence's last step again, so that no row ever holds
// values of two examples. Packing sorts examples by length; here they are put back before any
// product, so that row b of every product is example b.
class PackedLayout {
 public:
  // Throws UserError, said by @p component, unless the sequence has at least one step.
  PackedLayout(const char* component, const torch::nn::utils::rnn::PackedSequence& packed);

  // data [sum of lengths, ...] -> [T, B, ...].
  at::Tensor padded(const at::Tensor& data) const;
  // [T, B, ...] -> the packed sequence of the same lengths and order.
  torch::nn::utils::rnn::PackedSequence packed(const at::Tensor& padded_TB) const;

  // Of each step, which examples it belongs to: bool [B, 1], undefined where to all.
  const std::vector<at::Tensor>& live() const { return live_; }

 private:
  torch::nn::utils::rnn::PackedSequence source_;
  std::int64_t T_ = 0, B_ = 0;
  at::Tensor row_of_place_;  // [T * B] int64: which row of data a place takes.
  at::Tensor place_of_row_;  // [sum of lengths] int64: which place a row of data comes from.
  std::vector<at::Tensor> live_;
};

}  // namespace gradus::privacy::nn::internal
