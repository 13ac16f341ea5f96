#include <gradus/solve/linear_program.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <random>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::solve {
namespace {

using ::testing::HasSubstr;

TEST(LinearProgramTest, SolvesALinearProgramByHand) {
  // Maximise 3x + 2y with x + y <= 4, x + 3y <= 6, x <= 3: (3, 1), 11.
  LinearProgram program;
  const auto x = program.add_variable({.upper = 3.0, .cost = -3.0});
  const auto y = program.add_variable({.cost = -2.0});
  program.add_row({{x, 1.0}, {y, 1.0}}, -kUnbounded, 4.0);
  program.add_row({{x, 1.0}, {y, 1.0}, {y, 2.0}}, -kUnbounded, 6.0);
  const LinearSolution solution = program.solve();
  ASSERT_EQ(solution.status, LinearStatus::optimal);
  EXPECT_NEAR(solution.objective, -11.0, 1e-9);
  EXPECT_NEAR(solution.bound, -11.0, 1e-9);
  EXPECT_NEAR(solution.values[x], 3.0, 1e-9);
  EXPECT_NEAR(solution.values[y], 1.0, 1e-9);
}

LinearProgram knapsacks(std::mt19937_64& random, std::int64_t variables, std::int64_t rows) {
  LinearProgram program;
  std::uniform_int_distribution<int> value(1, 40);
  for (std::int64_t i = 0; i < variables; ++i)
    program.add_variable({.upper = 1.0, .cost = -double(value(random)), .integer = true});
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<Term> terms;
    double total = 0.0;
    for (std::int64_t i = 0; i < variables; ++i) {
      terms.push_back({i, double(value(random))});
      total += terms.back().coefficient;
    }
    program.add_row(terms, -kUnbounded, std::floor(total / 2));
  }
  return program;
}

TEST(LinearProgramTest, EqualsEnumerationOnRandomIntegerPrograms) {
  std::mt19937_64 random(1);
  std::uniform_int_distribution<int> draw(-9, 9);
  int infeasible = 0;
  for (int trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(trial);
    LinearProgram program;
    const int variables = 7;
    std::vector<double> cost, limit;
    std::vector<std::vector<double>> rows;
    for (int i = 0; i < variables; ++i) {
      cost.push_back(draw(random));
      program.add_variable({.upper = 2.0, .cost = cost.back(), .integer = true});
    }
    for (int r = 0; r < 4; ++r) {
      std::vector<Term> terms;
      rows.emplace_back();
      for (int i = 0; i < variables; ++i) {
        rows.back().push_back(draw(random));
        terms.push_back({i, rows.back().back()});
      }
      limit.push_back(draw(random) - 8);
      program.add_row(terms, -kUnbounded, limit.back());
    }
    double best = kUnbounded;
    for (int code = 0; code < 2187; ++code) {
      double objective = 0.0;
      bool holds = true;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        double sum = 0.0;
        for (int i = 0, rest = code; i < variables; ++i, rest /= 3) sum += rows[r][i] * (rest % 3);
        holds = holds && sum <= limit[r];
      }
      for (int i = 0, rest = code; i < variables; ++i, rest /= 3) objective += cost[i] * (rest % 3);
      if (holds) best = std::min(best, objective);
    }
    const LinearSolution solution = program.solve();
    if (std::isinf(best)) {
      EXPECT_EQ(solution.status, LinearStatus::infeasible);
      ++infeasible;
      continue;
    }
    ASSERT_EQ(solution.status, LinearStatus::optimal);
    EXPECT_EQ(std::round(solution.objective), best);
    EXPECT_NEAR(solution.bound, best, 1e-6);
    EXPECT_LE(program.solve({.relax_integers = true}).objective, best + 1e-6);
  }
  EXPECT_GT(infeasible, 0);
  EXPECT_LT(infeasible, 60);
}

