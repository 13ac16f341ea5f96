// gradus_bench_op_plane [--threads N] [--seed N] [--pairs N]: what a pass-through guard of the op
// plane costs a call.
//
// One process runs forward and backward of one small GPT without and with the guard in ABBA order;
// the difference of each quadruple divided by the number of handler calls is one sample, in
// microseconds. bench/compare.py reads them.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "measurement.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>

#include <gradus/models/gpt.h>
#include <gradus/plane/op/op_plane.h>

namespace {

using gradus::plane::op::Call;
namespace op = gradus::plane::op;

constexpr gradus::models::GptOptions kModel{
    .vocabulary = 64, .context = 8, .layers = 2, .heads = 2, .width = 16};
constexpr int kStepsPerTiming = 20;
constexpr int kWarmUp = 5;

class PassThrough final : public op::Handler {
 public:
  void call(Call& call) override { call.proceed(); }
};

class Counter final : public op::Handler {
 public:
  void call(Call& call) override {
    ++calls;
    call.proceed();
  }
  std::int64_t calls = 0;
};

class Program {
 public:
  explicit Program(std::uint64_t seed) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    model_->reset_parameters(generator);
    ids_ = at::randint(0, kModel.vocabulary, {2, kModel.context}, generator, at::kLong);
  }

  double step() {
    model_->zero_grad();
    const at::Tensor loss = at::cross_entropy_loss(
        model_->forward(ids_).view({-1, kModel.vocabulary}), ids_.view({-1}));
    loss.backward();
    return loss.item<double>();
  }

  double seconds() {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kStepsPerTiming; ++i) step();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  double guarded_seconds() {
    const op::Guard guard = op::push(op::Order::profile, pass_through_);
    return seconds();
  }

 private:
  gradus::models::Gpt model_{kModel};
  at::Tensor ids_;
  std::shared_ptr<PassThrough> pass_through_ = std::make_shared<PassThrough>();
};

int run(const gradus::bench::MeasurementOptions& options) {
  Program program(options.seed);
  const double plain_loss = program.step();
  auto counter = std::make_shared<Counter>();
  double guarded_loss = 0.0;
  {
    const op::Guard guard = op::push(op::Order::profile, counter);
    guarded_loss = program.step();
  }
  if (counter->calls == 0 || plain_loss != guarded_loss) {
    std::fprintf(stderr,
                 "[bench] a guarded step must show its calls and give the plain loss; got %lld "
                 "calls, %.9g and %.9g\n",
                 static_cast<long long>(counter->calls), guarded_loss, plain_loss);
    return 1;
  }
  for (int i = 0; i < kWarmUp; ++i) program.seconds(), program.guarded_seconds();
  double plain_total = 0.0;
  std::vector<double> samples;
  for (int i = 0; i < options.pairs; ++i) {
    const double a1 = program.seconds(), b1 = program.guarded_seconds();
    const double b2 = program.guarded_seconds(), a2 = program.seconds();
    plain_total += a1 + a2;
    const double each =
        (b1 + b2 - a1 - a2) / (2.0 * kStepsPerTiming * static_cast<double>(counter->calls));
    samples.push_back(each * 1e6);
  }
  std::fprintf(stderr, "%lld handler calls a step; plain step %.1f us\n",
               static_cast<long long>(counter->calls),
               plain_total / (2.0 * options.pairs * kStepsPerTiming) * 1e6);
  gradus::bench::print_samples("op-plane", counter->calls, samples);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return gradus::bench::measurement_main(argc, argv, run); }
