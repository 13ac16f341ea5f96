#include <gradus/privacy/noise/internal/source.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::privacy::internal {
namespace {

constexpr double kUniformStep = 0x1p-53;

// 53 bits of two words.
double uniform_of(std::uint32_t low, std::uint32_t high) {
  return static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * kUniformStep;
}

class SeededSource final : public NoiseSource {
 public:
  SeededSource(std::uint64_t seed, std::uint32_t stream, const NoiseKernels& kernels)
      : kernels_(kernels) {
    load({.seed = seed, .stream = stream});
  }

  bool is_secure() const override { return false; }
  std::int64_t gaussians_per_tile(bool is_double) const override {
    return is_double ? kDoublesPerTile : kFloatsPerTile;
  }
  std::int64_t uniforms_per_tile() const override { return kDoublesPerTile; }

  void gaussian(const Draw& draw, double* target) const override {
    kernels_.seeded_doubles(gaussians_, draw.block, draw.n, draw.sigma, draw.add, target);
  }
  void gaussian(const Draw& draw, float* target) const override {
    kernels_.seeded_floats(gaussians_, draw.block, draw.n, static_cast<float>(draw.sigma), draw.add,
                           target);
  }
  void gaussian(const Draw& draw, c10::BFloat16* target) const override { rounded(draw, target); }
  void gaussian(const Draw& draw, c10::Half* target) const override { rounded(draw, target); }

  void uniform(std::uint64_t block, std::int64_t n, double* target) const override {
    std::uint32_t words[kFloatsPerTile];
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t place = i % kDoublesPerTile;
      if (place == 0) {
        kernels_.philox_words(uniforms_, block, 1, words);
        block += kTileBlocks;
      }
      const std::uint32_t* const low = words + place / kTileBlocks * 2 * kTileBlocks;
      target[i] = uniform_of(low[place % kTileBlocks], low[kTileBlocks + place % kTileBlocks]);
    }
  }

  std::optional<NoiseState> state() const override {
    return NoiseState{.seed = seed_,
                      .stream = gaussians_.stream,
                      .gaussian_blocks = gaussian_blocks_,
                      .uniform_blocks = uniform_blocks_};
  }
  void load(const NoiseState& state) override {
    seed_ = state.seed;
    gaussians_ =
        PhiloxStream(state.seed, static_cast<std::uint32_t>(Purpose::kGaussian), state.stream);
    uniforms_ =
        PhiloxStream(state.seed, static_cast<std::uint32_t>(Purpose::kUniform), state.stream);
    gaussian_blocks_ = state.gaussian_blocks;
    uniform_blocks_ = state.uniform_blocks;
  }

 private:
  template <typename Value>
  void rounded(const Draw& draw, Value* target) const {
    constexpr std::int64_t kChunk = 16 * kFloatsPerTile;
    float noise[kChunk];
    std::uint64_t block = draw.block;
    for (std::int64_t first = 0; first < draw.n; first += kChunk) {
      const std::int64_t n = std::min(kChunk, draw.n - first);
      kernels_.seeded_floats(gaussians_, block, n, static_cast<float>(draw.sigma), false, noise);
      block += static_cast<std::uint64_t>(kChunk / kFloatsPerTile * kTileBlocks);
      Value* const to = target + first;
      for (std::int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<Value>(draw.add ? static_cast<float>(to[i]) + noise[i] : noise[i]);
      }
    }
  }

  const NoiseKernels& kernels_;
  std::uint64_t seed_ = 0;
  PhiloxStream gaussians_{0, 0, 0};
  PhiloxStream uniforms_{0, 0, 0};
};

// Forks of this process, or of an ancestor, that led to it: a process id alone can come round.
std::atomic<std::uint64_t>& forks() {
  static std::atomic<std::uint64_t> count{0};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  GRADUS_INTERNAL_CHECK("noise", registered == 0, "pthread_atfork must work; got error ",
                        registered);
  return count;
}

std::array<std::uint32_t, 8> random_key() {
  std::array<std::uint32_t, 8> key{};
  auto* const bytes = reinterpret_cast<unsigned char*>(key.data());
  std::size_t got = 0;
  while (got < sizeof(key)) {
    const ssize_t n = getrandom(bytes + got, sizeof(key) - got, 0);
    if (n < 0 && errno == EINTR) continue;
    const std::string why = n < 0 ? std::strerror(errno) : std::to_string(n) + " bytes";
    GRADUS_CHECK("noise", n > 0, "secure noise needs the kernel's random source (getrandom); got ",
                 why);
    got += static_cast<std::size_t>(n);
  }
  return key;
}

