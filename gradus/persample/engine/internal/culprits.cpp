#include <gradus/persample/engine/internal/culprits.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

#include <gradus/plane/op/op_plane.h>

namespace gradus::persample::internal {

namespace {

// An operator makes one example's share grow by this at least.
constexpr double kGrowth = 1.2;
constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;

const std::set<std::string_view> kMovers{
    "aten::flip",    "aten::roll",       "aten::index",  "aten::index_select", "aten::gather",
    "aten::take",    "aten::sort",       "aten::topk",   "aten::randperm",     "aten::rot90",
    "aten::argsort", "aten::index_put_", "aten::scatter"};

// Whose result is a part of their argument: in a part more is different.
const std::set<std::string_view> kParts{
    "aten::select",       "aten::slice",  "aten::narrow",           "aten::unbind",
    "aten::split",        "aten::chunk",  "aten::as_strided",       "aten::index",
    "aten::index_select", "aten::gather", "aten::split_with_sizes", "aten::embedding",
    "aten::diagonal",     "aten::take",   "aten::masked_select"};

struct Seen {
  std::string_view name{};
  std::vector<at::Tensor> arguments{};
  std::vector<at::Tensor> results{};
};

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.layout() == c10::kStrided) tensors.push_back(tensor.detach());
  };
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) add(each);
    }
  }
  return tensors;
}

class Recorder final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    if (call.frame() != plane::op::Frame::autograd) {
      call.proceed();
      return;
    }
    Seen seen{.name = call.name()};
    const at::NoGradGuard no_grad;
    for (const at::Tensor& each : tensors_of(call.arguments()))
      seen.arguments.push_back(kept(each));
    {
      const at::AutoGradMode as_it_was(grad_mode_);
      call.proceed();
    }
    for (const at::Tensor& each : tensors_of(call.results())) seen.results.push_back(kept(each));
    calls.push_back(std::move(seen));
  }

  std::vector<Seen> calls{};

 private:
  at::Tensor kept(const at::Tensor& tensor) {
    bytes_ += static_cast<std::int64_t>(tensor.nbytes());
    return bytes_ <= kMostBytes ? tensor.clone() : at::Tensor();
  }

  const bool grad_mode_ = at::GradMode::is_enabled();
  std::int64_t bytes_ = 0;
};

std::vector<Seen> calls_of(const std::function<void()>& run) {
  const auto recorder = std::make_shared<Recorder>();
  const plane::op::Guard guard = plane::op::push(plane::op::Order::transform, recorder);
  run();
  return std::move(recorder->calls);
}

// Which share of their elements differs, at most.
double different(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  double most = 0;
  for (std::size_t i = 0; i < std::min(one.size(), other.size()); ++i) {
    if (!one[i].defined() || !other[i].defined() || one[i].numel() == 0) continue;
    if (one[i].sizes() != other[i].sizes()) continue;
    const auto count = static_cast<double>(one[i].ne(other[i]).sum().item<std::int64_t>());
    most = std::max(most, count / static_cast<double>(one[i].numel()));
  }
  return most;
}

}  // namespace

std::string culprits(const std::function<void()>& run, const std::function<void()>& run_changed,
                     std::int64_t examples) {
  const std::vector<Seen> before = calls_of(run), after = calls_of(run_changed);
  const at::NoGradGuard no_grad;
  std::set<std::string> movers;
  for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
    const Seen& one = before[i];
    const Seen& other = after[i];
    if (one.name != other.name) break;
    if (kMovers.contains(one.name)) movers.emplace(one.name);
    if (kParts.contains(one.name)) continue;
    const double taken = different(one.arguments, other.arguments);
    const double least = std::max(1.0 / static_cast<double>(examples), taken);
    // Without a difference among the arguments it is one of memory that nothing was written to.
    if (taken > 0 && different(one.results, other.results) > kGrowth * least) {
      return std::string(one.name);
    }
  }
  std::string names;
  for (const std::string& name : movers) names += (names.empty() ? "" : ", ") + name;
  return names;
}

}  // namespace gradus::persample::internal
