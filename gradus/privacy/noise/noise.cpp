#include <gradus/privacy/noise/noise.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <gradus/base/error.h>
#include <gradus/privacy/noise/internal/source.h>

namespace gradus::privacy {
namespace {

using internal::Draw;
using internal::NoiseSource;
using internal::Purpose;

constexpr const char* kComponent = "noise";
// Tiles that are worth a thread: about 20 microseconds.
constexpr std::int64_t kGrainTiles = 256;

// One tensor's part of a call: written in place, or into a buffer that is added afterwards.
struct Job {
  at::Tensor target{};
  at::Tensor buffer{};  // Undefined where noise goes straight to the target.
  double sigma = 0.0;
  std::int64_t per_tile = 0;
  std::int64_t first_tile = 0;  // Counted over the call.
  std::int64_t tiles = 0;
};

bool has_kernel(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

// From the least normal number to where 16 deviations would overflow.
template <typename Value>
NoiseRange range() {
  return {.least = static_cast<double>(std::numeric_limits<Value>::min()),
          .most = static_cast<double>(std::numeric_limits<Value>::max()) / 16.0};
}

// Whether strides prove it: from the smallest on, each steps over all that those before reach.
bool is_apart(const at::Tensor& target) {
  if (target.numel() == 0) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t d = 0; d < target.dim(); ++d) {
    if (target.size(d) > 1) dims.emplace_back(target.stride(d), target.size(d));
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += (size - 1) * stride;
  }
  return true;
}

void check(const at::Tensor& target, std::size_t index, double sigma) {
  GRADUS_CHECK(kComponent, target.defined(), "target ", index,
               " must be a tensor; got an undefined one");
  GRADUS_CHECK(kComponent, target.layout() == at::kStrided, "target ", index,
               " must be dense, as noise is; got layout ", target.layout(),
               ". Pass target.to_dense()");
  GRADUS_CHECK(kComponent, has_kernel(target.scalar_type()), "target ", index,
               " must be float32, float64, bfloat16 or float16; got ", target.scalar_type());
  GRADUS_CHECK(kComponent, is_apart(target), "target ", index,
               " must not overlap itself; got strides ", target.strides(), " of shape ",
               target.sizes(), ". Pass a contiguous copy");
  GRADUS_CHECK(kComponent, std::isfinite(sigma) && sigma >= 0.0, "standard deviation ", index,
               " must be finite and >= 0; got ", sigma);
  // What the target rounds to zero or to infinity would be no noise at all.
  const auto [least, most] = noise_range(target.scalar_type());
  GRADUS_CHECK(kComponent, sigma == 0.0 || (sigma >= least && sigma <= most), "standard deviation ",
               index, " must be 0 or from ", least, " to ", most, " for ", target.scalar_type(),
               "; got ", sigma, ". Scale the gradients, or use a wider type");
}

// Threads write all targets at once, so none may share memory with another.
void check_apart(const std::vector<Job>& jobs) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const Job& job : jobs) {
    if (job.buffer.defined()) continue;
    const auto* const begin = static_cast<const char*>(job.target.const_data_ptr());
    ranges.emplace_back(begin, begin + job.target.nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    GRADUS_CHECK(kComponent, ranges[i - 1].second <= ranges[i].first,
                 "targets of one call must not share memory; got two that do. Pass each once");
  }
}

std::int64_t tile_count(std::int64_t values, std::int64_t per_tile) {
  return (values + per_tile - 1) / per_tile;
}

// float32 and shorter seeded noise is made in float32, secure noise always in float64.
at::ScalarType noise_type(const NoiseSource& source, const at::Tensor& target) {
  return source.is_secure() || target.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void draw_part(const NoiseSource& source, const Job& job, std::uint64_t first_block, bool add,
               std::int64_t begin, std::int64_t end) {
  const bool direct = !job.buffer.defined();
  const at::Tensor& to = direct ? job.target : job.buffer;
  const std::int64_t first = begin * job.per_tile;
  const Draw draw{.block = first_block + static_cast<std::uint64_t>((job.first_tile + begin) *
                                                                    internal::kTileBlocks),
                  .n = std::min(end * job.per_tile, to.numel()) - first,
                  .sigma = job.sigma,
                  .add = add && direct};
  switch (to.scalar_type()) {
    case at::kDouble:
      return source.gaussian(draw, static_cast<double*>(to.data_ptr()) + first);
    case at::kFloat:
      return source.gaussian(draw, static_cast<float*>(to.data_ptr()) + first);
    case at::kBFloat16:
      return source.gaussian(draw, static_cast<c10::BFloat16*>(to.data_ptr()) + first);
    default:
      return source.gaussian(draw, static_cast<c10::Half*>(to.data_ptr()) + first);
  }
}

void put_buffer(const Job& job, bool add) {
  const at::Tensor noise = job.buffer.view(job.target.sizes()).to(job.target.device());
  job.target.copy_(add ? at::add(job.target.to(noise.scalar_type()), noise) : noise);
}

}  // namespace

NoiseRange noise_range(at::ScalarType type) {
  GRADUS_CHECK(kComponent, has_kernel(type), "noise is float32, float64, bfloat16 or float16; got ",
               type);
  if (type == at::kDouble) return range<double>();
  if (type == at::kHalf) return range<c10::Half>();
  return type == at::kBFloat16 ? range<c10::BFloat16>() : range<float>();
}

NoiseGenerator NoiseGenerator::seeded(std::uint64_t seed, std::uint32_t stream) {
  return NoiseGenerator(internal::seeded_source(seed, stream, *internal::noise_kernels().front()));
}

NoiseGenerator NoiseGenerator::secure() {
  return NoiseGenerator(internal::secure_source(*internal::noise_kernels().front()));
}

NoiseGenerator::NoiseGenerator(std::unique_ptr<NoiseSource> source) : source_(std::move(source)) {}
NoiseGenerator::NoiseGenerator(NoiseGenerator&& other) noexcept = default;
NoiseGenerator& NoiseGenerator::operator=(NoiseGenerator&& other) noexcept = default;
NoiseGenerator::~NoiseGenerator() = default;

bool NoiseGenerator::is_secure() const { return source_->is_secure(); }

void NoiseGenerator::add_gaussian_(const at::Tensor& target, double standard_deviation) {
  gaussian_({target}, {standard_deviation}, /*add=*/true);
}

void NoiseGenerator::add_gaussian_(const std::vector<at::Tensor>& targets,
                                   double standard_deviation) {
  gaussian_(targets, std::vector<double>(targets.size(), standard_deviation), /*add=*/true);
}

void NoiseGenerator::add_gaussian_(const std::vector<at::Tensor>& targets,
                                   const std::vector<double>& standard_deviations) {
  gaussian_(targets, standard_deviations, /*add=*/true);
}

void NoiseGenerator::fill_gaussian_(const at::Tensor& target, double standard_deviation) {
  gaussian_({target}, {standard_deviation}, /*add=*/false);
}

void NoiseGenerator::fill_gaussian_(const std::vector<at::Tensor>& targets,
                                    double standard_deviation) {
  gaussian_(targets, std::vector<double>(targets.size(), standard_deviation), /*add=*/false);
}

void NoiseGenerator::gaussian_(const std::vector<at::Tensor>& targets,
                               const std::vector<double>& deviations, bool add) {
  GRADUS_CHECK(kComponent, targets.size() == deviations.size(),
               "there must be one standard deviation for each target; got ", deviations.size(),
               " for ", targets.size());
  for (std::size_t i = 0; i < targets.size(); ++i) check(targets[i], i, deviations[i]);
  const at::NoGradGuard no_grad;
  source_->prepare();
  std::vector<Job> jobs;
  std::int64_t tiles = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const at::Tensor& target = targets[i];
    Job job{.target = target, .sigma = deviations[i], .first_tile = tiles};
    job.per_tile = source_->gaussians_per_tile(target.scalar_type() == at::kDouble);
    job.tiles = tile_count(target.numel(), job.per_tile);
    tiles += job.tiles;
    if (target.numel() == 0 || (add && job.sigma == 0.0)) continue;
    if (!target.is_cpu() || !target.is_contiguous() || target.is_neg()) {
      job.buffer = at::empty({target.numel()}, noise_type(*source_, target));
    }
    jobs.push_back(std::move(job));
  }
  check_apart(jobs);
  const std::uint64_t first_block = source_->reserve(Purpose::kGaussian, tiles);
  at::parallel_for(0, tiles, kGrainTiles, [&](std::int64_t begin, std::int64_t end) {
    for (const Job& job : jobs) {
      const std::int64_t from = std::max(begin - job.first_tile, std::int64_t{0});
      const std::int64_t to = std::min(end - job.first_tile, job.tiles);
      if (from < to) draw_part(*source_, job, first_block, add, from, to);
    }
  });
  for (const Job& job : jobs) {
    if (job.buffer.defined()) {
      put_buffer(job, add);
    } else {
      job.target.unsafeGetTensorImpl()->bump_version();
    }
  }
}

