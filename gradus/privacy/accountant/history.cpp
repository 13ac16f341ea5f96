#include <gradus/privacy/accountant/history.h>

#include <algorithm>
#include <cmath>

#include <gradus/base/error.h>

namespace gradus::privacy {
namespace {

constexpr const char* kComponent = "privacy_accountant";
constexpr std::int64_t kMaxSteps = std::int64_t{1} << 62;

void check(const GaussianSteps& steps) {
  GRADUS_CHECK(kComponent, std::isfinite(steps.noise_multiplier) && steps.noise_multiplier >= 0.0,
               "noise_multiplier must be finite and >= 0; got ", steps.noise_multiplier);
  GRADUS_CHECK(kComponent, steps.sample_rate >= 0.0 && steps.sample_rate <= 1.0,
               "sample_rate must be in [0, 1]; got ", steps.sample_rate,
               ". It is the expected batch size over the number of examples");
  GRADUS_CHECK(kComponent, steps.steps >= 0, "steps must be >= 0; got ", steps.steps);
  GRADUS_CHECK(kComponent, steps.max_batch_size >= 0, "max_batch_size must be >= 0; got ",
               steps.max_batch_size);
  GRADUS_CHECK(kComponent, steps.dataset_size >= 0, "dataset_size must be >= 0; got ",
               steps.dataset_size);
  GRADUS_CHECK(kComponent, steps.max_batch_size == 0 || steps.dataset_size > 0, "max_batch_size ",
               steps.max_batch_size, " needs dataset_size > 0; got ", steps.dataset_size,
               ". The chance of a cut depends on the number of examples");
}

}  // namespace

History::History(const std::vector<GaussianSteps>& entries) {
  for (const GaussianSteps& entry : entries) add(entry);
}

void History::add(const GaussianSteps& steps) {
  check(steps);
  GRADUS_CHECK(kComponent, steps.steps <= kMaxSteps - steps_,
               "at most 2^62 steps can be counted; got ", steps_, " + ", steps.steps);
  if (steps.steps == 0) return;
  const auto same = [&](GaussianSteps entry) {
    entry.steps = steps.steps;
    return entry == steps;
  };
  const auto found = std::find_if(entries_.begin(), entries_.end(), same);
  if (found == entries_.end())
    entries_.push_back(steps);
  else
    found->steps += steps.steps;
  steps_ += steps.steps;
}

void History::add(const History& other) {
  GRADUS_CHECK(kComponent, other.steps_ <= kMaxSteps - steps_,
               "at most 2^62 steps can be counted; got ", steps_, " + ", other.steps_);
  const std::vector<GaussianSteps> entries = other.entries_;  // other may be *this
  for (const GaussianSteps& entry : entries) add(entry);
}

bool History::operator==(const History& other) const {
  // Entries are distinct, so that as many equal ones are all.
  return entries_.size() == other.entries_.size() &&
         std::all_of(entries_.begin(), entries_.end(), [&](const GaussianSteps& entry) {
           return std::find(other.entries_.begin(), other.entries_.end(), entry) !=
                  other.entries_.end();
         });
}

}  // namespace gradus::privacy
