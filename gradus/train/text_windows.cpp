#include <gradus/train/text_windows.h>

#include <span>
#include <utility>

#include <ATen/ops/empty.h>

#include <gradus/base/error.h>

namespace gradus::train {

TextWindows::TextWindows(std::shared_ptr<const data::TokenFile> tokens,
                         const std::vector<data::TokenRange>& ranges, std::int64_t context)
    : tokens_(std::move(tokens)), context_(context) {
  for (const data::TokenRange& range : ranges) {
    for (std::int64_t begin = range.begin; begin + context + 1 <= range.end; begin += context + 1)
      begins_.push_back(begin);
  }
  GRADUS_CHECK("train", !begins_.empty(), "the training text must hold a window of ", context + 1,
               " tokens; it is shorter. Take more text, or a smaller model.context");
}

data::Batch TextWindows::rows(const std::vector<std::int64_t>& indices) const {
  const auto windows = static_cast<std::int64_t>(indices.size());
  const at::Tensor all = at::empty({windows, context_ + 1}, at::kLong);
  auto* out = all.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t index : indices) {
    const auto length = static_cast<std::size_t>(context_ + 1);
    tokens_->copy(begins_.at(static_cast<std::size_t>(index)), std::span(out, length));
    out += length;
  }
  return {.inputs = all.narrow(1, 0, context_).contiguous(),
          .targets = all.narrow(1, 1, context_).contiguous()};
}

}  // namespace gradus::train
