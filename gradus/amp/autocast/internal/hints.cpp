#include <gradus/amp/autocast/internal/hints.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <sstream>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <gradus/base/names.h>

namespace gradus::amp::internal {
namespace {

constexpr std::int64_t kMultiple = 8;

struct Noted {
  std::mutex mutex;
  std::set<std::string> keys;
  std::vector<std::string> texts;
};

Noted& noted() {
  static Noted instance;
  return instance;
}

struct Dimension {
  const char* what;
  std::int64_t size;
};

// Whose shape the layer has, and which of its dimensions the matrix units see. The number of rows
// (examples, positions) is the batch's, not the layer's.
std::vector<Dimension> dimensions_of(const std::string& name, const at::Tensor& weight) {
  if (name == "linear" && weight.dim() == 2) {
    return {{"output features", weight.size(0)}, {"input features", weight.size(1)}};
  }
  const bool transposed = name.starts_with("conv_transpose");
  if (name.starts_with("conv") && name != "conv_tbc" && weight.dim() >= 3) {
    return {
        {transposed ? "input channels" : "output channels", weight.size(0)},
        {transposed ? "output channels of a group" : "input channels of a group", weight.size(1)}};
  }
  if (weight.dim() >= 2) return {{"rows", weight.size(-2)}, {"columns", weight.size(-1)}};
  return {};
}

}  // namespace

void note_shape(const plane::op::Call& call, c10::ScalarType dtype) {
  const std::string name(call.name().substr(call.name().find("::") + 2));
  const auto arguments = call.arguments();
  // addmm, baddbmm and the like have the matrix added first; the second factor is the layer's.
  const std::size_t index = name.starts_with("add") || name == "baddbmm" ? 2 : 1;
  if (index >= arguments.size() || !arguments[index].isTensor()) return;
  const at::Tensor& weight = arguments[index].toTensor();
  if (!weight.defined() || weight.is_nested()) return;
  std::ostringstream odd;
  for (const Dimension& dimension : dimensions_of(name, weight)) {
    if (dimension.size % kMultiple == 0) continue;
    const std::int64_t next = (dimension.size / kMultiple + 1) * kMultiple;
    odd << (odd.tellp() > 0 ? ", " : "") << dimension.size << " " << dimension.what
        << " (next: " << next << ")";
  }
  if (odd.tellp() == 0) return;
  std::ostringstream key;
  key << name << weight.sizes();
  Noted& all = noted();
  const std::lock_guard lock(all.mutex);
  if (!all.keys.insert(key.str()).second) return;
  std::ostringstream text;
  const std::string parameter = base::tensor_name(weight);
  text << call.name() << " with " << (parameter.empty() ? "a weight" : parameter) << " of shape "
       << weight.sizes() << " in " << dtype << ": " << odd.str()
       << "; tensor cores want multiples of " << kMultiple;
  all.texts.push_back(text.str());
}

std::vector<std::string> noted_shapes() {
  Noted& all = noted();
  const std::lock_guard lock(all.mutex);
  return all.texts;
}

void clear_noted_shapes() {
  Noted& all = noted();
  const std::lock_guard lock(all.mutex);
  all.keys.clear();
  all.texts.clear();
}

}  // namespace gradus::amp::internal
