#include <gradus/privacy/training/sampling.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/nonzero.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;

// Noise is stream 0 of a seed, so that a sampler of the same seed is independent of it.
constexpr std::uint32_t kSamplingStream = 1;

SamplerOptions checked(SamplerOptions options) {
  GRADUS_CHECK(kComponent, options.examples >= 1, "examples must be >= 1; got ", options.examples);
  GRADUS_CHECK(kComponent, options.sample_rate > 0.0 && options.sample_rate <= 1.0,
               "sample_rate must be in (0, 1]; got ", options.sample_rate,
               ". It is the expected batch size over the number of examples");
  GRADUS_CHECK(kComponent, options.steps >= 1, "steps must be >= 1; got ", options.steps);
  GRADUS_CHECK(kComponent, options.max_batch_size >= 0, "max_batch_size must be >= 0; got ",
               options.max_batch_size);
  GRADUS_CHECK(kComponent, options.ranks >= 1 && options.rank >= 0 && options.rank < options.ranks,
               "rank must be in [0, ranks); got rank ", options.rank, " of ", options.ranks);
  GRADUS_CHECK(kComponent, options.ranks == 1 || options.seed.has_value() || options.broadcast,
               "ranks must share one draw; a secure one needs SamplerOptions::broadcast, got none. "
               "Ranks that sample by themselves take examples twice, which no accountant covers");
  return options;
}

// A rate that is a whole number over N but for rounding, exactly that: it is what is drawn.
SamplerOptions with_whole_batch(SamplerOptions options) {
  const auto n = static_cast<double>(options.examples);
  const double size = options.sample_rate * n, whole = std::round(size);
  if (whole >= 1.0 && std::abs(size - whole) < 1e-9 * size) options.sample_rate = whole / n;
  return options;
}

// Which `count` of n places: the smallest of n uniform keys.
at::Tensor random_places(NoiseGenerator& generator, std::int64_t n, std::int64_t count) {
  return std::get<1>(generator.uniform(n).topk(count, 0, /*largest=*/false, /*sorted=*/false));
}

}  // namespace

Sampler::Sampler(SamplerOptions options)
    : options_(checked(std::move(options))),
      generator_(options_.seed ? NoiseGenerator::seeded(*options_.seed, kSamplingStream)
                               : NoiseGenerator::secure()) {}

double Sampler::expected_batch_size() const {
  return options_.sample_rate * static_cast<double>(options_.examples);
}

std::optional<std::vector<std::int64_t>> Sampler::next() {
  if (step_ == options_.steps) return std::nullopt;
  at::Tensor chosen = draw(generator_);
  if (options_.ranks > 1 && options_.broadcast) {
    at::Tensor shared = chosen.to(at::kByte);
    options_.broadcast(shared);
    chosen = shared.to(at::kBool);
  }
  ++step_;
  const at::Tensor places = chosen.nonzero().flatten().contiguous();
  const auto* index = places.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> share;
  for (std::int64_t i = options_.rank; i < places.numel(); i += options_.ranks) {
    share.push_back(index[i]);
  }
  return share;
}

StateEntries Sampler::state() const {
  StateEntries entries;
  internal::StateWriter write(entries, "");
  write.number("kind", static_cast<double>(kind()));
  write.number("examples", static_cast<double>(options_.examples));
  write.number("sample_rate", options_.sample_rate);
  write.number("steps", static_cast<double>(options_.steps));
  write.number("max_batch_size", static_cast<double>(options_.max_batch_size));
  write.count("step", step_);
  write.noise("generator", generator_);
  return entries;
}

void Sampler::load_state(const StateEntries& entries) {
  internal::StateReader read(entries);
  read.expect("kind", static_cast<double>(kind()), "way of sampling (0 Poisson, 1 uniform)");
  read.expect("examples", static_cast<double>(options_.examples), "number of examples");
  read.expect("sample_rate", options_.sample_rate, "sample rate");
  read.expect("steps", static_cast<double>(options_.steps), "number of steps");
  read.expect("max_batch_size", static_cast<double>(options_.max_batch_size), "largest batch size");
  const std::int64_t step = read.count("step");
  GRADUS_CHECK(kComponent, step >= 0 && step <= options_.steps, "state 'step' must be in [0, ",
               options_.steps, "]; got ", step);
  const auto generator = read.noise("generator", generator_.is_secure());
  read.finish();
  if (generator) generator_.load(*generator);
  step_ = step;
}

PoissonSampler::PoissonSampler(SamplerOptions options) : Sampler(std::move(options)) {}

at::Tensor PoissonSampler::draw(NoiseGenerator& generator) const {
  at::Tensor chosen = generator.bernoulli(options().examples, options().sample_rate);
  if (options().max_batch_size == 0) return chosen;
  const at::Tensor places = chosen.nonzero().flatten();
  const std::int64_t limit = options().max_batch_size;
  // At random, because the first ones would train on low indices more often.
  if (places.numel() <= limit) return chosen;
  const at::Tensor kept = places.index_select(0, random_places(generator, places.numel(), limit));
  return at::zeros_like(chosen).index_fill_(0, kept, true);
}

GaussianSteps PoissonSampler::accounted(double noise_multiplier) const {
  return {.noise_multiplier = noise_multiplier,
          .sample_rate = options().sample_rate,
          .steps = 1,
          .dataset_size = options().max_batch_size > 0 ? options().examples : 0,
          .max_batch_size = options().max_batch_size};
}

UniformSampler::UniformSampler(SamplerOptions options)
    : Sampler(with_whole_batch(std::move(options))) {
  const double size = expected_batch_size();
  GRADUS_CHECK(
      kComponent, std::abs(size - std::round(size)) < 1e-9 * size && std::round(size) >= 1.0,
      "sample_rate times examples must be a whole number >= 1 for uniform sampling; got ", size);
  GRADUS_CHECK(kComponent, this->options().max_batch_size == 0,
               "max_batch_size must be 0 for uniform sampling, whose batches have one size; got ",
               this->options().max_batch_size);
}

at::Tensor UniformSampler::draw(NoiseGenerator& generator) const {
  const auto size = static_cast<std::int64_t>(std::llround(expected_batch_size()));
  const at::Tensor kept = random_places(generator, options().examples, size);
  return at::zeros({options().examples}, at::kBool).index_fill_(0, kept, true);
}

GaussianSteps UniformSampler::accounted(double noise_multiplier) const {
  return {
      .noise_multiplier = noise_multiplier / 2.0, .sample_rate = options().sample_rate, .steps = 1};
}

std::unique_ptr<Sampler> make_sampler(Sampling kind, SamplerOptions options) {
  if (kind == Sampling::uniform) return std::make_unique<UniformSampler>(std::move(options));
  return std::make_unique<PoissonSampler>(std::move(options));
}

std::vector<std::vector<std::int64_t>> micro_batches(const std::vector<std::int64_t>& batch,
                                                     std::int64_t size) {
  GRADUS_CHECK(kComponent, size >= 1, "the size of a micro-batch must be >= 1; got ", size);
  std::vector<std::vector<std::int64_t>> pieces;
  for (auto begin = batch.begin(); begin != batch.end();) {
    const auto end = begin + std::min<std::int64_t>(size, batch.end() - begin);
    pieces.emplace_back(begin, end);
    begin = end;
  }
  return pieces;
}

}  // namespace gradus::privacy
