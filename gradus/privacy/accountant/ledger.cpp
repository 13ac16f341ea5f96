#include <gradus/privacy/accountant/ledger.h>

#include <algorithm>
#include <random>
#include <utility>

#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::privacy {
namespace {

// Apart, always: an id from a seed would be one for two runs.
RunId draw_run() {
  std::random_device device;  // the system's random source
  const auto word = [&] {
    return (static_cast<std::uint64_t>(device()) << 32U) | static_cast<std::uint64_t>(device());
  };
  RunId run;
  while (!run.known()) run = {.high = word(), .low = word()};
  return run;
}

std::int64_t count_in(const History& history, const GaussianSteps& kind) {
  for (GaussianSteps entry : history.entries()) {
    const std::int64_t steps = std::exchange(entry.steps, kind.steps);
    if (entry == kind) return steps;
  }
  return 0;
}

// What @p later counts above @p earlier.
History excess(const History& later, const History& earlier) {
  History result;
  for (GaussianSteps entry : later.entries()) {
    entry.steps = std::max<std::int64_t>(0, entry.steps - count_in(earlier, entry));
    result.add(entry);
  }
  return result;
}

}  // namespace

Ledger::Ledger(History given) : total_(std::move(given)) {
  if (total_.steps() > 0) records_.push_back({.history = total_});
}

Ledger::Ledger(const Ledger& other) : records_(other.records_), total_(other.total_) {}

Ledger& Ledger::operator=(const Ledger& other) {
  if (this != &other) *this = Ledger(other);
  return *this;
}

Releases& Ledger::own() {
  const std::int64_t process = ::getpid();
  if (!own_ || process != process_) {
    records_.push_back({.run = draw_run()});
    own_ = records_.size() - 1;
    process_ = process;
  }
  return records_[*own_];
}

void Ledger::add(const GaussianSteps& steps) {
  total_.add(steps);  // refuses, and then nothing is counted
  if (steps.steps > 0) own().history.add(steps);
}

void Ledger::merge(const std::vector<Releases>& others) {
  std::vector<Releases> records = records_;
  History total = total_;
  for (const Releases& other : others) {
    if (other.history.steps() == 0) continue;
    const auto known = std::find_if(records.begin(), records.end(), [&](const Releases& record) {
      return other.run.known() ? record.run == other.run
                               : !record.run.known() && record.history == other.history;
    });
    if (known == records.end()) {
      total.add(other.history);
      records.push_back(other);
    } else if (other.run.known()) {
      const History more = excess(other.history, known->history);
      total.add(more);
      known->history.add(more);
    }
  }
  records_ = std::move(records);
  total_ = std::move(total);
}

RunId Ledger::run() const { return own_ ? records_[*own_].run : RunId{}; }

void Ledger::rename_run(const RunId& run) {
  GRADUS_INTERNAL_CHECK("privacy_accountant", run.known() && own_.has_value(),
                        "a run that has counted must be renamed to a known one");
  const bool taken = std::any_of(records_.begin(), records_.end(),
                                 [&](const Releases& record) { return record.run == run; });
  if (!taken) records_[*own_].run = run;
}

}  // namespace gradus::privacy
