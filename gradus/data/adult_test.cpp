#include <gradus/data/adult.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/temporary_folder.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

// Columns: age, workclass, fnlwgt, education, education-num, marital-status, occupation,
// relationship, race, sex, capital-gain, capital-loss, hours-per-week, native-country, label.
constexpr const char* kTrain =
    "20, Private, 100, HS-grad, 9, Divorced, Sales, Husband, White, Male, 0, 0, 40, Cuba, <=50K\n"
    "40, ?, 300, Masters, 14, Divorced, ?, Wife, Black, Female, 10, 0, 40, ?, >50K\n"
    "\n";
constexpr const char* kTest =
    "|1x3 Cross validator\n"
    "30, State-gov, 500, HS-grad, 9, Widowed, ?, Wife, White, Male, 5, 0, 41, Cuba, >50K.\n";

class AdultTest : public testing::Test {
 protected:
  AdultOptions options(const std::string& train = kTrain, const std::string& test = kTest) const {
    return {.train_path = folder_.write("adult.data", train),
            .test_path = folder_.write("adult.test", test)};
  }

  internal::TemporaryFolder folder_;
};

// Of the feature named @p name in row @p row.
float feature(const AdultData& data, const TabularPart& part, std::int64_t row,
              const std::string& name) {
  for (std::size_t i = 0; i < data.feature_names.size(); ++i) {
    if (data.feature_names[i] == name)
      return part.features[row][static_cast<std::int64_t>(i)].item<float>();
  }
  throw std::out_of_range(name);
}

TEST_F(AdultTest, StandardisesNumbersByTheTrainingRowsInBothParts) {
  const AdultData data = load_adult(options());
  EXPECT_EQ(data.train.size(), 2);
  EXPECT_EQ(data.test.size(), 1);
  EXPECT_EQ(feature(data, data.train, 0, "age"), -1.0F);  // mean 30, deviation 10
  EXPECT_EQ(feature(data, data.train, 1, "age"), 1.0F);
  EXPECT_EQ(feature(data, data.test, 0, "age"), 0.0F);
  EXPECT_EQ(feature(data, data.test, 0, "fnlwgt"), 3.0F);  // mean 200, deviation 100
  // Does not vary in training: only centred.
  EXPECT_EQ(feature(data, data.train, 1, "hours-per-week"), 0.0F);
  EXPECT_EQ(feature(data, data.test, 0, "hours-per-week"), 1.0F);
  EXPECT_THAT(data.means, ElementsAre(30, 200, 11.5, 5, 0, 40));
  EXPECT_THAT(data.deviations, ElementsAre(10, 100, 2.5, 5, 1, 1));
}

