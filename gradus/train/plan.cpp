#include <gradus/train/plan.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>

#include <gradus/base/error.h>

namespace gradus::train {
std::vector<std::int64_t> Plan::sizes(std::int64_t batch) const {
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < micro_batches; ++i) {
    const std::int64_t size = batch / micro_batches + (i < batch % micro_batches ? 1 : 0);
    if (size > 0) result.push_back(size);
  }
  return result;
}

PlanRequest parse_plan_request(const std::string& text, std::int64_t batch, std::int64_t segments) {
  if (text == "auto") return {.automatic = true, .plan = {}};
  if (text == "none") return {};
  const auto refuse = [&] {
    throw UserError(base::join(
        "[plan] a plan is auto, none, or micro-batch=N,recompute=N with N between 1 and ", batch,
        " (the batch) and between 0 and ", segments, " (the blocks); got '", text, "'"));
  };
  std::map<std::string_view, std::int64_t> values;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) refuse();
    std::int64_t value = 0;
    const std::string_view number = part.substr(equals + 1);
    const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (status != std::errc{} || end != number.data() + number.size()) refuse();
    if (!values.emplace(part.substr(0, equals), value).second) refuse();
  }
  if (values.size() != 2 || !values.contains("micro-batch") || !values.contains("recompute"))
    refuse();
  const std::int64_t size = values["micro-batch"], recomputed = values["recompute"];
  if (size < 1 || size > batch || recomputed < 0 || recomputed > segments) refuse();
  return {.automatic = false,
          .plan = {.micro_batches = (batch + size - 1) / size, .recomputed = recomputed}};
}

std::string describe_plan(const Plan& plan, std::int64_t batch, std::int64_t segments) {
  const std::string sizes =
      base::join("micro-batch ", plan.largest(batch), " (", plan.micro_batches, " a step), ");
  if (plan.budget) return sizes + "saved values dropped under pressure";
  return base::join(sizes, plan.recomputed, " of ", segments, " blocks recomputed");
}

}  // namespace gradus::train
