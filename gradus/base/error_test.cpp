#include <gradus/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradus {
namespace {

std::string message_of(const auto& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(ErrorTest, CheckNamesTheComponentTheRequirementTheValueAndTheCondition) {
  const int size = 0;
  EXPECT_EQ(message_of([&] { GRADUS_CHECK("window", size >= 1, "size must be >= 1; got ", size); }),
            "[window] size must be >= 1; got 0 (failed check: size >= 1)");
  EXPECT_THROW(GRADUS_CHECK("window", size >= 1, "no"), UserError);
}

TEST(ErrorTest, CheckThatHoldsDoesNotEvaluateItsMessage) {
  int evaluated = 0;
  GRADUS_CHECK("x", true, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

TEST(ErrorTest, InternalCheckThrowsAnInternalErrorThatAsksForAReport) {
  EXPECT_THROW(GRADUS_INTERNAL_CHECK("plane", false, "stack empty"), InternalError);
  EXPECT_THAT(message_of([] { GRADUS_INTERNAL_CHECK("plane", false, "stack empty"); }),
              testing::HasSubstr("defect of gradus"));
}

TEST(ErrorTest, CommErrorCarriesRankAndOperation) {
  const CommError error("[comm] rank 2 left", 2, "all_reduce");
  EXPECT_EQ(error.rank(), 2);
  EXPECT_EQ(error.operation(), "all_reduce");
}

}  // namespace
}  // namespace gradus
