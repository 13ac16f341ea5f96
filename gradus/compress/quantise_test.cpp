#include <gradus/compress/quantise.h>

#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::compress {
namespace {

using plane::saved::Packed;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const std::vector<at::ScalarType> kReals{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

class QuantiseTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

at::Tensor restore(const std::optional<Packed>& packed) { return packed->restore(packed->payload); }

// Checks the bound in each block of 256 values in the order of memory; "" if it holds everywhere.
std::string bound_broken(const at::Tensor& x, const at::Tensor& y, int bits) {
  const auto a = x.to(at::kDouble);
  const auto b = y.to(at::kDouble);
  for (std::int64_t first = 0; first < a.numel(); first += 256) {
    const auto block = a.slice(0, first, std::min(first + 256, a.numel()));
    const double bound = Quantiser::error_bound(bits, block.min().item<double>(),
                                                block.max().item<double>(), x.scalar_type());
    for (std::int64_t i = first; i < first + block.numel(); ++i) {
      const double error = std::abs(a.const_data_ptr<double>()[i] - b.const_data_ptr<double>()[i]);
      if (!(error <= bound)) {
        return base::join("element ", i, " errs by ", error, ", more than ", bound);
      }
    }
  }
  return "";
}

TEST_F(QuantiseTest, EveryElementStaysWithinItsBlocksBoundForEverySizeAndDtype) {
  for (const int bits : {8, 4, 2}) {
    Quantiser quantiser(bits);
    for (const auto dtype : kReals) {
      for (const std::int64_t n : {37, 64, 255, 256, 257, 511, 1023, 5001}) {
        for (const double offset : {0.0, 1000.0}) {
          for (const double factor : {1.0, 1e-4, 3e4}) {
            const auto x = (torch::randn({n}, at::kDouble) * factor + offset).to(dtype);
            if (!x.isfinite().all().item<bool>()) continue;
            SCOPED_TRACE(testing::Message()
                         << bits << dtype << n << " " << offset << " " << factor);
            const auto packed = quantiser.pack(x);
            if (!packed) {
              EXPECT_LT(n, 64);  // 37 values of 2 bytes are no more than their scales and codes
              continue;
            }
            const auto y = restore(packed);
            EXPECT_EQ(y.dtype(), x.dtype());
            EXPECT_EQ(bound_broken(x, y, bits), "");
            EXPECT_TRUE(restore(packed).equal(y)) << "a second time";
          }
        }
      }
    }
  }
}

TEST_F(QuantiseTest, TheBoundIsTheTextbooksWhereArithmeticDoesNotRound) {
  // Multiples of 1/16 between -8 and 7.9: every step is exact in float but for the scale.
  const auto x = torch::randint(-128, 127, {4096}).to(at::kFloat) / 16;
  for (const int bits : {8, 4, 2}) {
    Quantiser quantiser(bits, {.seed = 3});
    const auto error = (restore(quantiser.pack(x)) - x).abs().view({-1, 256});
    const auto blocks = x.view({-1, 256});
    const auto bound =
        (std::get<0>(blocks.max(1)) - std::get<0>(blocks.min(1))) / ((1 << bits) - 1);
    EXPECT_TRUE((std::get<0>(error.max(1)) <= bound * (1 + 1e-5) + 2e-6).all().item<bool>());
  }
}

TEST_F(QuantiseTest, RestoredValuesAreRightOnAverage) {
  const auto x = torch::randn({1024});
  constexpr int kRounds = 400;
  for (const int bits : {8, 4, 2}) {
    Quantiser quantiser(bits, {.seed = 11});
    auto sum = torch::zeros({1024}, at::kDouble);
    auto squares = torch::zeros({1024}, at::kDouble);
    for (int i = 0; i < kRounds; ++i) {
      const auto error = restore(quantiser.pack(x)).to(at::kDouble) - x.to(at::kDouble);
      sum += error;
      squares += error * error;
    }
    // Bernoulli rounding between neighbours a step apart: each mean errs by at most step / (2
    // sqrt(rounds)) in standard deviation. Five of these bound 1024 means (p < 1e-3).
    const auto blocks = x.view({-1, 256});
    const auto step =
        ((std::get<0>(blocks.max(1)) - std::get<0>(blocks.min(1))) / ((1 << bits) - 1))
            .to(at::kDouble);
    const auto means = (sum / kRounds).view({-1, 256});
    EXPECT_TRUE(
        (means.abs() <= (5 * step / (2 * std::sqrt(kRounds))).unsqueeze(1)).all().item<bool>())
        << bits;
    // The mean over all elements is far tighter, and shows a bias that each one could hide.
    const double deviation = std::sqrt(squares.sum().item<double>());
    EXPECT_LT(std::abs(sum.sum().item<double>()), 4 * deviation) << bits;
    EXPECT_GT(deviation, 0);
  }
}

TEST_F(QuantiseTest, RoundingIsIndependentBetweenPlacesBlocksAndCalls) {
  // One value half-way between two codes in each place: codes are coin flips.
  auto x = torch::full({64 * 256}, 0.5);
  x.view({-1, 256}).select(1, 0).fill_(0);
  x.view({-1, 256}).select(1, 1).fill_(3);  // 2 bits: codes are 0, 1, 2, 3
  Quantiser quantiser(2, {.seed = 5});
  const auto flips = [&] {
    return (restore(quantiser.pack(x)).view({64, 256}).slice(1, 2) * 2 - 1).to(at::kDouble);
  };
  const auto a = flips();
  const auto b = flips();
  EXPECT_TRUE((a.abs() == 1).all().item<bool>());
  const auto correlation = [](const at::Tensor& u, const at::Tensor& v) {
    return (u * v).sum().item<double>() / std::sqrt(static_cast<double>(u.numel()));
  };
  EXPECT_LT(std::abs(correlation(a, b)), 4) << "calls";
  EXPECT_LT(std::abs(correlation(a.slice(0, 1), a.slice(0, 0, 63))), 4) << "blocks";
  for (const int lag : {1, 2, 4, 8, 16}) {
    EXPECT_LT(std::abs(correlation(a.slice(1, lag), a.slice(1, 0, 254 - lag))), 4) << lag;
  }
}

TEST_F(QuantiseTest, StateResumesTheStreamAndLibTorchsGeneratorIsLeftAlone) {
  const auto x = torch::randn({3000});
  Quantiser first(4, {.seed = 42});
  torch::manual_seed(7);
  restore(first.pack(x));
  const RoundingState saved = first.state();
  EXPECT_EQ(saved, (RoundingState{42, 1}));
  const auto next = restore(first.pack(x));
  const auto drawn = torch::rand({3});
  torch::manual_seed(7);
  EXPECT_TRUE(torch::rand({3}).equal(drawn));
  Quantiser resumed(4, saved);
  EXPECT_TRUE(restore(resumed.pack(x)).equal(next));
  Quantiser other(4, {.seed = 43, .calls = 1});
  EXPECT_FALSE(restore(other.pack(x)).equal(next));
}

TEST_F(QuantiseTest, ConstantBlocksAreExact) {
  for (const auto dtype : kReals) {
    for (const double value : {0.0, -3.25, 1e-4}) {
      const auto x = torch::full({700}, value, at::kDouble).to(dtype);
      Quantiser quantiser(2);
      EXPECT_TRUE(restore(quantiser.pack(x)).equal(x));
    }
  }
}

TEST_F(QuantiseTest, ATensorWithOneValueThatIsNotFiniteIsLeftAsItIs) {
  for (const auto dtype : kReals) {
    for (const double bad : {kInfinity, -kInfinity, kNan, -kNan}) {
      for (const std::int64_t place : {0, 300, 999}) {
        auto x = torch::randn({1000}).to(dtype);
        x[place] = bad;
        Quantiser quantiser(8);
        EXPECT_FALSE(quantiser.pack(x)) << dtype << bad << place;
      }
    }
  }
  Quantiser quantiser(8);
  EXPECT_FALSE(quantiser.pack(torch::tensor({3e38F, -3e38F}).repeat({128}))) << "range overflows";
  const auto tiny = torch::tensor({0.0F, 1e-44F, 3e-40F, 2e-36F}).repeat({64});
  EXPECT_EQ(bound_broken(tiny, restore(quantiser.pack(tiny)), 8), "");
}

TEST_F(QuantiseTest, StridesComeBackAndWhatIsNoRealTensorIsLeftAlone) {
  Quantiser quantiser(8);
  const auto x = torch::randn({4, 8, 6, 6});
  for (const auto& y : {x.contiguous(at::MemoryFormat::ChannelsLast), x.permute({2, 0, 3, 1})}) {
    const auto z = restore(quantiser.pack(y));
    EXPECT_EQ(z.strides(), y.strides());
    EXPECT_TRUE(z.allclose(y, 0, 0.05));
  }
  const auto slice = x.slice(1, 1, 6).transpose(0, 2);
  const auto z = restore(quantiser.pack(slice));
  EXPECT_EQ(z.sizes(), slice.sizes());
  EXPECT_TRUE(z.allclose(slice, 0, 0.05));
  for (const auto& y : {torch::arange(1000), torch::ones({1000}, at::kBool), torch::zeros({0}),
                        torch::zeros({1}).expand({1000}), torch::randn({1000}, at::kComplexFloat),
                        torch::randn({9, 9}).to_sparse(), torch::ones({2}), at::Tensor()}) {
    EXPECT_FALSE(quantiser.pack(y));
  }
  EXPECT_THROW(Quantiser(3), UserError);
}

TEST_F(QuantiseTest, ThreadsDrawDifferentNumbers) {
  const auto x = torch::randn({2048});
  Quantiser quantiser(2, {.seed = 1});
  std::vector<at::Tensor> results(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      results[2 * t] = restore(quantiser.pack(x));
      results[2 * t + 1] = restore(quantiser.pack(x));
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(bound_broken(x, results[i], 2), "");
    for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(results[i].equal(results[j]));
  }
  EXPECT_EQ(quantiser.state().calls, 8U);
}

}  // namespace
}  // namespace gradus::compress
