#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace gradus::solve {

inline constexpr double kUnbounded = std::numeric_limits<double>::infinity();

/// A variable and its coefficient in a row.
struct Term {
  std::int64_t variable = 0;
  double coefficient = 0.0;
};

struct Assignment {
  std::int64_t variable = 0;
  double value = 0.0;
};

struct Variable {
  double lower = 0.0;
  double upper = kUnbounded;
  double cost = 0.0;  ///< Coefficient in the objective, which is minimised.
  bool integer = false;
};

enum class LinearStatus : std::uint8_t {
  optimal,      ///< Within the gap asked for.
  feasible,     ///< The time ran out; `values` is the best found.
  infeasible,   ///< Proven.
  unbounded,    ///< The objective falls without end.
  no_solution,  ///< The time ran out with nothing found.
};
std::string_view to_string(LinearStatus status);

struct LinearOptions {
  double time_limit_s = 10.0;   ///< Wall clock, > 0. Presolve may pass it by a little.
  double relative_gap = 0.0;    ///< Stop once (objective - bound) <= gap * |objective|. >= 0.
  bool relax_integers = false;  ///< Solve the linear relaxation.
  std::vector<Assignment>
      start{};  ///< Values of some or all variables to start from; Cbc completes
                ///< them and drops them if not feasible. Integer programs only.
};

struct LinearSolution {
  LinearStatus status = LinearStatus::no_solution;
  double objective = kUnbounded;  ///< Of `values`.
  double bound = -kUnbounded;     ///< No solution is below it.
  std::vector<double> values;     ///< One a variable; integers rounded. Empty if there is none.

  bool has_values() const { return !values.empty(); }
};

/// A linear or mixed integer program: minimise cost x with lower <= x <= upper, rows
/// lower <= a x <= upper, some x integer. Solved by COIN-OR's Clp and Cbc in this process, which
/// print nothing here and take no signal.
///
/// Not thread-safe while it is built; solve() is const, and calls from several threads take turns.
class LinearProgram {
 public:
  /// @return The variable's index.
  /// @throws UserError on NaN or lower > upper.
  std::int64_t add_variable(const Variable& variable);
  /// Adds lower <= sum of terms <= upper; terms of one variable are added up.
  /// @return The row's index.
  /// @throws UserError on an unknown variable, a coefficient that is not finite, or lower > upper.
  std::int64_t add_row(const std::vector<Term>& terms, double lower, double upper);
  void set_cost(std::int64_t variable, double cost);
  void set_bounds(std::int64_t variable, double lower, double upper);
  void set_integer(std::int64_t variable);

  std::int64_t variable_count() const { return static_cast<std::int64_t>(variables_.size()); }
  std::int64_t row_count() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t term_count() const { return term_count_; }

  /// @throws UserError on an invalid option.
  LinearSolution solve(const LinearOptions& options = {}) const;

 private:
  struct Row {
    std::vector<Term> terms;  // Sorted by variable, each once.
    double lower = 0.0;
    double upper = 0.0;
  };
  struct Columns;
  void check_variable(std::int64_t variable) const;
  Columns columns() const;
  LinearSolution solve_relaxed(const LinearOptions& options) const;
  LinearSolution solve_integer(const LinearOptions& options) const;

  std::vector<Variable> variables_;
  std::vector<Row> rows_;
  std::int64_t term_count_ = 0;
};

}  // namespace gradus::solve