class SecureSource final : public NoiseSource {
 public:
  SecureSource(const std::array<std::uint32_t, 8>& key, const NoiseKernels& kernels)
      : kernels_(kernels), forks_(forks().load()), process_(getpid()) {
    take(key);
  }
  ~SecureSource() override {
    explicit_bzero(gaussians_.key.data(), sizeof(gaussians_.key));
    explicit_bzero(uniforms_.key.data(), sizeof(uniforms_.key));
  }

  bool is_secure() const override { return true; }
  void prepare() override {
    const std::uint64_t forked = forks().load();
    if (forked == forks_ && process_ == getpid()) return;
    take(random_key());
    forks_ = forked;
    process_ = getpid();
  }
  std::int64_t gaussians_per_tile(bool /*is_double*/) const override { return kSecurePerTile; }
  std::int64_t uniforms_per_tile() const override { return kSecureUniformsPerTile; }

  void gaussian(const Draw& draw, double* target) const override { rounded(draw, target); }
  void gaussian(const Draw& draw, float* target) const override { rounded(draw, target); }
  void gaussian(const Draw& draw, c10::BFloat16* target) const override { rounded(draw, target); }
  void gaussian(const Draw& draw, c10::Half* target) const override { rounded(draw, target); }

  void uniform(std::uint64_t block, std::int64_t n, double* target) const override {
    std::uint32_t words[2 * kSecureUniformsPerTile];
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t place = i % kSecureUniformsPerTile;
      if (place == 0) {
        kernels_.chacha_words(uniforms_, block, 1, words);
        block += kTileBlocks;
      }
      target[i] = uniform_of(words[2 * place], words[2 * place + 1]);
    }
    explicit_bzero(words, sizeof(words));
  }

 private:
  void take(const std::array<std::uint32_t, 8>& key) {
    gaussians_ = {.key = key, .nonce = {static_cast<std::uint32_t>(Purpose::kGaussian), 0}};
    uniforms_ = {.key = key, .nonce = {static_cast<std::uint32_t>(Purpose::kUniform), 0}};
    gaussian_blocks_ = 0;
    uniform_blocks_ = 0;
  }

  template <typename Value>
  void rounded(const Draw& draw, Value* target) const {
    constexpr std::int64_t kChunk = 16 * kSecurePerTile;
    double noise[kChunk];
    std::uint64_t block = draw.block;
    for (std::int64_t first = 0; first < draw.n; first += kChunk) {
      const std::int64_t n = std::min(kChunk, draw.n - first);
      kernels_.secure_doubles(gaussians_, block, n, draw.sigma, noise);
      block += static_cast<std::uint64_t>(kChunk / kSecurePerTile * kTileBlocks);
      Value* const to = target + first;
      for (std::int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<Value>(draw.add ? static_cast<double>(to[i]) + noise[i] : noise[i]);
      }
    }
  }

  const NoiseKernels& kernels_;
  std::uint64_t forks_;
  pid_t process_;
  ChaChaStream gaussians_;
  ChaChaStream uniforms_;
};

}  // namespace

std::uint64_t NoiseSource::reserve(Purpose purpose, std::int64_t tiles) {
  std::uint64_t& used = purpose == Purpose::kUniform ? uniform_blocks_ : gaussian_blocks_;
  const std::uint64_t first = used;
  used += static_cast<std::uint64_t>(tiles * kTileBlocks);
  return first;
}

std::unique_ptr<NoiseSource> seeded_source(std::uint64_t seed, std::uint32_t stream,
                                           const NoiseKernels& kernels) {
  return std::make_unique<SeededSource>(seed, stream, kernels);
}

std::unique_ptr<NoiseSource> secure_source(const NoiseKernels& kernels) {
  return std::make_unique<SecureSource>(random_key(), kernels);
}

std::unique_ptr<NoiseSource> secure_source(const std::array<std::uint32_t, 8>& key,
                                           const NoiseKernels& kernels) {
  return std::make_unique<SecureSource>(key, kernels);
}

}  // namespace gradus::privacy::internal
