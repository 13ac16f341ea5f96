#include <gradus/data/batches.h>

#include <array>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/counter_random.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using tests::message_of;

/// A file whose token i is i: a batch then shows where it was taken.
std::shared_ptr<const TokenFile> counting_file(std::int64_t count) {
  std::string pattern = (fs::temp_directory_path() / "gradus-batches-XXXXXX").string();
  const std::string directory = ::mkdtemp(pattern.data());
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  TokenFile::write(directory + "/tokens", tokens, {.vocabulary_size = 65536});
  auto file = TokenFile::open(directory + "/tokens");
  fs::remove_all(directory);  // the mapping keeps it readable
  return file;
}

/// First tokens of the sequences of one epoch, in order.
std::vector<std::int64_t> starts_of_epoch(BatchStream& stream) {
  std::vector<std::int64_t> starts;
  const std::int64_t epoch = stream.position().epoch;
  while (stream.position().epoch == epoch) {
    const Batch batch = stream.next();
    for (std::int64_t row = 0; row < batch.size(); ++row)
      starts.push_back(batch.inputs[row][0].item<std::int64_t>());
  }
  return starts;
}

TEST(SplitTokensTest, EachBlockGivesItsEndToValidation) {
  const TokenSplit split = split_tokens(103, {.validation_ratio = 0.2, .blocks = 2});
  EXPECT_EQ(split.train, (std::vector<TokenRange>{{0, 42}, {52, 93}}));
  EXPECT_EQ(split.validation, (std::vector<TokenRange>{{42, 52}, {93, 103}}));
}

TEST(SplitTokensTest, EveryTokenBelongsToOneSide) {
  for (const std::int64_t count : {20, 1000, 1'039'123}) {
    const TokenSplit split = split_tokens(count);
    std::vector<TokenRange> all = split.train;
    all.insert(all.end(), split.validation.begin(), split.validation.end());
    std::sort(all.begin(), all.end(),
              [](const TokenRange& a, const TokenRange& b) { return a.begin < b.begin; });
    std::int64_t at = 0, held_out = 0;
    for (const TokenRange& range : all) {
      EXPECT_EQ(range.begin, at);
      at = range.end;
    }
    EXPECT_EQ(at, count);
    for (const TokenRange& range : split.validation) held_out += range.end - range.begin;
    EXPECT_NEAR(static_cast<double>(held_out), 0.05 * static_cast<double>(count), 20.0);
  }
  EXPECT_TRUE(split_tokens(100, {.validation_ratio = 0.0}).validation.empty());
}

TEST(SplitTokensTest, RefusesOptionsOutsideTheirRange) {
  EXPECT_THAT(message_of([] { split_tokens(100, {.validation_ratio = 1.0}); }),
              HasSubstr("[0, 1); got 1"));
  EXPECT_THAT(message_of([] { split_tokens(100, {.validation_ratio = -0.1}); }),
              HasSubstr("[0, 1)"));
  EXPECT_THAT(message_of([] { split_tokens(100, {.blocks = 0}); }), HasSubstr("got 0"));
  EXPECT_THAT(message_of([] { split_tokens(10); }), HasSubstr("a text of 10 tokens"));
}

TEST(BatchStreamTest, TargetsAreTheInputsOneTokenLater) {
  BatchStream stream(counting_file(100), {{10, 40}, {60, 71}},
                     {.batch_size = 3, .sequence_length = 5});
  for (int i = 0; i < 10; ++i) {
    const Batch batch = stream.next();
    EXPECT_EQ(batch.inputs.scalar_type(), at::kLong);
    EXPECT_EQ(batch.inputs.sizes(), (std::vector<std::int64_t>{batch.size(), 5}));
    for (std::int64_t row = 0; row < batch.size(); ++row) {
      const auto first = batch.inputs[row][0].item<std::int64_t>();
      EXPECT_TRUE(at::equal(batch.inputs[row], at::arange(first, first + 5)));
      EXPECT_TRUE(at::equal(batch.targets[row], at::arange(first + 1, first + 6)));
    }
  }
}

TEST(BatchStreamTest, EachEpochGivesEverySequenceOnceAndNoneCrossesARange) {
  BatchStream stream(counting_file(100), {{10, 41}, {50, 55}, {60, 71}},
                     {.batch_size = 3, .sequence_length = 5, .seed = 4});
  // 31 tokens hold 6 sequences of 5 and a last target; 5 hold none; 11 hold 2.
  const std::set<std::int64_t> expected{10, 15, 20, 25, 30, 35, 60, 65};
  EXPECT_EQ(stream.sequences_per_epoch(), 8);
  EXPECT_EQ(stream.batches_per_epoch(), 3);
  std::set<std::vector<std::int64_t>> orders;
  for (int epoch = 0; epoch < 5; ++epoch) {
    const std::vector<std::int64_t> starts = starts_of_epoch(stream);
    EXPECT_EQ(starts.size(), expected.size());
    EXPECT_EQ(std::set<std::int64_t>(starts.begin(), starts.end()), expected);
    orders.insert(starts);
  }
  EXPECT_EQ(orders.size(), 5u);
}