TEST_F(AdultTest, OneHotHasAFeatureForEachTrainingNameAndNoneForANewOne) {
  const AdultData data = load_adult(options());
  // 6 numbers; 2 names each but for marital-status, which has one.
  ASSERT_EQ(data.feature_names.size(), 6U + 7 * 2 + 1);
  EXPECT_EQ(data.train.features.sizes(), (std::vector<std::int64_t>{2, 21}));
  EXPECT_EQ(data.train.ids.sizes(), (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(data.feature_names[6], "workclass=?");
  EXPECT_EQ(feature(data, data.train, 0, "workclass=Private"), 1.0F);
  EXPECT_EQ(feature(data, data.train, 0, "workclass=?"), 0.0F);
  EXPECT_EQ(feature(data, data.train, 1, "workclass=?"), 1.0F);
  EXPECT_EQ(feature(data, data.test, 0, "workclass=Private"), 0.0F);
  EXPECT_EQ(feature(data, data.test, 0, "workclass=?"), 0.0F);
  EXPECT_EQ(feature(data, data.test, 0, "relationship=Wife"), 1.0F);
  EXPECT_EQ(feature(data, data.test, 0, "occupation=?"), 1.0F);
  EXPECT_EQ(data.train.features.slice(1, 6).sum().item<float>(), 16.0F);
  EXPECT_EQ(data.test.features.slice(1, 6).sum().item<float>(), 6.0F);  // two names are new
}

TEST_F(AdultTest, IdsCountFromOneAndZeroIsANameThatTrainingLacks) {
  AdultOptions with_ids = options();
  with_ids.categories = CategoryEncoding::ids;
  const AdultData data = load_adult(with_ids);
  EXPECT_EQ(data.train.features.size(1), 6);
  EXPECT_TRUE(data.train.ids.equal(
      torch::tensor({{2, 1, 1, 2, 1, 2, 2, 2}, {1, 2, 1, 1, 2, 1, 1, 1}}).to(torch::kLong)));
  EXPECT_TRUE(data.test.ids.equal(torch::tensor({{0, 1, 0, 1, 2, 2, 2, 2}}).to(torch::kLong)));
  EXPECT_THAT(data.id_counts(), ElementsAre(3, 3, 2, 3, 3, 3, 3, 3));
  EXPECT_EQ(data.categories[0], (CategoryColumn{"workclass", {"?", "Private"}}));
}

TEST_F(AdultTest, ReadsLabelsWithAndWithoutADot) {
  const AdultData data = load_adult(options());
  EXPECT_TRUE(data.train.labels.equal(torch::tensor({0, 1}).to(torch::kLong)));
  EXPECT_TRUE(data.test.labels.equal(torch::tensor({1}).to(torch::kLong)));
}

TEST_F(AdultTest, LeavesColumnsOutAndBoundsNumbers) {
  AdultOptions narrow = options();
  narrow.leave_out = {"age", "education"};
  narrow.limit = 2.0;
  const AdultData data = load_adult(narrow);
  EXPECT_EQ(data.feature_names.size(), 21U - 1 - 2);
  EXPECT_EQ(data.feature_names[0], "fnlwgt");
  EXPECT_EQ(feature(data, data.test, 0, "fnlwgt"), 2.0F);
  EXPECT_EQ(feature(data, data.test, 0, "sex=Male"), 1.0F);
}

TEST_F(AdultTest, NamesFileAndLineOfABadRow) {
  const std::string good = kTest;
  const auto message = [&](const std::string& from, const std::string& to) {
    std::string bad = good;
    bad.replace(bad.find(from), from.size(), to);
    return message_of([&] { load_adult(options(kTrain, bad)); });
  };
  const std::string place = folder_.path() + "/adult.test:2: ";
  EXPECT_THAT(message("Widowed, ", ""), HasSubstr(place + "a row must have 15 columns; got 14"));
  EXPECT_THAT(message("500", "5oo"), HasSubstr(place + "fnlwgt must be a number; got '5oo'"));
  EXPECT_THAT(message("500", "nan"), HasSubstr(place + "fnlwgt must be a number; got 'nan'"));
  EXPECT_THAT(message("500", ""), HasSubstr(place + "fnlwgt must be a number; got ''"));
  EXPECT_THAT(message("State-gov", ""), HasSubstr(place + "workclass must not be empty"));
  EXPECT_THAT(message(">50K.", "50K"),
              HasSubstr(place + "a label must be '<=50K' or '>50K'; got '50K'"));
  EXPECT_THAT(message_of([&] { load_adult(options(kTrain, "\n")); }),
              HasSubstr("a file must have rows; '" + folder_.path()));
}

TEST_F(AdultTest, RefusesOptionsOutsideTheirRange) {
  AdultOptions wrong = options();
  wrong.leave_out = {"wage"};
  EXPECT_THAT(message_of([&] { load_adult(wrong); }), HasSubstr("got 'wage'"));
  for (const double limit : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    wrong = options();
    wrong.limit = limit;
    EXPECT_THAT(message_of([&] { load_adult(wrong); }), HasSubstr("limit must be finite"));
  }
}

TEST_F(AdultTest, ReadsTheWholeDataSetOfThePackage) {
  AdultData data;
  try {
    data = load_adult({.environments = {GRADUS_DATA_TEST_ENVIRONMENT}});
  } catch (const UserError& error) {
    // A package that is there must be read.
    ASSERT_THAT(error.what(), HasSubstr("is part of the Python package"));
    GTEST_SKIP() << error.what();
  }
  ASSERT_EQ(data.train.size(), 32561);
  ASSERT_EQ(data.test.size(), 16281);
  EXPECT_EQ(data.train.features.size(1), 108);
  EXPECT_EQ(data.test.features.size(1), 108);
  EXPECT_EQ(data.train.labels.sum().item<std::int64_t>(), 7841);  // as adult.names counts them
  EXPECT_EQ(data.test.labels.sum().item<std::int64_t>(), 3846);
  const at::Tensor numbers = data.train.features.slice(1, 0, 6).to(torch::kDouble);
  EXPECT_LT(numbers.mean(0).abs().max().item<double>(), 1e-6);
  EXPECT_LT((numbers.std(0, /*unbiased=*/false) - 1).abs().max().item<double>(), 1e-5);
  // Every training row has one name in each of the eight columns.
  EXPECT_TRUE(data.train.features.slice(1, 6).sum(1).eq(8).all().item<bool>());
  EXPECT_THAT(data.id_counts(), ElementsAre(10, 17, 8, 16, 7, 6, 3, 43));
}

}  // namespace
}  // namespace gradus::data
