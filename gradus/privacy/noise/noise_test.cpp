#include <gradus/privacy/noise/noise.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/noise/internal/source.h>

namespace gradus::privacy {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.equal(b);
}

at::Tensor normals(NoiseGenerator& noise, std::int64_t n, at::ScalarType type = at::kFloat) {
  at::Tensor values = at::empty({n}, type);
  noise.fill_gaussian_(values, 1.0);
  return values;
}

NoiseGenerator known_secure(std::uint32_t key, std::size_t kernels = 0) {
  return NoiseGenerator(internal::secure_source({key}, *internal::noise_kernels().at(kernels)));
}

double upper_tail(double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); }

// Moments, tails and neighbours within 5 standard errors each; a fixed seed makes it repeatable.
void expect_normal(const at::Tensor& tensor) {
  const auto n = static_cast<double>(tensor.numel());
  double moments[4] = {};
  double beyond[3] = {};
  constexpr std::int64_t kPart = 500'000;
  for (std::int64_t first = 0; first < tensor.numel(); first += kPart) {
    const at::Tensor part =
        tensor.narrow(0, first, std::min(kPart, tensor.numel() - first)).to(at::kDouble);
    const auto* const x = part.const_data_ptr<double>();
    for (std::int64_t i = 0; i < part.numel(); ++i) {
      const double square = x[i] * x[i];
      moments[0] += x[i];
      moments[1] += square;
      moments[2] += x[i] * square;
      moments[3] += square * square;
      for (int limit = 3; limit <= 5; ++limit) beyond[limit - 3] += square > limit * limit;
    }
  }
  EXPECT_LT(std::abs(moments[0] / n), 5.0 / std::sqrt(n));
  EXPECT_LT(std::abs(moments[1] / n - 1.0), 5.0 * std::sqrt(2.0 / n));
  EXPECT_LT(std::abs(moments[2] / n), 5.0 * std::sqrt(15.0 / n));
  EXPECT_LT(std::abs(moments[3] / n - 3.0), 5.0 * std::sqrt(96.0 / n));
  for (int limit = 3; limit <= 5; ++limit) {
    const double expected = n * 2.0 * upper_tail(limit);
    EXPECT_LT(std::abs(beyond[limit - 3] - expected), 5.0 * std::sqrt(expected) + 1.0) << limit;
  }
  // Distances of neighbours, lanes, words of a block, tiles.
  const std::int64_t all = std::min(tensor.numel(), std::int64_t{1'000'000});
  const at::Tensor x = tensor.narrow(0, 0, all).to(at::kDouble);
  const at::Tensor squares = x.pow(2) - 1.0;
  const double error = 5.0 / std::sqrt(static_cast<double>(all));
  for (const std::int64_t lag : {1, 2, 4, 8, 16, 32, 48, 64, 128, 1024}) {
    const auto correlation = [&](const at::Tensor& t) {
      return std::abs((t.narrow(0, 0, all - lag).dot(t.narrow(0, lag, all - lag))).item<double>() /
                      static_cast<double>(all - lag));
    };
    EXPECT_LT(correlation(x), error) << lag;
    EXPECT_LT(correlation(squares), 2.0 * error) << lag;
  }
}

// Kolmogorov-Smirnov: sqrt(n) times the largest distance; above 1.95 once in a thousand.
double ks_statistic(const at::Tensor& tensor) {
  const at::Tensor sorted = std::get<0>(tensor.to(at::kDouble).sort());
  const auto* const x = sorted.const_data_ptr<double>();
  const auto n = static_cast<double>(sorted.numel());
  double worst = 0.0;
  for (std::int64_t i = 0; i < sorted.numel(); ++i) {
    const double cdf = 1.0 - upper_tail(x[i]);
    worst = std::max({worst, std::abs(cdf - static_cast<double>(i) / n),
                      std::abs(cdf - static_cast<double>(i + 1) / n)});
  }
  return worst * std::sqrt(n);
}

