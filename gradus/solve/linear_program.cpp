#include <gradus/solve/linear_program.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <memory>
#include <mutex>
#include <string>

#include <Cbc_C_Interface.h>
#include <Clp_C_Interface.h>

#include <gradus/base/error.h>

namespace gradus::solve {
namespace {

// Outside C++ both models are void, so a deleter cannot tell them apart by type.
struct DeleteClp {
  void operator()(Clp_Simplex* model) const { Clp_deleteModel(model); }
};
struct DeleteCbc {
  void operator()(Cbc_Model* model) const { Cbc_deleteModel(model); }
};

// Cbc's driver keeps parameters in globals and installs a SIGINT handler of its own: one solve at a
// time, and the program's handler is put back.
class Turn {
 public:
  Turn() : lock_(mutex()), previous_(std::signal(SIGINT, SIG_DFL)) {
    std::signal(SIGINT, previous_);
  }
  ~Turn() { std::signal(SIGINT, previous_); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  std::lock_guard<std::mutex> lock_;
  void (*previous_)(int);
};

void check_interval(const char* what, std::int64_t index, double lower, double upper) {
  GRADUS_CHECK("linear_program", lower <= upper && lower < kUnbounded && upper > -kUnbounded, what,
               " ", index, " must have lower <= upper; got ", lower, " and ", upper);
}

}  // namespace

std::string_view to_string(LinearStatus status) {
  switch (status) {
    case LinearStatus::optimal:
      return "optimal";
    case LinearStatus::feasible:
      return "feasible";
    case LinearStatus::infeasible:
      return "infeasible";
    case LinearStatus::unbounded:
      return "unbounded";
    case LinearStatus::no_solution:
      return "no solution in time";
  }
  return "unknown";
}

// The matrix by columns, as Clp and Cbc load it.
struct LinearProgram::Columns {
  std::vector<CoinBigIndex> starts;
  std::vector<int> rows;
  std::vector<double> values, lower, upper, cost, row_lower, row_upper;
};

void LinearProgram::check_variable(std::int64_t variable) const {
  GRADUS_CHECK("linear_program", variable >= 0 && variable < variable_count(),
               "a variable must be one of the ", variable_count(), " added; got ", variable);
}

std::int64_t LinearProgram::add_variable(const Variable& variable) {
  check_interval("variable", variable_count(), variable.lower, variable.upper);
  GRADUS_CHECK("linear_program", std::isfinite(variable.cost), "cost must be finite; got ",
               variable.cost);
  variables_.push_back(variable);
  return variable_count() - 1;
}

std::int64_t LinearProgram::add_row(const std::vector<Term>& terms, double lower, double upper) {
  check_interval("row", row_count(), lower, upper);
  Row row{terms, lower, upper};
  for (const Term& term : terms) {
    check_variable(term.variable);
    GRADUS_CHECK("linear_program", std::isfinite(term.coefficient),
                 "coefficients must be finite; row ", row_count(), " has ", term.coefficient);
  }
  std::sort(row.terms.begin(), row.terms.end(),
            [](const Term& a, const Term& b) { return a.variable < b.variable; });
  std::size_t kept = 0;
  for (const Term& term : row.terms) {
    if (kept && row.terms[kept - 1].variable == term.variable)
      row.terms[kept - 1].coefficient += term.coefficient;
    else
      row.terms[kept++] = term;
  }
  row.terms.resize(kept);
  term_count_ += static_cast<std::int64_t>(kept);
  rows_.push_back(std::move(row));
  return row_count() - 1;
}

void LinearProgram::set_cost(std::int64_t variable, double cost) {
  check_variable(variable);
  GRADUS_CHECK("linear_program", std::isfinite(cost), "cost must be finite; got ", cost);
  variables_[variable].cost = cost;
}

void LinearProgram::set_bounds(std::int64_t variable, double lower, double upper) {
  check_variable(variable);
  check_interval("variable", variable, lower, upper);
  variables_[variable].lower = lower;
  variables_[variable].upper = upper;
}

void LinearProgram::set_integer(std::int64_t variable) {
  check_variable(variable);
  variables_[variable].integer = true;
}

LinearProgram::Columns LinearProgram::columns() const {
  Columns result;
  result.starts.assign(variables_.size() + 1, 0);
  for (const Row& row : rows_) {
    for (const Term& term : row.terms) ++result.starts[term.variable + 1];
    result.row_lower.push_back(row.lower);
    result.row_upper.push_back(row.upper);
  }
  for (std::size_t i = 0; i < variables_.size(); ++i) {
    result.starts[i + 1] += result.starts[i];
    result.lower.push_back(variables_[i].lower);
    result.upper.push_back(variables_[i].upper);
    result.cost.push_back(variables_[i].cost);
  }
  result.rows.resize(term_count_);
  result.values.resize(term_count_);
  std::vector<CoinBigIndex> next(result.starts.begin(), result.starts.end() - 1);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    for (const Term& term : rows_[i].terms) {
      const CoinBigIndex place = next[term.variable]++;
      result.rows[place] = static_cast<int>(i);
      result.values[place] = term.coefficient;
    }
  }
  return result;
}

LinearSolution LinearProgram::solve(const LinearOptions& options) const {
  GRADUS_CHECK("linear_program", options.time_limit_s > 0.0, "time_limit_s must be > 0; got ",
               options.time_limit_s);
  GRADUS_CHECK("linear_program", options.relative_gap >= 0.0, "relative_gap must be >= 0; got ",
               options.relative_gap);
  for (const Assignment& assignment : options.start) check_variable(assignment.variable);
  if (variables_.empty()) {
    LinearSolution solution;
    const bool holds = std::all_of(rows_.begin(), rows_.end(), [](const Row& row) {
      return row.lower <= 0.0 && row.upper >= 0.0;
    });
    solution.status = holds ? LinearStatus::optimal : LinearStatus::infeasible;
    solution.objective = solution.bound = holds ? 0.0 : kUnbounded;
    return solution;
  }
  const bool integers = std::any_of(variables_.begin(), variables_.end(),
                                    [](const Variable& variable) { return variable.integer; });
  const Turn turn;
  return integers && !options.relax_integers ? solve_integer(options) : solve_relaxed(options);
}

LinearSolution LinearProgram::solve_relaxed(const LinearOptions& options) const {
  const Columns matrix = columns();
  const std::unique_ptr<Clp_Simplex, DeleteClp> model(Clp_newModel());
  Clp_setLogLevel(model.get(), 0);
  Clp_loadProblem(model.get(), static_cast<int>(variables_.size()), static_cast<int>(rows_.size()),
                  matrix.starts.data(), matrix.rows.data(), matrix.values.data(),
                  matrix.lower.data(), matrix.upper.data(), matrix.cost.data(),
                  matrix.row_lower.data(), matrix.row_upper.data());
  Clp_setMaximumSeconds(model.get(), options.time_limit_s);
  Clp_initialSolve(model.get());
  LinearSolution solution;
  if (Clp_isProvenOptimal(model.get())) {
    const double* values = Clp_getColSolution(model.get());
    solution.values.assign(values, values + variables_.size());
    solution.status = LinearStatus::optimal;
    solution.objective = solution.bound = Clp_getObjValue(model.get());
  } else if (Clp_isProvenPrimalInfeasible(model.get())) {
    solution.status = LinearStatus::infeasible;
    solution.bound = kUnbounded;
  } else if (Clp_isProvenDualInfeasible(model.get())) {
    solution.status = LinearStatus::unbounded;
  }
  return solution;
}

LinearSolution LinearProgram::solve_integer(const LinearOptions& options) const {
  const Columns matrix = columns();
  const std::unique_ptr<Cbc_Model, DeleteCbc> owner(Cbc_newModel());
  Cbc_Model* const model = owner.get();
  Cbc_loadProblem(model, static_cast<int>(variables_.size()), static_cast<int>(rows_.size()),
                  matrix.starts.data(), matrix.rows.data(), matrix.values.data(),
                  matrix.lower.data(), matrix.upper.data(), matrix.cost.data(),
                  matrix.row_lower.data(), matrix.row_upper.data());
  for (std::size_t i = 0; i < variables_.size(); ++i)
    if (variables_[i].integer) Cbc_setInteger(model, static_cast<int>(i));
  Cbc_setLogLevel(model, 0);
  Cbc_setParameter(model, "log", "0");
  Cbc_setParameter(model, "slog", "0");
  Cbc_setParameter(model, "timeMode", "elapsed");
  Cbc_setParameter(model, "seconds", std::to_string(options.time_limit_s).c_str());
  Cbc_setParameter(model, "ratioGap", std::to_string(options.relative_gap).c_str());
  // Cbc's own 1e-10 stops it early where the objective counts bytes; 0 keeps it exact.
  Cbc_setParameter(model, "allowableGap", "0");
  // Cgl's preprocessing, stopped by the time limit between two passes, leaves passes without a
  // model, and undoing them reads a null pointer (docs/solve.md).
  Cbc_setParameter(model, "preprocess", "off");
  std::vector<int> places;
  std::vector<double> start;
  for (const Assignment& assignment : options.start) {
    places.push_back(static_cast<int>(assignment.variable));
    start.push_back(assignment.value);
  }
  if (!places.empty())
    Cbc_setMIPStartI(model, static_cast<int>(places.size()), places.data(), start.data());
  Cbc_solve(model);

  LinearSolution solution;
  solution.bound = Cbc_getBestPossibleObjValue(model);
  const bool found = Cbc_numberSavedSolutions(model) > 0 && Cbc_bestSolution(model) != nullptr;
  if (Cbc_isProvenInfeasible(model)) {
    solution.status = LinearStatus::infeasible;
    solution.bound = kUnbounded;
  } else if (Cbc_isContinuousUnbounded(model)) {
    solution.status = LinearStatus::unbounded;
    solution.bound = -kUnbounded;
  } else if (found || Cbc_isProvenOptimal(model)) {
    const double* values = Cbc_getColSolution(model);
    solution.values.assign(values, values + variables_.size());
    for (std::size_t i = 0; i < variables_.size(); ++i)
      if (variables_[i].integer) solution.values[i] = std::round(solution.values[i]);
    solution.status = Cbc_isProvenOptimal(model) ? LinearStatus::optimal : LinearStatus::feasible;
    solution.objective = Cbc_getObjValue(model);
    // Without preprocessing Cbc may leave its bound at the root's when the search is over.
    if (solution.status == LinearStatus::optimal && options.relative_gap < 1.0) {
      const double least = 1.0 - options.relative_gap;
      solution.bound =
          std::max(solution.bound, solution.objective >= 0.0 ? solution.objective * least
                                                             : solution.objective / least);
    }
    solution.bound = std::min(solution.bound, solution.objective);
  }
  return solution;
}

}  // namespace gradus::solve
