// gradus_bench_noise [--threads N] [--seed N] [--pairs N]: time of LibTorch's normal_ over that of
// seeded Gaussian noise on 6.4 million float32 values.
//
// One process fills a tensor with normal_ and adds ours to it, in ABBA order; the ratio of each
// quadruple is one sample. bench/compare.py reads them. On standard error: milliseconds of both, of
// filling and of the secure, floating-point-safe generator.

#include <cstdio>
#include <functional>
#include <vector>

#include <time.h>

#include "measurement.h"
#include <ATen/ops/zeros.h>

#include <gradus/privacy/noise/noise.h>

namespace {

using gradus::bench::median;

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

int run(const gradus::bench::MeasurementOptions& options) {
  const clockid_t clock = options.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  auto seeded = gradus::privacy::NoiseGenerator::seeded(options.seed);
  auto secure = gradus::privacy::NoiseGenerator::secure();
  const at::Tensor target = at::zeros({kValues});
  const auto libtorch = [&] { return milliseconds(clock, [&] { target.normal_(); }); };
  const auto add = [&] { return milliseconds(clock, [&] { seeded.add_gaussian_(target, 1.0); }); };
  for (int i = 0; i < kWarmUp; ++i) libtorch(), add();
  std::vector<double> theirs, ours, samples, fills, secures;
  for (int i = 0; i < options.pairs; ++i) {
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
  gradus::bench::print_samples("noise", 1, samples);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return gradus::bench::measurement_main(argc, argv, run); }