TEST(BatchStreamTest, LastBatchOfAnEpochHoldsWhatIsLeft) {
  BatchStream stream(counting_file(100), {{0, 100}}, {.batch_size = 4, .sequence_length = 9});
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < 4; ++i) sizes.push_back(stream.next().size());
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{4, 4, 3, 4}));
  EXPECT_EQ(stream.position(), (DataPosition{1, 4}));
}

TEST(BatchStreamTest, OrderIsFixedForEverySeedAndPlatform) {
  // Independently computed with Python's integers: SplitMix64 and Fisher-Yates as the header
  // describes them.
  BatchStream stream(counting_file(41), {{0, 41}},
                     {.batch_size = 10, .sequence_length = 4, .seed = 42});
  EXPECT_EQ(starts_of_epoch(stream),
            (std::vector<std::int64_t>{12, 24, 20, 8, 32, 0, 36, 4, 28, 16}));
  EXPECT_EQ(starts_of_epoch(stream),
            (std::vector<std::int64_t>{4, 36, 12, 32, 24, 0, 16, 20, 28, 8}));
  BatchStream plain(counting_file(41), {{0, 41}},
                    {.batch_size = 3, .sequence_length = 4, .shuffle = false});
  for (int epoch = 0; epoch < 2; ++epoch) {
    EXPECT_EQ(starts_of_epoch(plain),
              (std::vector<std::int64_t>{0, 4, 8, 12, 16, 20, 24, 28, 32, 36}));
  }
}

TEST(BatchStreamTest, SavedPositionContinuesExactlyEvenWithAnotherBatchSize) {
  const auto file = counting_file(2000);
  const BatchOptions options{.batch_size = 7, .sequence_length = 16, .seed = 9};
  BatchStream whole(file, {{0, 2000}}, options);
  for (int i = 0; i < 50; ++i) {
    const DataPosition saved = whole.position();
    const Batch expected = whole.next();
    BatchStream resumed(file, {{0, 2000}}, options);
    resumed.seek(saved);
    const Batch got = resumed.next();
    EXPECT_TRUE(at::equal(got.inputs, expected.inputs) && at::equal(got.targets, expected.targets))
        << i;
    EXPECT_EQ(resumed.position(), whole.position());

    BatchStream single(file, {{0, 2000}}, {.batch_size = 1, .sequence_length = 16, .seed = 9});
    single.seek(saved);
    EXPECT_TRUE(at::equal(single.next().inputs[0], expected.inputs[0]));
  }
  // Back within an epoch, too.
  whole.seek({0, 0});
  BatchStream fresh(file, {{0, 2000}}, options);
  EXPECT_TRUE(at::equal(whole.next().inputs, fresh.next().inputs));
}

TEST(BatchStreamTest, LibTorchsGeneratorIsLeftAlone) {
  const auto file = counting_file(500);
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state().clone();
  BatchStream stream(file, {{0, 500}}, {.batch_size = 8, .sequence_length = 8});
  const Batch first = stream.next();
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  at::manual_seed(123);
  BatchStream other(file, {{0, 500}}, {.batch_size = 8, .sequence_length = 8});
  EXPECT_TRUE(at::equal(other.next().inputs, first.inputs));
}

TEST(BatchStreamTest, RefusesOptionsRangesAndPositionsOutside) {
  const auto file = counting_file(50);
  const std::vector<TokenRange> all{{0, 50}};
  EXPECT_THAT(message_of([&] { BatchStream(file, all, {.batch_size = 0}); }),
              HasSubstr("batch_size must be >= 1; got 0"));
  EXPECT_THAT(message_of([&] { BatchStream(file, all, {.sequence_length = 0}); }),
              HasSubstr("sequence_length must be >= 1"));
  EXPECT_THAT(message_of([&] { BatchStream(file, all, {.sequence_length = 50}); }),
              HasSubstr("must hold sequence_length + 1 = 51 tokens; none of 1 does"));
  EXPECT_THAT(message_of([&] { BatchStream(file, {{0, 51}}, {.sequence_length = 4}); }),
              HasSubstr("must lie in a file of 50"));
  EXPECT_THAT(message_of([&] { BatchStream(nullptr, all, {}); }), HasSubstr("needs a token file"));
  BatchStream stream(file, all, {.sequence_length = 7});
  for (const DataPosition bad : {DataPosition{-1, 0}, DataPosition{0, -1}, DataPosition{0, 7}}) {
    EXPECT_THAT(message_of([&] { stream.seek(bad); }),
                HasSubstr("below the 7 sequences of an epoch"));
  }
}

TEST(CounterRandomTest, BoundedDrawsAndPermutationsAreUniform) {
  // 24 orders of 4 elements, 24,000 keys: chi-squared with 23 degrees of freedom is below 49.7
  // in 99.9 % of cases.
  std::map<std::array<int, 4>, int> counts;
  for (std::uint64_t epoch = 0; epoch < 24'000; ++epoch) {
    std::array<int, 4> order{0, 1, 2, 3};
    internal::CounterRandom random(7, epoch);
    for (std::size_t left = 4; left > 1; --left)
      std::swap(order[left - 1], order[random.below(left)]);
    ++counts[order];
  }
  ASSERT_EQ(counts.size(), 24u);
  double chi_squared = 0.0;
  for (const auto& [order, count] : counts)
    chi_squared += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi_squared, 49.7);
  internal::CounterRandom random(1, 1);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(random.below(1), 0u);
}

}  // namespace
}  // namespace gradus::data
