#include <gradus/compress/gist.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/compress/internal/kernels.h>

namespace gradus::compress {
namespace {

using plane::saved::Packed;
using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const std::vector<at::ScalarType> kReals{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
// Around the widths that loops work in: words of 64, chunks of 16384, pieces of 768.
const std::vector<std::int64_t> kSizes{1, 2, 3, 7, 63, 64, 65, 767, 769, 1000, 16384, 16385, 33333};

class GistTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

at::Tensor restore(const std::optional<Packed>& packed) { return packed->restore(packed->payload); }

std::int64_t bytes(const Packed& packed) {
  std::int64_t sum = 0;
  for (const auto& part : packed.payload) sum += static_cast<std::int64_t>(part.nbytes());
  return sum;
}

// equal() takes -0 for 0 and no NaN for itself.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.dtype() != b.dtype()) return false;
  const auto words = [](const at::Tensor& t) { return t.contiguous().view({-1}).view(at::kByte); };
  return words(a).equal(words(b));
}

// A share of about `density` of values other than zero, with -0, NaN and infinities among them.
at::Tensor sparse_values(std::int64_t n, double density, at::ScalarType dtype) {
  auto x = torch::randn({n}) * (torch::rand({n}) < density);
  x = torch::where(torch::rand({n}) < density, x.abs(), torch::zeros({}));
  if (n > 60) {
    x[3] = -0.0;
    x[17] = kNan;
    x[18] = -kNan;
    x[33] = kInfinity;
    x[34] = -kInfinity;
    x[n - 1] = 1.5;
  }
  return x.to(dtype);
}

TEST_F(GistTest, BinarizedResultsMakeReluGradientsBitForBit) {
  for (const auto dtype : kReals) {
    for (const auto n : kSizes) {
      SCOPED_TRACE(testing::Message() << dtype << " " << n);
      const auto x = sparse_values(n, 0.7, dtype) - sparse_values(n, 0.3, dtype);
      const auto result = x.relu();
      const auto grad = torch::randn({n}).to(dtype);
      const auto packed = binarize(result, Need::positive_or_nan);
      ASSERT_TRUE(packed);
      EXPECT_EQ(bytes(*packed), (n + 63) / 64 * 8);
      const auto restored = restore(packed);
      EXPECT_EQ(restored.dtype(), result.dtype());
      EXPECT_TRUE(same_bits(at::threshold_backward(grad, restored, 0),
                            at::threshold_backward(grad, result, 0)));
      const auto signs = restore(binarize(x, Need::positive));
      EXPECT_TRUE(same_bits(at::leaky_relu_backward(grad, signs, 0.1, false),
                            at::leaky_relu_backward(grad, x, 0.1, false)));
    }
  }
}

TEST_F(GistTest, BinarizeAgreesWithTheBackwardKernelsOnEverySpecialValue) {
  const std::vector<double> special{0.0,   -0.0, kNan, -kNan,  kInfinity, -kInfinity,
                                    1e-45, -1.0, 6e-8, 1e-310, -1e-310,   65504};
  for (const auto dtype : kReals) {
    // Once through vectors and once through the scalar tail of the kernels.
    for (const std::int64_t repeat : {1, 9}) {
      const auto x = torch::tensor(special, at::kDouble).to(dtype).repeat({repeat});
      const auto grad = torch::full_like(x, 3);
      EXPECT_TRUE(
          same_bits(at::threshold_backward(grad, restore(binarize(x, Need::positive_or_nan)), 0),
                    at::threshold_backward(grad, x, 0)))
          << dtype;
      EXPECT_TRUE(
          same_bits(at::leaky_relu_backward(grad, restore(binarize(x, Need::positive)), 0.5, false),
                    at::leaky_relu_backward(grad, x, 0.5, false)))
          << dtype;
    }
  }
}

TEST_F(GistTest, NeedsAreKnownByOperatorAndUnknownOperatorsNeedTheValues) {
  const auto real = torch::randn({2});
  const auto integer = torch::arange(2);
  EXPECT_EQ(need_of("aten::relu", real), Need::positive_or_nan);
  EXPECT_EQ(need_of("aten::convolution", real), Need::values);
  EXPECT_EQ(need_of("aten::threshold", real), Need::values);
  EXPECT_EQ(need_of("aten::hardtanh", real), Need::values);
  EXPECT_EQ(need_of("", real), Need::values);
  EXPECT_EQ(need_of("aten::max_pool2d_with_indices", real), Need::shape);
  EXPECT_EQ(need_of("aten::max_pool2d_with_indices", integer), Need::positions);
  EXPECT_EQ(need_of("aten::relu", integer), Need::values);
  EXPECT_THROW(binarize(real, Need::values), UserError);
}

TEST_F(GistTest, SparseStorageIsLosslessToTheBitAtEveryDensityAndSize) {
  for (const auto dtype : kReals) {
    for (const auto n : kSizes) {
      for (const double density : {0.0, 0.02, 0.5, 0.97, 1.0}) {
        SCOPED_TRACE(testing::Message() << dtype << " " << n << " " << density);
        const auto x = sparse_values(n, density, dtype);
        const auto kept = (x.view(x.element_size() == 8   ? at::kLong
                                  : x.element_size() == 4 ? at::kInt
                                                          : at::kShort) != 0)
                              .sum()
                              .item<std::int64_t>();
        const std::int64_t expected = (n + 63) / 64 * 8 + kept * x.element_size();
        const auto packed = pack_sparse(x, 1.0, /*sample=*/false);
        ASSERT_EQ(packed.has_value(), expected <= n * x.element_size());
        if (!packed) continue;
        EXPECT_EQ(bytes(*packed), expected);
        EXPECT_TRUE(same_bits(restore(packed), x));
        EXPECT_TRUE(same_bits(restore(packed), x)) << "again";
      }
    }
  }
}

TEST_F(GistTest, SparseStorageIsUsedOnlyWhereItIsSmallEnough) {
  const auto half = (torch::rand({100000}) < 0.5).to(at::kFloat);
  EXPECT_FALSE(pack_sparse(half, 0.4));
  EXPECT_TRUE(pack_sparse(half, 0.6));
  EXPECT_FALSE(pack_sparse(torch::randn({100000})));
  EXPECT_THROW(pack_sparse(half, 1.5), UserError);
}

TEST_F(GistTest, LayoutsWithoutGapsComeBackWithTheirStridesAndAlignment) {
  const auto base = torch::randn({2, 6, 5, 4}).relu();
  const std::vector<at::Tensor> dense{base, base.contiguous(at::MemoryFormat::ChannelsLast),
                                      base.transpose(1, 3), base.permute({3, 1, 0, 2}),
                                      base.view({-1}).slice(0, 3)};
  for (const auto& x : dense) {
    const auto restored = restore(pack_sparse(x, 1.0, false));
    EXPECT_TRUE(same_bits(restored, x)) << x.strides();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(restored.const_data_ptr()) % 64,
              reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 64);
    EXPECT_TRUE(restore(binarize(x, Need::positive_or_nan)).equal((x > 0).to(at::kFloat)));
  }
  for (const auto& x :
       {base.slice(1, 0, 3), base.view({-1}).slice(0, 0, 100, 2), torch::zeros({1}).expand({8, 8}),
        torch::zeros({0, 3}), torch::zeros({8}).to_sparse(), at::Tensor()}) {
    EXPECT_FALSE(pack_sparse(x, 1.0, false));
    EXPECT_FALSE(binarize(x, Need::positive));
    EXPECT_FALSE(pack_two_valued(x));
    EXPECT_FALSE(keep_shape(x));
    EXPECT_FALSE(reduce_precision(x, Precision::fp8));
  }
}

TEST_F(GistTest, TensorsOfTwoValuesTakeABitEach) {
  for (const auto n : kSizes) {
    const auto coin = torch::rand({n}) < 0.3;
    for (const auto& x :
         {coin, coin.to(at::kFloat) / 0.7, coin.to(at::kHalf) - 2, coin.to(at::kDouble) * kNan,
          coin.to(at::kLong) * 5, torch::full({n}, -0.0)}) {
      const auto packed = pack_two_valued(x);
      ASSERT_TRUE(packed) << n << x.dtype();
      EXPECT_TRUE(same_bits(restore(packed), x));
      EXPECT_EQ(bytes(*packed), (n + 63) / 64 * 8);
    }
  }
  // A third value that no sample meets, near either end.
  for (const std::int64_t at : {1, 99998}) {
    auto x = (torch::rand({100000}) < 0.5).to(at::kFloat);
    x[at] = 2;
    EXPECT_FALSE(pack_two_valued(x));
  }
}

TEST_F(GistTest, IntegersTakeTheFewestBytesThatHoldThem) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> cases{
      {255, 1}, {256, 2}, {65535, 2}, {65536, 4}, {2147483647, 4}};
  for (const auto& [largest, width] : cases) {
    auto x = torch::randint(0, largest, {999}, at::kLong);
    x[500] = largest;
    const auto packed = narrow_integers(x);
    ASSERT_TRUE(packed) << largest;
    EXPECT_EQ(bytes(*packed), 999 * width);
    EXPECT_TRUE(same_bits(restore(packed), x));
  }
  EXPECT_FALSE(narrow_integers(torch::tensor({std::int64_t{1} << 31})));
  EXPECT_FALSE(narrow_integers(torch::tensor({std::int64_t{-1}})));
  EXPECT_FALSE(narrow_integers(torch::ones({4}, at::kInt)));
}