// Chi-square of equally likely cells, as standard deviations from its mean.
double chi_square_deviation(const at::Tensor& uniforms, std::int64_t cells) {
  const at::Tensor counts =
      (uniforms * cells).to(at::kLong).clamp(0, cells - 1).bincount({}, cells);
  const double expected = static_cast<double>(uniforms.numel()) / static_cast<double>(cells);
  const auto chi = ((counts.to(at::kDouble) - expected).pow(2) / expected).sum().item<double>();
  const auto freedom = static_cast<double>(cells - 1);
  return (chi - freedom) / std::sqrt(2.0 * freedom);
}

class NoiseTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(NoiseTest, TenMillionSeededFloatsAreStandardNormal) {
  auto noise = NoiseGenerator::seeded(1);
  const at::Tensor x = normals(noise, 10'000'000);
  expect_normal(x);
  EXPECT_GT(x.abs().max().item<double>(), 4.9);
}

TEST_F(NoiseTest, SeededDoublesAreStandardNormal) {
  auto noise = NoiseGenerator::seeded(2);
  expect_normal(normals(noise, 2'000'000, at::kDouble));
}

TEST_F(NoiseTest, SecureValuesAreStandardNormal) {
  auto noise = known_secure(3);
  expect_normal(normals(noise, 2'000'000));
}

TEST_F(NoiseTest, DistributionFunctionsAreTheNormalsOwn) {
  auto seeded = NoiseGenerator::seeded(4);
  auto secure = known_secure(4);
  for (NoiseGenerator* noise : {&seeded, &secure}) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      const at::Tensor x = normals(*noise, 500'000, type);
      EXPECT_LT(ks_statistic(x), 1.95);
      const at::Tensor uniforms = 0.5 * (x.to(at::kDouble) / std::sqrt(2.0)).erf() + 0.5;
      EXPECT_LT(std::abs(chi_square_deviation(uniforms, 1000)), 4.0);
    }
  }
}

