#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <gradus/persample/vmap/internal/example_transform.h>

// The kernels of packed sequences read lengths and batch sizes through data pointers, which tensors
// inside functorch's layers do not have. Both are gathers, once the lengths are known.

namespace gradus::persample::internal {
namespace {

at::Tensor plain_tensor(const std::vector<std::int64_t>& values) {
  const OutsideLayers outside;
  const at::NoGradGuard no_grad;
  return at::tensor(values);
}

void pack(ExampleTransform& transform, plane::op::Call& call) {
  const at::Tensor input = call.arguments()[0].toTensor();
  const auto lengths = transform.agreed_integers(call.arguments()[1].toTensor(), call.name());
  const bool batch_first = call.arguments()[2].toBool();
  TORCH_CHECK(input.dim() >= 2, "packed input needs two dimensions");
  const std::int64_t steps = input.size(batch_first ? 1 : 0);
  const std::int64_t sequences = input.size(batch_first ? 0 : 1);
  TORCH_CHECK(static_cast<std::int64_t>(lengths.size()) == sequences && sequences > 0 &&
                  std::is_sorted(lengths.begin(), lengths.end(), std::greater<>()) &&
                  lengths.back() > 0 && lengths.front() <= steps,
              "lengths must be positive, descending and within the input");
  std::vector<std::int64_t> rows, batch_sizes;
  for (std::int64_t t = 0; t < lengths.front(); ++t) {
    std::int64_t running = 0;
    while (running < sequences && lengths[static_cast<std::size_t>(running)] > t) {
      rows.push_back(batch_first ? running * steps + t : t * sequences + running);
      ++running;
    }
    batch_sizes.push_back(running);
  }
  at::Tensor data = input.flatten(0, 1).index_select(0, plain_tensor(rows).to(input.device()));
  call.replace({std::move(data), plain_tensor(batch_sizes)});
}

void pad(ExampleTransform& transform, plane::op::Call& call) {
  const at::Tensor data = call.arguments()[0].toTensor();
  const auto batch_sizes = transform.agreed_integers(call.arguments()[1].toTensor(), call.name());
  const bool batch_first = call.arguments()[2].toBool();
  const c10::Scalar padding = call.arguments()[3].toScalar();
  const std::int64_t total_length = call.arguments()[4].toInt();
  TORCH_CHECK(!batch_sizes.empty(), "a packed sequence holds at least one step");
  auto steps = static_cast<std::int64_t>(batch_sizes.size());
  TORCH_CHECK(total_length <= 0 || total_length >= steps, "total_length is below the longest");
  steps = std::max(steps, total_length);
  const std::int64_t sequences = batch_sizes.front();
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(sequences), 0), rows;
  std::int64_t row = 0;
  for (std::int64_t t = 0; t < steps; ++t) {
    const std::int64_t running = t < static_cast<std::int64_t>(batch_sizes.size())
                                     ? batch_sizes[static_cast<std::size_t>(t)]
                                     : 0;
    for (std::int64_t i = 0; i < sequences; ++i) {
      rows.push_back(i < running ? row++ : data.size(0));  // the row behind the last is padding
      if (i < running) ++lengths[static_cast<std::size_t>(i)];
    }
  }
  std::vector<std::int64_t> shape = data.sizes().vec();
  shape[0] = 1;
  const at::Tensor padded = at::cat({data, at::full(shape, padding, data.options())});
  shape[0] = sequences;
  shape.insert(shape.begin(), steps);
  at::Tensor output = padded.index_select(0, plain_tensor(rows).to(data.device())).view(shape);
  if (batch_first) output = output.transpose(0, 1);
  call.replace({std::move(output), plain_tensor(lengths)});
}

}  // namespace

bool pack_sequences(ExampleTransform& transform, plane::op::Call& call) {
  const std::string_view name = call.name();
  if (name == "aten::_pack_padded_sequence") {
    pack(transform, call);
    return true;
  }
  if (name == "aten::_pad_packed_sequence") {
    pad(transform, call);
    return true;
  }
  const auto& arguments = call.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "batch_sizes" || !call.arguments()[i].isTensor()) continue;
    const at::Tensor& sizes = call.arguments()[i].toTensor();
    if (!sizes.defined() || !is_wrapped(sizes)) continue;
    call.set_argument(i, plain_tensor(transform.agreed_integers(sizes, name)));
  }
  return false;
}

}  // namespace gradus::persample::internal