at::Tensor NoiseGenerator::uniform(std::int64_t n) {
  GRADUS_CHECK(kComponent, n >= 0, "the number of uniforms must be >= 0; got ", n);
  source_->prepare();
  const at::Tensor result = at::empty({n}, at::kDouble);
  auto* const to = result.mutable_data_ptr<double>();
  const std::int64_t per_tile = source_->uniforms_per_tile();
  const std::int64_t tiles = tile_count(n, per_tile);
  const std::uint64_t first_block = source_->reserve(Purpose::kUniform, tiles);
  at::parallel_for(0, tiles, kGrainTiles, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * per_tile;
    source_->uniform(first_block + static_cast<std::uint64_t>(begin * internal::kTileBlocks),
                     std::min(end * per_tile, n) - first, to + first);
  });
  return result;
}

at::Tensor NoiseGenerator::bernoulli(std::int64_t n, double probability) {
  GRADUS_CHECK(kComponent, probability >= 0.0 && probability <= 1.0,
               "the probability must be in [0, 1]; got ", probability);
  const at::Tensor uniforms = uniform(n);
  const auto* const from = uniforms.const_data_ptr<double>();
  const at::Tensor result = at::empty({n}, at::kBool);
  auto* const to = result.mutable_data_ptr<bool>();
  for (std::int64_t i = 0; i < n; ++i) to[i] = from[i] < probability;
  return result;
}

NoiseState NoiseGenerator::state() const {
  const auto state = source_->state();
  GRADUS_CHECK(kComponent, state.has_value(),
               "the state of secure noise must stay secret: who knows it can take the noise off. "
               "After a restart make a new secure generator; got a request for the state");
  return *state;
}

void NoiseGenerator::load(const NoiseState& state) {
  GRADUS_CHECK(kComponent, !is_secure(),
               "only a seeded generator can continue from a state; got a secure one. Make a new "
               "secure generator, or say NoiseGenerator::seeded");
  source_->load(state);
}

}  // namespace gradus::privacy