TEST_F(NoiseTest, EachPlaceOfATileIsStandardNormal) {
  auto noise = NoiseGenerator::seeded(5);
  const at::Tensor x = normals(noise, 64 * 40'000).view({40'000, 64}).to(at::kDouble);
  EXPECT_LT(x.mean(0).abs().max().item<double>(), 5.0 / std::sqrt(40'000.0));
  EXPECT_LT((x.pow(2).mean(0) - 1.0).abs().max().item<double>(), 5.0 * std::sqrt(2.0 / 40'000.0));
  const at::Tensor products = x.t().mm(x) / 40'000.0;
  EXPECT_LT(products.fill_diagonal_(0.0).abs().max().item<double>(), 5.5 / std::sqrt(40'000.0));
}

TEST_F(NoiseTest, UniformsFillTheUnitIntervalEvenly) {
  auto seeded = NoiseGenerator::seeded(6);
  auto secure = known_secure(6);
  for (NoiseGenerator* noise : {&seeded, &secure}) {
    const at::Tensor u = noise->uniform(1'000'000);
    EXPECT_GE(u.min().item<double>(), 0.0);
    EXPECT_LT(u.max().item<double>(), 1.0);
    EXPECT_LT(std::abs(chi_square_deviation(u, 1000)), 4.0);
    const at::Tensor fine = (u * 0x1p20).frac();  // the lower bits, too
    EXPECT_LT(std::abs(chi_square_deviation(fine, 1000)), 4.0);
    EXPECT_TRUE((u * 0x1p53).frac().eq(0.0).all().item<bool>());
    EXPECT_LT(std::abs(((u.narrow(0, 1, 999'999) - 0.5) * (u.narrow(0, 0, 999'999) - 0.5))
                           .mean()
                           .item<double>()),
              5.0 / 12.0 / 1000.0);
  }
}

TEST_F(NoiseTest, BernoulliDrawsEachWithItsProbability) {
  auto noise = NoiseGenerator::seeded(7);
  const at::Tensor drawn = noise.bernoulli(1'000'000, 0.01);
  EXPECT_EQ(drawn.scalar_type(), at::kBool);
  EXPECT_NEAR(drawn.sum().item<double>(), 10'000.0, 5.0 * std::sqrt(9'900.0));
  EXPECT_FALSE(noise.bernoulli(1000, 0.0).any().item<bool>());
  EXPECT_TRUE(noise.bernoulli(1000, 1.0).all().item<bool>());
  EXPECT_EQ(noise.bernoulli(0, 0.5).numel(), 0);
}

TEST_F(NoiseTest, StreamsSeedsAndPurposesAreUncorrelated) {
  auto base = NoiseGenerator::seeded(8), other = NoiseGenerator::seeded(8, 1);
  auto next_seed = NoiseGenerator::seeded(9);
  const at::Tensor x = normals(base, 1'000'000), y = normals(other, 1'000'000);
  const at::Tensor z = normals(next_seed, 1'000'000), u = (base.uniform(1'000'000) - 0.5);
  for (const at::Tensor& w : {y, z, u.to(at::kFloat) * std::sqrt(12.0)}) {
    EXPECT_LT(std::abs((x * w).mean().item<double>()), 5.0 / 1000.0);
    EXPECT_LT(std::abs((x.abs() * w).mean().item<double>()), 5.0 / 1000.0);
  }
}

TEST_F(NoiseTest, ValuesDoNotDependOnTheNumberOfThreadsOrTheVectorUnit) {
  const auto draw = [](NoiseGenerator noise) {
    std::vector<at::Tensor> all;
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      all.push_back(at::full({70'001}, 0.5, type));
      all.push_back(at::full({3}, 0.5, type));
    }
    noise.add_gaussian_(all, 2.0);
    all.push_back(noise.uniform(50'001));
    return all;
  };
  const auto& kernels = internal::noise_kernels();
  const auto seeded = draw(NoiseGenerator(internal::seeded_source(10, 2, *kernels.front())));
  const auto secure = draw(known_secure(10));
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (std::size_t k = 0; k < kernels.size(); ++k) {
      SCOPED_TRACE(std::string(kernels[k]->name) + ", threads " + std::to_string(threads));
      const auto a = draw(NoiseGenerator(internal::seeded_source(10, 2, *kernels[k])));
      const auto b = draw(known_secure(10, k));
      for (std::size_t i = 0; i < a.size(); ++i) {
        EXPECT_TRUE(same(a[i], seeded[i])) << i;
        EXPECT_TRUE(same(b[i], secure[i])) << i;
      }
    }
  }
}

TEST_F(NoiseTest, AListGivesWhatItsTensorsGetOneAfterTheOther) {
  auto together = NoiseGenerator::seeded(11), apart = NoiseGenerator::seeded(11);
  std::vector<at::Tensor> a, b;
  for (const std::int64_t n : {1, 0, 64, 65, 1000}) {
    a.push_back(at::zeros({n}));
    b.push_back(at::zeros({n}));
  }
  together.add_gaussian_(a, {1.0, 1.0, 2.0, 0.5, 3.0});
  const double deviations[] = {1.0, 1.0, 2.0, 0.5, 3.0};
  for (std::size_t i = 0; i < b.size(); ++i) apart.add_gaussian_(b[i], deviations[i]);
  for (std::size_t i = 0; i < b.size(); ++i) EXPECT_TRUE(same(a[i], b[i])) << i;
  EXPECT_EQ(together.state(), apart.state());
}

TEST_F(NoiseTest, AddsToWhatIsThereAndRoundsAtTheEnd) {
  for (const bool is_secure : {false, true}) {
    const auto make = [&] { return is_secure ? known_secure(12) : NoiseGenerator::seeded(12); };
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(type);
      const auto wide = is_secure || type == at::kDouble ? at::kDouble : at::kFloat;
      at::Tensor unit = at::zeros({5000}, wide), target = at::full({5000}, 3.0, type);
      auto a = make(), b = make();
      a.fill_gaussian_(unit, 0.5);
      b.add_gaussian_(target, 0.5);
      EXPECT_TRUE(same(target, (unit + 3.0).to(type)));
      auto c = make();
      at::Tensor filled = at::empty({5000}, type);
      c.fill_gaussian_(filled, 0.5);
      EXPECT_TRUE(same(filled, unit.to(type)));
    }
  }
}

TEST_F(NoiseTest, StridesDoNotChangeTheValues) {
  for (const bool is_secure : {false, true}) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const auto make = [&] { return is_secure ? known_secure(13) : NoiseGenerator::seeded(13); };
      auto plain = make(), transposed = make(), sliced = make();
      const at::Tensor a = at::full({30, 70}, 0.1, type);
      const at::Tensor b = at::full({70, 30}, 0.1, type).t();
      const at::Tensor whole = at::full({30, 140}, 0.1, type);
      const at::Tensor c = whole.slice(1, 0, 140, 2);
      plain.add_gaussian_(a, 1.0);
      transposed.add_gaussian_(b, 1.0);
      sliced.add_gaussian_(c, 1.0);
      EXPECT_TRUE(same(a, b));
      EXPECT_TRUE(same(a, c));
      EXPECT_TRUE(whole.slice(1, 1, 140, 2).eq(at::full({}, 0.1, type)).all().item<bool>());
    }
  }
}

TEST_F(NoiseTest, AResumedStateContinuesExactly) {
  auto noise = NoiseGenerator::seeded(14, 3);
  normals(noise, 1000);
  noise.uniform(77);
  const NoiseState state = noise.state();
  const at::Tensor x = normals(noise, 1001), u = noise.uniform(500);
  auto resumed = NoiseGenerator::seeded(0);
  resumed.load(state);
  EXPECT_EQ(resumed.state(), state);
  EXPECT_TRUE(same(normals(resumed, 1001), x));
  EXPECT_TRUE(same(resumed.uniform(500), u));
  EXPECT_FALSE(same(normals(resumed, 1001), x));
}

TEST_F(NoiseTest, ZeroDeviationLeavesTheTargetUntouchedButDrawsAsMuch) {
  auto a = NoiseGenerator::seeded(15), b = NoiseGenerator::seeded(15);
  const at::Tensor target = at::full({100}, -0.0F);
  const auto version = target._version();
  a.add_gaussian_(target, 0.0);
  EXPECT_TRUE(target.signbit().all().item<bool>());
  EXPECT_EQ(target._version(), version);
  normals(b, 100);
  EXPECT_EQ(a.state(), b.state());
  a.add_gaussian_(at::empty({0, 5}), 1.0);
  EXPECT_EQ(a.state(), b.state());
}

TEST_F(NoiseTest, BumpsTheVersionThatAutogradChecks) {
  auto noise = NoiseGenerator::seeded(16);
  const at::Tensor target = at::zeros({10});
  const auto version = target._version();
  noise.add_gaussian_(target, 1.0);
  EXPECT_GT(target._version(), version);
}

TEST_F(NoiseTest, RefusesByNameAndChangesNothing) {
  auto noise = NoiseGenerator::seeded(17);
  const NoiseState before = noise.state();
  const at::Tensor good = at::zeros({10});
  const auto refusal = [&](const at::Tensor& target, double sigma) {
    return message_of([&] { noise.add_gaussian_({good, target}, {1.0, sigma}); });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(refusal(good, -1.0),
              HasSubstr("standard deviation 1 must be finite and >= 0; got -1"));
  EXPECT_THAT(refusal(good, nan), HasSubstr("must be finite and >= 0; got"));
  EXPECT_THAT(refusal(good, infinity), HasSubstr("must be finite and >= 0; got inf"));
  EXPECT_THAT(refusal(good, 1e-60),
              HasSubstr("standard deviation 1 must be 0 or from 1.17549e-38"));
  EXPECT_THAT(refusal(good, 1e38), HasSubstr("for Float; got 1e+38"));
  EXPECT_THAT(refusal(at::zeros({3}, at::kHalf), 1e-6),
              HasSubstr("must be 0 or from 6.10352e-05 to 4094 for Half; got 1e-06"));
  EXPECT_THAT(refusal(at::Tensor(), 1.0), HasSubstr("target 1 must be a tensor"));
  EXPECT_THAT(refusal(at::zeros({3}, at::kLong), 1.0), HasSubstr("target 1 must be float32"));
  EXPECT_THAT(refusal(at::zeros({3, 1}).expand({3, 4}), 1.0),
              HasSubstr("target 1 must not overlap itself"));
  EXPECT_THAT(refusal(at::zeros({6}).as_strided({3, 2}, {1, 1}), 1.0),
              HasSubstr("target 1 must not overlap itself"));
  EXPECT_THAT(refusal(at::zeros({8}).as_strided({2, 2, 2}, {3, 2, 1}), 1.0),
              HasSubstr("target 1 must not overlap itself"));
  EXPECT_THAT(refusal(at::zeros({3, 3}).to_sparse(), 1.0), HasSubstr("target 1 must be dense"));
  EXPECT_THAT(refusal(good, 1.0), HasSubstr("must not share memory"));
  EXPECT_THAT(message_of([&] { noise.add_gaussian_({good}, std::vector<double>{}); }),
              HasSubstr("one standard deviation for each target; got 0 for 1"));
  EXPECT_THAT(message_of([&] { noise.bernoulli(3, 1.5); }), HasSubstr("in [0, 1]; got 1.5"));
  EXPECT_THAT(message_of([&] { noise.bernoulli(3, nan); }), HasSubstr("in [0, 1]; got nan"));
  EXPECT_THAT(message_of([&] { noise.uniform(-1); }), HasSubstr("must be >= 0; got -1"));
  EXPECT_TRUE(good.eq(0).all().item<bool>());
  EXPECT_EQ(noise.state(), before);
}

TEST_F(NoiseTest, SecureGeneratorsDifferAndKeepTheirStateToThemselves) {
  auto a = NoiseGenerator::secure(), b = NoiseGenerator::secure();
  EXPECT_TRUE(a.is_secure());
  EXPECT_FALSE(NoiseGenerator::seeded(1).is_secure());
  const at::Tensor x = normals(a, 100'000), y = normals(b, 100'000), z = normals(a, 100'000);
  EXPECT_LT(x.eq(y).sum().item<std::int64_t>(), 20);
  EXPECT_LT(x.eq(z).sum().item<std::int64_t>(), 20);
  EXPECT_FALSE(same(a.uniform(10), b.uniform(10)));
  EXPECT_THAT(message_of([&] { a.state(); }), HasSubstr("must stay secret"));
  EXPECT_THAT(message_of([&] { a.load({.seed = 1}); }),
              HasSubstr("only a seeded generator can continue from a state; got a secure one"));
}

TEST_F(NoiseTest, AForkedChildDoesNotRepeatItsParentsSecureNoise) {
  auto noise = NoiseGenerator::secure();
  normals(noise, 10);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  constexpr std::int64_t kValues = 16;
  double values[kValues] = {};
  if (child == 0) {
    for (double& value : values) value = noise.uniform(1).item<double>();
    const auto wanted = static_cast<ssize_t>(sizeof(values));
    _exit(write(ends[1], values, sizeof(values)) == wanted ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_EQ(read(ends[0], values, sizeof(values)), static_cast<ssize_t>(sizeof(values)));
  close(ends[0]);
  close(ends[1]);
  for (const double value : values) {
    EXPECT_GT(value, 0.0);
    EXPECT_NE(value, noise.uniform(1).item<double>());
  }
}

}  // namespace
}  // namespace gradus::privacy
