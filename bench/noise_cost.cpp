// gradus_bench_noise [--threads N] [--seed N] [--pairs N]: time of LibTorch's normal_ over that of
// seeded Gaussian noise on 6.4 million float32 values.
//
// One process fills a tensor with normal_ and adds ours to it, in ABBA order; the ratio of each
// quadruple is one sample. bench/compare.py reads them. On standard error: milliseconds of both, of
// filling and of the secure, floating-point-safe generator.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <time.h>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/version.h>

#include <gradus/privacy/noise/noise.h>

namespace {

constexpr std::int64_t kValues = 6'400'000;  // The weight of an embedding of 50,000 x 128.
constexpr int kWarmUp = 3;

// One thread is measured by its processor time, since the machine may be busy; several by the
// clock.
double milliseconds(clockid_t clock, const std::function<void()>& call) {
  timespec start{}, end{};
  clock_gettime(clock, &start);
  call();
  clock_gettime(clock, &end);
  return 1e3 * static_cast<double>(end.tv_sec - start.tv_sec) +
         1e-6 * static_cast<double>(end.tv_nsec - start.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(int threads, int pairs, std::uint64_t seed) {
  at::set_num_threads(threads);
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  auto seeded = gradus::privacy::NoiseGenerator::seeded(seed);
  auto secure = gradus::privacy::NoiseGenerator::secure();
  const at::Tensor target = at::zeros({kValues});
  const auto libtorch = [&] { return milliseconds(clock, [&] { target.normal_(); }); };
  const auto add = [&] { return milliseconds(clock, [&] { seeded.add_gaussian_(target, 1.0); }); };
  for (int i = 0; i < kWarmUp; ++i) libtorch(), add();
  std::vector<double> theirs, ours, samples, fills, secures;
  for (int i = 0; i < pairs; ++i) {
    const double a1 = libtorch(), b1 = add(), b2 = add(), a2 = libtorch();
    theirs.insert(theirs.end(), {a1, a2});
    ours.insert(ours.end(), {b1, b2});
    samples.push_back((a1 + a2) / (b1 + b2));
    if (i % 4 != 0) continue;
    fills.push_back(milliseconds(clock, [&] { seeded.fill_gaussian_(target, 1.0); }));
    secures.push_back(milliseconds(clock, [&] { secure.add_gaussian_(target, 1.0); }));
  }
  std::fprintf(stderr,
               "6.4 M float32: normal_ %.2f ms, seeded noise added %.2f ms, filled %.2f ms; secure "
               "and floating-point-safe noise added %.2f ms\n",
               median(theirs), median(ours), median(fills), median(secures));
  std::string text;
  for (const double sample : samples) text += (text.empty() ? "" : ", ") + std::to_string(sample);
  std::printf(
      "{\"ready\": \"noise\", \"torch\": \"%s\", \"threads\": %d, \"calls\": %d, \"samples\": "
      "[%s]}\n",
      TORCH_VERSION, at::get_num_threads(), 1, text.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    int threads = 1, pairs = 60;
    std::uint64_t seed = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string flag = argv[i];
      if (flag == "--threads") threads = std::stoi(argv[i + 1]);
      if (flag == "--pairs") pairs = std::stoi(argv[i + 1]);
      if (flag == "--seed") seed = std::stoull(argv[i + 1]);
    }
    return run(threads, pairs, seed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[bench] %s\n", error.what());
    return 1;
  }
}