TEST(LinearProgramTest, ReportsInfeasibleAndUnboundedPrograms) {
  for (const bool integer : {false, true}) {
    LinearProgram infeasible;
    const auto x = infeasible.add_variable({.upper = 1.0, .cost = 1.0, .integer = integer});
    const auto y = infeasible.add_variable({.upper = 1.0, .integer = integer});
    infeasible.add_row({{x, 1.0}, {y, 1.0}}, 3.0, kUnbounded);
    EXPECT_EQ(infeasible.solve().status, LinearStatus::infeasible);
    EXPECT_FALSE(infeasible.solve().has_values());
    LinearProgram unbounded;
    const auto z = unbounded.add_variable({.cost = -1.0, .integer = integer});
    const auto w = unbounded.add_variable({.integer = integer});
    unbounded.add_row({{z, 1.0}, {w, -1.0}}, -kUnbounded, 1.0);
    EXPECT_EQ(unbounded.solve().status, LinearStatus::unbounded);
  }
  LinearProgram empty;
  empty.add_row({}, 1.0, 2.0);
  EXPECT_EQ(empty.solve().status, LinearStatus::infeasible);
  EXPECT_EQ(LinearProgram().solve().status, LinearStatus::optimal);
}

TEST(LinearProgramTest, StopsAtItsTimeLimitWithABound) {
  std::mt19937_64 random(2);
  const LinearProgram program = knapsacks(random, 300, 30);
  const auto start = std::chrono::steady_clock::now();
  const LinearSolution solution = program.solve({.time_limit_s = 0.5});
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 3.0);
  ASSERT_EQ(solution.status, LinearStatus::feasible);
  EXPECT_LT(solution.bound, solution.objective);
  EXPECT_GT(solution.bound, 1.1 * solution.objective);  // Negative: within a tenth.
}

TEST(LinearProgramTest, StartsFromASolutionGiven) {
  std::mt19937_64 random(2);
  const LinearProgram program = knapsacks(random, 120, 12);
  const LinearSolution first = program.solve({.time_limit_s = 0.5});
  std::vector<Assignment> start;
  for (std::int64_t i = 0; i < program.variable_count(); ++i) start.push_back({i, first.values[i]});
  const LinearSolution second = program.solve({.time_limit_s = 0.2, .start = start});
  ASSERT_TRUE(second.has_values());
  EXPECT_LE(second.objective, first.objective);
}

TEST(LinearProgramTest, PrintsNothingAndLeavesTheInterruptHandlerAlone) {
  std::signal(SIGINT, SIG_IGN);
  std::mt19937_64 random(3);
  const LinearProgram program = knapsacks(random, 30, 3);
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  program.solve();
  program.solve({.relax_integers = true});
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(std::signal(SIGINT, SIG_DFL), SIG_IGN);
}

TEST(LinearProgramTest, SolvesFromSeveralThreads) {
  std::mt19937_64 random(4);
  const LinearProgram program = knapsacks(random, 20, 2);
  const double expected = program.solve().objective;
  std::vector<double> found(4);
  std::vector<std::thread> threads;
  for (double& objective : found)
    threads.emplace_back([&] { objective = program.solve().objective; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(found, ::testing::Each(expected));
}

TEST(LinearProgramTest, RefusesWhatIsNotAProgram) {
  LinearProgram program;
  const auto x = program.add_variable({});
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message([&] { program.add_variable({.lower = 2.0, .upper = 1.0}); }),
              HasSubstr("variable 1 must have lower <= upper; got 2 and 1"));
  EXPECT_THAT(message([&] { program.add_variable({.cost = NAN}); }), HasSubstr("cost"));
  EXPECT_THAT(message([&] { program.add_row({{x + 1, 1.0}}, 0.0, 1.0); }),
              HasSubstr("one of the 1 added; got 1"));
  EXPECT_THAT(message([&] { program.add_row({{x, kUnbounded}}, 0.0, 1.0); }),
              HasSubstr("coefficients must be finite"));
  EXPECT_THAT(message([&] { program.add_row({{x, 1.0}}, NAN, 1.0); }), HasSubstr("row 0"));
  EXPECT_THAT(message([&] { program.set_bounds(x, 1.0, 0.0); }), HasSubstr("variable 0"));
  EXPECT_THAT(message([&] { program.solve({.time_limit_s = 0.0}); }), HasSubstr("time_limit_s"));
  EXPECT_THAT(message([&] { program.solve({.start = {{2, 1.0}}}); }), HasSubstr("got 2"));
}

}  // namespace
}  // namespace gradus::solve