TEST_F(GistTest, ShapesComeBackWithTheirMemoryFormatAndWithoutMemory) {
  const auto x = torch::randn({2, 3, 8, 8});
  const auto restored = restore(keep_shape(x));
  EXPECT_EQ(restored.sizes(), x.sizes());
  EXPECT_EQ(restored.storage().nbytes(), sizeof(float));
  EXPECT_TRUE(std::isnan(restored[0][0][0][0].item<float>()));
  EXPECT_EQ(restored.suggest_memory_format(), at::MemoryFormat::Contiguous);
  for (const auto& y : {x.contiguous(at::MemoryFormat::ChannelsLast),
                        torch::randn({2, 1, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast)}) {
    EXPECT_EQ(restore(keep_shape(y)).suggest_memory_format(), y.suggest_memory_format());
  }
  EXPECT_FALSE(keep_shape(torch::arange(4)));
}

TEST_F(GistTest, ReducedPrecisionStaysWithinItsBoundOnEveryElement) {
  const auto wide = torch::randn({33333}, at::kDouble) *
                    at::exp2(torch::randint(-60, 30, {33333}).to(at::kDouble));
  for (const auto precision : {Precision::bf16, Precision::fp16, Precision::fp10, Precision::fp8}) {
    for (const auto dtype : kReals) {
      for (const double factor : {1.0, 1e-3, 1e27, 1e-30}) {
        for (const auto n : kSizes) {
          const auto x = (wide.slice(0, 0, n) * factor).to(dtype);
          if (!x.isfinite().all().item<bool>()) continue;
          SCOPED_TRACE(testing::Message()
                       << static_cast<int>(precision) << dtype << " " << factor << " " << n);
          const auto packed = reduce_precision(x, precision);
          if (!packed) {
            // Nothing to gain: a few values, or two bytes a value already.
            EXPECT_TRUE(n < 4 || x.element_size() == 2);
            continue;
          }
          EXPECT_LT(bytes(*packed), static_cast<std::int64_t>(x.nbytes()));
          const auto exact = x.to(at::kDouble);
          const auto y = restore(packed).to(at::kDouble);
          const double largest = exact.abs().max().item<double>();
          const auto* const a = exact.const_data_ptr<double>();
          const auto* const b = y.const_data_ptr<double>();
          const double own = dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0;
          for (std::int64_t i = 0; i < n; ++i) {
            const double bound = precision_error_bound(precision, a[i], largest) +
                                 own * std::abs(b[i]) + (dtype == at::kHalf ? 0x1p-25 : 0);
            ASSERT_LE(std::abs(a[i] - b[i]), bound) << i << ": " << a[i] << " became " << b[i];
          }
        }
      }
    }
  }
}

TEST_F(GistTest, Float16AgreesWithIeeeHalfWhereThatHasNormalNumbers) {
  auto x = torch::randn({10000});
  x = torch::where(x.abs() < 1e-3, torch::ones({}), x);
  x[0] = 0;
  EXPECT_TRUE(restore(reduce_precision(x, Precision::fp16)).equal(x.to(at::kHalf).to(at::kFloat)));
  EXPECT_TRUE(
      restore(reduce_precision(x, Precision::bf16)).equal(x.to(at::kBFloat16).to(at::kFloat)));
}

TEST_F(GistTest, LoopsForThisProcessorGiveTheBitsOfThoseForAny) {
  const std::int64_t n = 5000;
  const auto x = sparse_values(n, 0.6, at::kFloat).nan_to_num(1, 2, 3);
  const auto run = [&](bool widest) {
    const auto& words = internal::word_kernels<std::uint32_t>(widest);
    const auto& reals = internal::real_kernels<float>(widest);
    const auto* const in = x.const_data_ptr<float>();
    const auto* const bits = reinterpret_cast<const std::uint32_t*>(in);
    std::vector<at::Tensor> out;
    const auto bytes = [&](std::int64_t count) {
      return out.emplace_back(torch::zeros({count}, at::kByte)).mutable_data_ptr<std::uint8_t>();
    };
    auto* const map = reinterpret_cast<std::uint64_t*>(bytes(internal::bitmap_words(n) * 8));
    words.positive(bits, n, 0x7f800000, true, map);
    words.select(map, n, 3, 7, reinterpret_cast<std::uint32_t*>(bytes(4 * n)));
    words.nonzero(bits, n, map);
    auto* const kept = reinterpret_cast<std::uint32_t*>(bytes(4 * n));
    words.compact(bits, n, map, kept);
    words.expand(map, n, kept, reinterpret_cast<std::uint32_t*>(bytes(4 * n)));
    for (const internal::Minifloat format :
         {internal::Minifloat{5, 10, 100}, internal::Minifloat{5, 4, 98},
          internal::Minifloat{4, 3, 115}}) {
      auto* const codes = bytes(2 * n);
      reals.encode(in, n, format, codes);
      reals.decode(codes, n, format, reinterpret_cast<float*>(bytes(4 * n)));
    }
    for (const int width : {8, 4, 2}) {
      auto* const codes = bytes(n);
      auto* const scales = reinterpret_cast<float*>(bytes(4 * n));
      EXPECT_TRUE(reals.quantise(in, n, width, {1, 2}, codes, scales));
      reals.dequantise(codes, scales, n, width, reinterpret_cast<float*>(bytes(4 * n)));
    }
    return out;
  };
  const auto any = run(false);
  const auto widest = run(true);
  for (std::size_t i = 0; i < any.size(); ++i) EXPECT_TRUE(any[i].equal(widest[i])) << i;
}

TEST_F(GistTest, EveryValueOfAFormatComesBackAsItIs) {
  // 1 + 4 + 3 bits whose top exponent is that of 1: 2^-14 (1 + m / 8) ... and multiples of 2^-17.
  std::vector<float> values{0.0F};
  for (int m = 1; m < 8; ++m) values.push_back(std::ldexp(static_cast<float>(m), -17));
  for (int e = -14; e <= 0; ++e) {
    for (int m = 0; m < 8; ++m) values.push_back(std::ldexp(1.0F + static_cast<float>(m) / 8, e));
  }
  ASSERT_EQ(values.size(), 128U);
  const auto positive = torch::tensor(values);
  const auto x = torch::cat({positive, -positive});
  EXPECT_TRUE(same_bits(restore(reduce_precision(x, Precision::fp8)), x));
}

TEST_F(GistTest, PrecisionIsNotReducedWhereAValueIsNotFiniteOrWouldOverflow) {
  for (const double bad : {kInfinity, -kInfinity, kNan, -kNan}) {
    auto x = torch::randn({5000});
    x[4999] = bad;
    for (const auto p : {Precision::bf16, Precision::fp16, Precision::fp10, Precision::fp8}) {
      EXPECT_FALSE(reduce_precision(x, p));
    }
  }
  EXPECT_FALSE(reduce_precision(torch::full({64}, 3.4e38F), Precision::fp8));
  EXPECT_FALSE(reduce_precision(torch::full({64}, 1e300, at::kDouble), Precision::fp16));
  EXPECT_FALSE(reduce_precision(torch::arange(64), Precision::fp8));
  const auto zeros = torch::zeros({64});
  EXPECT_TRUE(restore(reduce_precision(zeros, Precision::fp8)).equal(zeros));
}

}  // namespace
}  // namespace gradus::compress
