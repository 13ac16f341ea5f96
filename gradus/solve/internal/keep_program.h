#pragma once

#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include <gradus/solve/keep_or_drop.h>
#include <gradus/solve/linear_program.h>

namespace gradus::solve::internal {

/// @throws UserError on a graph that GraphValue's and ValueGraph's comments forbid.
void check_graph(const ValueGraph& graph);

/// Saved values by their first use in backward: the order in which they are made again.
std::vector<std::size_t> replay_order(const ValueGraph& graph);

/// evaluate() of a graph and set known to be valid, for searches that call it thousands of times.
KeepCost evaluate_checked(const ValueGraph& graph, const KeepSet& keep,
                          const std::vector<std::size_t>& order);

/// The choice of kept values as a mixed integer program. Bytes are in units of scale_bytes.
///
/// Backward is divided at events, the first backward uses of saved values: only there do replays
/// start. Variables: keep[v]; replay[v], made again; in_memory[v][k], in memory during interval k
/// because kept or replayed at event k or before; needed[v], past its last backward use, by a
/// replay still to come.
class KeepProgram {
 public:
  enum class Objective : std::uint8_t { least_time, least_peak };

  /// @param exact  false counts kept values only, at so many positions as fit into 500,000 terms:
  ///   far smaller, and still a lower bound.
  /// @return nothing if the program has more than max_terms terms.
  static std::optional<KeepProgram> build(const ValueGraph& graph, Objective objective,
                                          std::int64_t budget_bytes, bool exact,
                                          std::optional<std::int64_t> max_terms);

  LinearSolution solve(const LinearOptions& options) const { return program_.solve(options); }
  const LinearProgram& program() const { return program_; }
  /// keep[v] of a solution.
  std::vector<double> keep_values(const LinearSolution& solution) const;
  /// The start that a choice is.
  std::vector<Assignment> assignment(const KeepSet& keep) const;
  double scale_bytes() const { return scale_; }

 private:
  explicit KeepProgram(const ValueGraph& graph, Objective objective, std::int64_t budget_bytes);

  // A linear expression: a variable, or the constant 1.
  struct Level {
    std::int64_t variable = -1;
  };
  void add_events();
  void add_values(bool exact);
  void add_edges(bool exact);
  void add_memory_rows(bool exact);
  void add_memory_row(std::vector<Term> terms, std::int64_t constant_bytes);
  Level in_memory(std::int64_t value, std::int64_t interval) const;
  std::int64_t needed(std::int64_t value, std::int64_t interval, std::int64_t event);
  std::int64_t interval_of(std::int64_t position) const;
  std::int64_t first_event(std::int64_t value) const;
  double scaled(std::int64_t bytes) const { return static_cast<double>(bytes) / scale_; }

  const ValueGraph* graph_;
  Objective objective_;
  std::int64_t budget_bytes_;
  double scale_ = 1.0;
  std::int64_t peak_ = -1;
  LinearProgram program_;
  std::vector<std::int64_t> events_;
  std::vector<std::int64_t> keep_, replay_;
  std::vector<std::vector<std::int64_t>> consumers_;
  std::vector<std::int64_t> earliest_, latest_;       // Events of a replay; latest_ -1 if never.
  std::vector<std::vector<std::int64_t>> in_memory_;  // Of events earliest_ to latest_.
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::int64_t> needed_;
};

}  // namespace gradus::solve::internal
