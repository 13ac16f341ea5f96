#include <gradus/privacy/nn/internal/packed.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <gradus/base/error.h>

namespace gradus::privacy::nn::internal {

namespace {

std::vector<std::int64_t> values_of(const at::Tensor& indices) {
  const at::Tensor cpu = indices.to(at::kCPU, at::kLong).contiguous();
  const auto* data = cpu.const_data_ptr<std::int64_t>();
  return {data, data + cpu.numel()};
}

}  // namespace

PackedLayout::PackedLayout(const char* component,
                           const torch::nn::utils::rnn::PackedSequence& packed)
    : source_(packed) {
  GRADUS_CHECK(component, packed.batch_sizes().dim() == 1 && packed.batch_sizes().numel() > 0,
               "a packed sequence must have at least one step; got batch sizes of shape ",
               packed.batch_sizes().sizes());
  const std::vector<std::int64_t> batch_sizes = values_of(packed.batch_sizes());
  T_ = static_cast<std::int64_t>(batch_sizes.size());
  B_ = batch_sizes[0];
  const std::int64_t rows =
      std::accumulate(batch_sizes.begin(), batch_sizes.end(), std::int64_t{0});
  GRADUS_CHECK(component, packed.data().dim() == 2 && packed.data().size(0) == rows,
               "data of a packed sequence must have shape [sum of batch sizes = ", rows,
               ", input]; got ", packed.data().sizes());

  // order[i] is the example at place i of a step.
  std::vector<std::int64_t> order(static_cast<std::size_t>(B_));
  std::iota(order.begin(), order.end(), 0);
  if (packed.sorted_indices().defined()) order = values_of(packed.sorted_indices());
  GRADUS_CHECK(component, static_cast<std::int64_t>(order.size()) == B_,
               "sorted indices of a packed sequence must be one an example, here ", B_, "; got ",
               order.size());

  std::vector<std::int64_t> row_of_place(static_cast<std::size_t>(T_ * B_));
  std::vector<std::int64_t> place_of_row;
  place_of_row.reserve(static_cast<std::size_t>(rows));
  std::vector<std::int64_t> last_row(static_cast<std::size_t>(B_));
  const at::Device device = packed.data().device();
  live_.resize(static_cast<std::size_t>(T_));
  for (std::int64_t t = 0; t < T_; ++t) {
    const std::int64_t count = batch_sizes[static_cast<std::size_t>(t)];
    GRADUS_CHECK(component, count >= 1 && count <= (t > 0 ? batch_sizes[t - 1] : B_),
                 "batch sizes of a packed sequence must be at least 1 and never grow; got ", count,
                 " at step ", t);
    std::vector<std::int64_t> is_live(static_cast<std::size_t>(B_), 0);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t example = order[static_cast<std::size_t>(i)];
      last_row[static_cast<std::size_t>(example)] = static_cast<std::int64_t>(place_of_row.size());
      place_of_row.push_back(t * B_ + example);
      is_live[static_cast<std::size_t>(example)] = 1;
    }
    std::copy(last_row.begin(), last_row.end(), row_of_place.begin() + t * B_);
    if (count < B_) {
      live_[static_cast<std::size_t>(t)] =
          at::tensor(is_live, at::kLong).to(device, at::kBool).unsqueeze(1);
    }
  }
  row_of_place_ = at::tensor(row_of_place, at::kLong).to(device);
  place_of_row_ = at::tensor(place_of_row, at::kLong).to(device);
}

at::Tensor PackedLayout::padded(const at::Tensor& data) const {
  return at::index_select(data, 0, row_of_place_).unflatten(0, {T_, B_});
}

torch::nn::utils::rnn::PackedSequence PackedLayout::packed(const at::Tensor& padded_TB) const {
  return torch::nn::utils::rnn::PackedSequence(
      at::index_select(padded_TB.flatten(0, 1), 0, place_of_row_), source_.batch_sizes(),
      source_.sorted_indices(), source_.unsorted_indices());
}

}  // namespace gradus::privacy::nn::internal
