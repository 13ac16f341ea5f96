// gradus_bench_autocast [--threads N] [--seed N] [--pairs N]: what autocast adds to a listed
// operator whose arguments need no cast.
//
// One process calls a 2 x 2 product without and with the guard in ABBA order; the difference of
// each quadruple divided by the number of calls is one sample, in microseconds. bench/compare.py
// reads them. On standard error: the same for an operator on no list, for one whose weight is in
// the cache, and for LibTorch's own autocast.

#include <cstdio>
#include <functional>
#include <optional>
#include <vector>

#include <time.h>

#include "measurement.h"
#include <ATen/autocast_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <gradus/amp/autocast/autocast.h>

namespace {

using gradus::bench::median;

constexpr int kCalls = 2000;
constexpr int kWarmUp = 3;

// Of this thread's processor time: one thread works, and the machine may be busy.
double thread_microseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

double microseconds(const std::function<void()>& call) {
  const double start = thread_microseconds();
  for (int i = 0; i < kCalls; ++i) call();
  return (thread_microseconds() - start) / kCalls;
}

double under_guard(const std::function<void()>& call) {
  const gradus::amp::AutocastGuard guard({.dtype = at::kBFloat16});
  return microseconds(call);
}

double under_libtorchs(const std::function<void()>& call) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  const double result = microseconds(call);
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  return result;
}

std::vector<double> differences(int pairs, const std::function<double()>& of,
                                const std::function<double()>& over) {
  for (int i = 0; i < kWarmUp; ++i) over(), of();
  std::vector<double> samples;
  for (int i = 0; i < pairs; ++i) {
    const double a1 = over(), b1 = of(), b2 = of(), a2 = over();
    samples.push_back((b1 + b2 - a1 - a2) / 2);
  }
  return samples;
}

int run(const gradus::bench::MeasurementOptions& options) {
  const int pairs = options.pairs;
  const auto lower = at::ones({2, 2}, at::kBFloat16);
  const auto weight = at::ones({2, 2}).requires_grad_();
  const std::function<void()> listed = [&] { at::mm(lower, lower); };
  const std::function<void()> unlisted = [&] { at::add(lower, lower); };
  const std::function<void()> cached = [&] { at::mm(lower, weight); };
  const std::function<void()> cached_view = [&] { at::mm(lower, weight.t()); };
  const auto compare = [&](const std::function<void()>& call) {
    return differences(
        pairs, [&] { return under_guard(call); }, [&] { return microseconds(call); });
  };
  const auto samples = compare(listed);
  std::fprintf(
      stderr, "listed %.3f us, on no list %.3f us; LibTorch's autocast, listed %.3f us\n",
      median(samples), median(compare(unlisted)),
      median(differences(
          pairs, [&] { return under_libtorchs(listed); }, [&] { return microseconds(listed); })));
  const auto over_libtorchs = [&](const std::function<void()>& call) {
    return median(differences(
        pairs, [&] { return under_guard(call); }, [&] { return under_libtorchs(call); }));
  };
  std::fprintf(stderr,
               "over LibTorch's autocast: weight in the cache %+.3f us, its transpose %+.3f us\n",
               over_libtorchs(cached), over_libtorchs(cached_view));
  gradus::bench::print_samples("autocast", kCalls, samples);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return gradus::bench::measurement_main(argc, argv, run); }
