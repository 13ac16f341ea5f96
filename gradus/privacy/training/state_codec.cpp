#include <gradus/privacy/training/internal/state_codec.h>

#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/TensorAccessor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/ledger.h>

namespace gradus::privacy::internal {

void StateWriter::number(const std::string& name, double value) {
  entries_.emplace_back(prefix_ + name, at::full({}, value, at::kDouble));
}

void StateWriter::count(const std::string& name, std::int64_t value) {
  at::Tensor entry = at::empty({}, at::kLong);
  *entry.mutable_data_ptr<std::int64_t>() = value;
  entries_.emplace_back(prefix_ + name, entry);
}

void StateWriter::tensor(const std::string& name, const at::Tensor& value) {
  entries_.emplace_back(prefix_ + name, value.detach().to(at::kCPU, value.scalar_type(),
                                                          /*non_blocking=*/false, /*copy=*/true));
}

void StateWriter::noise(const std::string& name, const NoiseGenerator& generator) {
  at::Tensor entry = at::empty({generator.is_secure() ? 0 : 4}, at::kLong);
  if (!generator.is_secure()) {
    const NoiseState state = generator.state();
    auto* words = entry.mutable_data_ptr<std::int64_t>();
    words[0] = std::bit_cast<std::int64_t>(state.seed);
    words[1] = state.stream;
    words[2] = std::bit_cast<std::int64_t>(state.gaussian_blocks);
    words[3] = std::bit_cast<std::int64_t>(state.uniform_blocks);
  }
  entries_.emplace_back(prefix_ + name, entry);
}

// Entries of all records in one table, each with the number of its record.
void StateWriter::releases(const std::vector<Releases>& records) {
  std::int64_t n = 0;
  for (const Releases& record : records)
    n += static_cast<std::int64_t>(record.history.entries().size());
  at::Tensor runs = at::empty({static_cast<std::int64_t>(records.size()), 2}, at::kLong);
  at::Tensor numbers = at::empty({n, 2}, at::kDouble), counts = at::empty({n, 4}, at::kLong);
  auto* run = runs.mutable_data_ptr<std::int64_t>();
  auto* number = numbers.mutable_data_ptr<double>();
  auto* count = counts.mutable_data_ptr<std::int64_t>();
  for (std::size_t r = 0; r < records.size(); ++r) {
    *run++ = std::bit_cast<std::int64_t>(records[r].run.high);
    *run++ = std::bit_cast<std::int64_t>(records[r].run.low);
    for (const GaussianSteps& entry : records[r].history.entries()) {
      *number++ = entry.noise_multiplier;
      *number++ = entry.sample_rate;
      *count++ = static_cast<std::int64_t>(r);
      *count++ = entry.steps;
      *count++ = entry.dataset_size;
      *count++ = entry.max_batch_size;
    }
  }
  entries_.emplace_back(prefix_ + "releases.runs", runs);
  entries_.emplace_back(prefix_ + "releases.numbers", numbers);
  entries_.emplace_back(prefix_ + "releases.counts", counts);
}

StateReader::StateReader(const StateEntries& entries) {
  for (const auto& [name, tensor] : entries) {
    GRADUS_CHECK(kComponent, tensor.defined(), "state '", name, "' must be a defined tensor");
    GRADUS_CHECK(kComponent, entries_.emplace(name, tensor).second,
                 "state names must differ; got '", name, "' twice");
  }
}

at::Tensor StateReader::take(const std::string& name) {
  const auto found = entries_.find(name);
  GRADUS_CHECK(kComponent, found != entries_.end(), "the state must have an entry '", name,
               "'; it has none. It was not saved by a run of this kind");
  at::Tensor tensor = found->second;
  entries_.erase(found);
  return tensor;
}

at::Tensor StateReader::tensor(const std::string& name, at::ScalarType dtype,
                               at::IntArrayRef sizes) {
  at::Tensor entry = take(name);
  GRADUS_CHECK(kComponent, entry.scalar_type() == dtype && entry.sizes() == sizes, "state '", name,
               "' must be ", dtype, " of shape ", sizes, "; got ", entry.scalar_type(),
               " of shape ", entry.sizes());
  return entry.to(at::kCPU).contiguous();
}

double StateReader::number(const std::string& name) {
  return *tensor(name, at::kDouble, {}).const_data_ptr<double>();
}

std::int64_t StateReader::count(const std::string& name) {
  return *tensor(name, at::kLong, {}).const_data_ptr<std::int64_t>();
}

std::optional<NoiseState> StateReader::noise(const std::string& name, bool secure) {
  const auto found = entries_.find(name);
  const bool was_secure = found != entries_.end() && found->second.numel() == 0;
  GRADUS_CHECK(kComponent, found == entries_.end() || was_secure == secure, "the generator '", name,
               "' must be ", was_secure ? "secure" : "seeded",
               " as it was when the state was saved", "; got a ", secure ? "secure" : "seeded",
               " one");
  if (secure) {
    take(name);
    return std::nullopt;
  }
  const at::Tensor entry = tensor(name, at::kLong, {4});
  const auto* words = entry.const_data_ptr<std::int64_t>();
  return NoiseState{.seed = std::bit_cast<std::uint64_t>(words[0]),
                    .stream = static_cast<std::uint32_t>(words[1]),
                    .gaussian_blocks = std::bit_cast<std::uint64_t>(words[2]),
                    .uniform_blocks = std::bit_cast<std::uint64_t>(words[3])};
}

std::int64_t StateReader::rows_of(const std::string& name) const {
  const auto entry = entries_.find(name);
  return entry != entries_.end() && entry->second.dim() == 2 ? entry->second.size(0) : 0;
}

std::vector<Releases> StateReader::releases() {
  GRADUS_CHECK(kComponent, !entries_.contains("history.counts"),
               "the state must say which run released what ('releases.runs'); it is of an older "
               "format ('history.counts'), which does not tell its own releases from others. Start "
               "a new run, and give that history as spent");
  const std::int64_t records = rows_of("releases.runs"), n = rows_of("releases.counts");
  const at::Tensor runs = tensor("releases.runs", at::kLong, {records, 2});
  const at::Tensor numbers = tensor("releases.numbers", at::kDouble, {n, 2});
  const at::Tensor counts = tensor("releases.counts", at::kLong, {n, 4});
  std::vector<Releases> result;
  const auto* run = runs.const_data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < records; ++r, run += 2) {
    result.push_back({.run = {.high = std::bit_cast<std::uint64_t>(run[0]),
                              .low = std::bit_cast<std::uint64_t>(run[1])}});
  }
  const auto* number = numbers.const_data_ptr<double>();
  const auto* count = counts.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < n; ++i, number += 2, count += 4) {
    GRADUS_CHECK(kComponent, count[0] >= 0 && count[0] < records,
                 "state 'releases.counts' must name one of ", records, " runs; got ", count[0]);
    result[static_cast<std::size_t>(count[0])].history.add({.noise_multiplier = number[0],
                                                            .sample_rate = number[1],
                                                            .steps = count[1],
                                                            .dataset_size = count[2],
                                                            .max_batch_size = count[3]});
  }
  return result;
}

StateEntries StateReader::under(const std::string& prefix) {
  StateEntries found;
  for (auto at = entries_.lower_bound(prefix);
       at != entries_.end() && at->first.starts_with(prefix); at = entries_.erase(at)) {
    found.emplace_back(at->first.substr(prefix.size()), at->second);
  }
  return found;
}

void StateReader::expect(const std::string& name, double expected, const char* meaning) {
  const double got = number(name);
  GRADUS_CHECK(
      kComponent, got == expected, "the ", meaning, " of the state must be that of this run, ",
      expected, "; got ", got,
      ". Make the run private with the settings that were saved; to go on with others, start "
      "a new one and give the old history as spent");
}

void StateReader::finish() const {
  GRADUS_CHECK(kComponent, entries_.empty(), "state '", entries_.begin()->first,
               "' must belong to this run; it is unknown here");
}

}  // namespace gradus::privacy::internal
