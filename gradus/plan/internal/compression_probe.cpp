#include <gradus/plan/internal/compression_probe.h>

#include <algorithm>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/compress/gist.h>

namespace gradus::plan::internal {

using compress::CompressGuard;
using plane::saved::Value;
using recompute::StepTrace;

namespace {

// Strides and offset tell two views of one result apart.
std::string layout_of(const Value& value) {
  return base::join(value.maker, value.saved_by_maker ? " " : " held ", value.tensor.scalar_type(),
                    " ", value.tensor.sizes(), " ", value.tensor.strides(), " ",
                    value.tensor.storage_offset());
}

}  // namespace

CompressionProbe::CompressionProbe(double seconds, base::Clock clock)
    : limit_s_(seconds), clock_(std::move(clock)) {}

CompressionProbe::Known CompressionProbe::look(const CompressGuard& guard, const Value& value,
                                               const std::string& layout) {
  const auto known = by_layout_.find(layout);
  if (known != by_layout_.end()) return known->second;
  const std::optional<compress::Probe> probe = guard.probe(value);
  const Known found{probe.has_value(), probe.value_or(compress::Probe{})};
  if (found.possible && found.probe.by_layout) by_layout_.emplace(layout, found);
  return found;
}

void CompressionProbe::saved(const CompressGuard& guard, const Value& value, std::int64_t number,
                             bool allowed) {
  Call& call = calls_[number];
  call.possible = call.possible && allowed && spent_s_ <= limit_s_;
  if (!call.possible) return;
  const double start = clock_();
  const std::string layout = layout_of(value);
  const Known known = look(guard, value, layout);
  call.possible = known.possible;
  if (known.possible) {
    // The guard shares an encoding where the same is needed of the same tensor, whoever saves it.
    const compress::Need need = value.saved_by_maker ? compress::need_of(value.maker, value.tensor)
                                                     : compress::Need::values;
    const bool shares = need != compress::Need::shape && need != compress::Need::positions;
    const std::string encoding =
        base::join(static_cast<int>(need), " ",
                   compress::kMethodNames[static_cast<std::size_t>(known.probe.method)],
                   layout.substr(value.maker.size()), " ", value.tensor.const_data_ptr());
    const bool shared = !call.encodings.insert(encoding).second && shares;
    call.saves.push_back({known.probe, static_cast<std::int64_t>(value.tensor.nbytes()), shared});
  }
  spent_s_ += clock_() - start;
}

CompressionProbe::Rates CompressionProbe::rates() const {
  const auto median = [](std::vector<double> values) {
    if (values.empty()) return 0.0;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  };
  Rates rates;
  for (std::size_t m = 0; m < compress::kMethodCount; ++m) {
    std::vector<double> encode, restore;
    for (const auto& [number, call] : calls_) {
      for (const Save& save : call.saves) {
        if (static_cast<std::size_t>(save.probe.method) != m) continue;
        encode.push_back(save.probe.encode_s / static_cast<double>(save.plain_bytes));
        restore.push_back(save.probe.restore_s / static_cast<double>(save.plain_bytes));
      }
    }
    rates.encode[m] = median(std::move(encode));
    rates.restore[m] = median(std::move(restore));
  }
  return rates;
}

std::vector<CompressedResult> CompressionProbe::results(const StepTrace& trace) const {
  // Each value is encoded once, in which time another process may have had the core: no more than
  // twice what its method usually takes.
  constexpr double kSlowest = 2.0;
  const Rates usual = rates();
  std::vector<CompressedResult> results(trace.calls.size());
  bool any = false;
  for (const auto& [number, call] : calls_) {
    if (number < 0 || number >= static_cast<std::int64_t>(trace.calls.size())) continue;
    const auto& traced = trace.calls[static_cast<std::size_t>(number)];
    if (!call.possible || !traced.saved || !traced.can_run_again) continue;
    CompressedResult result;
    double restore_s = 0.0;
    for (const Save& save : call.saves) {
      const auto method = static_cast<std::size_t>(save.probe.method);
      const double most = kSlowest * static_cast<double>(save.plain_bytes);
      restore_s += std::min(save.probe.restore_s, most * usual.restore[method]);
      if (save.shared) continue;
      result.bytes += save.probe.bytes;
      result.encode_seconds += std::min(save.probe.encode_s, most * usual.encode[method]);
    }
    if (result.bytes >= traced.bytes) continue;
    result.bytes = std::max<std::int64_t>(1, result.bytes);
    result.decode_seconds =
        restore_s / static_cast<double>(std::max<std::size_t>(1, traced.reads.size()));
    results[static_cast<std::size_t>(number)] = result;
    any = true;
  }
  if (!any) results.clear();
  return results;
}

}  // namespace gradus::plan::internal
