#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <gradus/privacy/accountant/history.h>

namespace gradus::privacy {

/// Tells apart who released: 128 random bits. All zero: nobody that is known.
struct RunId {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  bool known() const { return high != 0 || low != 0; }
  bool operator==(const RunId&) const = default;
};

/// What one run released; of an unknown run, what a ledger was given as released before.
struct Releases {
  RunId run{};
  History history{};
};

/// Counts releases by who made them, so that ledgers which know of each other's runs merge without
/// counting a release twice or losing one.
///
/// Each ledger counts under a run id of its own, drawn when it first counts; copies and forked
/// processes draw another. The counts of one id only ever grow, in one place: of two records of an
/// id the larger count of each kind of step is the later one, and records of different ids add up
/// (a grow-only counter: Shapiro, Preguica, Baquero and Zawirski 2011).
class Ledger {
 public:
  /// @param given  Released before, by runs that are not known.
  explicit Ledger(History given = {});
  Ledger(const Ledger& other);
  Ledger& operator=(const Ledger& other);
  Ledger(Ledger&& other) noexcept = default;
  Ledger& operator=(Ledger&& other) noexcept = default;
  ~Ledger() = default;

  /// Counts @p steps under this ledger's own run. @throws UserError as History::add.
  void add(const GaussianSteps& steps);
  /// Counts what @p others have and this has not. A record without a run counts unless an equal one
  /// is here: what was given to two runs that are resumed from each other is given once.
  /// @throws UserError as History::add; nothing is counted then.
  void merge(const std::vector<Releases>& others);

  /// The run that add() counts under; all zero before the first.
  RunId run() const;
  /// Counts under @p run, what was counted so far included: processes that release the same steps
  /// together are one run. Nothing happens if @p run is here already.
  void rename_run(const RunId& run);

  const History& total() const { return total_; }
  const std::vector<Releases>& records() const { return records_; }

 private:
  Releases& own();

  std::vector<Releases> records_;
  History total_;
  std::optional<std::size_t> own_ = std::nullopt;  // of records_
  std::int64_t process_ = 0;                       // that drew the id
};

}  // namespace gradus::privacy
