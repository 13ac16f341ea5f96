#include <gradus/plan/budget_compression.h>

#include <functional>
#include <optional>
#include <utility>

#include <gradus/base/clock.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/internal/compression_probe.h>

namespace gradus::plan {

using plane::saved::Packed;
using plane::saved::Value;

namespace {

class GuardEncoder final : public recompute::Encoder {
 public:
  explicit GuardEncoder(std::weak_ptr<compress::CompressGuard> guard) : guard_(std::move(guard)) {}
  std::optional<Packed> encode(const Value& value, double max_ratio) override {
    const auto guard = guard_.lock();
    if (guard == nullptr) return std::nullopt;
    const base::MemoryCategoryScope activations(base::MemoryCategory::activations);
    return guard->encode(value, max_ratio);
  }

 private:
  // The budget's graph may outlive the guard, which must end on its thread.
  const std::weak_ptr<compress::CompressGuard> guard_;
};

compress::CompressOptions when_asked(compress::CompressOptions options) {
  options.on_save = false;
  return options;
}

}  // namespace

struct BudgetCompression::State {
  explicit State(const compress::CompressOptions& options)
      : may_not(options.keep),
        clock(options.clock),
        guard(std::make_shared<compress::CompressGuard>(when_asked(options))),
        encoder(std::make_shared<GuardEncoder>(guard)) {}

  std::function<bool(const Value&)> may_not;  // the user's, may be null
  base::Clock clock;
  std::shared_ptr<compress::CompressGuard> guard;
  std::shared_ptr<recompute::Encoder> encoder;
  std::optional<internal::CompressionProbe> probe;  // of the pass being traced
};

BudgetCompression::BudgetCompression(const compress::CompressOptions& options)
    : state_(std::make_unique<State>(options)) {}

BudgetCompression::~BudgetCompression() = default;

std::shared_ptr<recompute::Encoder> BudgetCompression::encoder() const { return state_->encoder; }

void BudgetCompression::begin_pass(double seconds) {
  state_->probe.emplace(seconds, state_->clock);
}

void BudgetCompression::saved(const Value& value, std::int64_t call) {
  if (!state_->probe) return;
  state_->probe->saved(*state_->guard, value, call, !state_->may_not || !state_->may_not(value));
}

std::vector<CompressedResult> BudgetCompression::results(const recompute::StepTrace& pass) const {
  return state_->probe ? state_->probe->results(pass) : std::vector<CompressedResult>();
}

compress::CompressStatistics BudgetCompression::statistics() const {
  return state_->guard->statistics();
}

compress::RoundingState BudgetCompression::rounding() const { return state_->guard->rounding(); }

}  // namespace gradus::plan
