#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gradus/privacy/noise/noise.h>
#include <gradus/privacy/training/state_entries.h>

namespace gradus::privacy {
struct Releases;
}

namespace gradus::privacy::internal {

constexpr const char* kComponent = "privacy_training";

/// Appends entries under one prefix.
class StateWriter {
 public:
  StateWriter(StateEntries& entries, std::string prefix)
      : entries_(entries), prefix_(std::move(prefix)) {}

  void number(const std::string& name, double value);
  void count(const std::string& name, std::int64_t value);
  void tensor(const std::string& name, const at::Tensor& value);
  void noise(const std::string& name, const NoiseGenerator& generator);
  void releases(const std::vector<Releases>& records);

 private:
  StateEntries& entries_;
  std::string prefix_;
};

/// Reads entries, once each, and refuses what is left over.
class StateReader {
 public:
  /// @throws UserError if a name comes twice.
  explicit StateReader(const StateEntries& entries);

  bool has(const std::string& name) const { return entries_.contains(name); }
  double number(const std::string& name);
  std::int64_t count(const std::string& name);
  at::Tensor tensor(const std::string& name, at::ScalarType dtype, at::IntArrayRef sizes);
  /// The state of a seeded generator, or nothing where @p secure. @throws UserError if the state is
  /// of the other kind.
  std::optional<NoiseState> noise(const std::string& name, bool secure);
  std::vector<Releases> releases();
  /// All whose name begins with @p prefix, without it.
  StateEntries under(const std::string& prefix);
  /// @throws UserError, naming the setting, unless the entry is @p expected, bit for bit.
  void expect(const std::string& name, double expected, const char* meaning);
  /// @throws UserError if an entry was not read.
  void finish() const;

 private:
  at::Tensor take(const std::string& name);
  std::int64_t rows_of(const std::string& name) const;

  std::map<std::string, at::Tensor> entries_;
};

}  // namespace gradus::privacy::internal
