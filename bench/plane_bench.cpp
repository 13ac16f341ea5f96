// What the op plane and the saved plane cost on one cheap operator, by number of guards. Times are
// of one operator call (op plane) or of one forward and backward of x * y (saved plane).

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <benchmark/benchmark.h>

#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>

namespace {

namespace op = gradus::plane::op;
namespace saved = gradus::plane::saved;

class PassThrough final : public op::Handler {
 public:
  void call(op::Call& call) override { call.proceed(); }
};

class LeaveAlone final : public saved::Hooks {
 public:
  std::optional<saved::Packed> pack(const saved::Value&) override { return std::nullopt; }
  bool reads_data() const override { return false; }
};

class KeepAsIs final : public saved::Hooks {
 public:
  explicit KeepAsIs(bool reads_data) : reads_data_(reads_data) {}
  std::optional<saved::Packed> pack(const saved::Value& value) override {
    return saved::Packed{{value.tensor},
                         [](std::vector<at::Tensor> payload) { return payload[0]; }};
  }
  bool reads_data() const override { return reads_data_; }

 private:
  bool reads_data_;
};

std::vector<op::Guard> pass_through_guards(std::int64_t count) {
  std::vector<op::Guard> guards;
  for (std::int64_t i = 0; i < count; ++i) {
    guards.push_back(op::push(op::Order::profile, std::make_shared<PassThrough>()));
  }
  return guards;
}

// The newest guard ends first, as the planes ask.
template <typename Guard>
void end(std::vector<Guard>& guards) {
  while (!guards.empty()) guards.pop_back();
}

void op_plane_add(benchmark::State& state) {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::ones({16});
  auto guards = pass_through_guards(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(at::add(x, x));
  end(guards);
}
BENCHMARK(op_plane_add)->ArgName("guards")->DenseRange(0, 4);

void op_plane_push(benchmark::State& state) {
  const auto handler = std::make_shared<PassThrough>();
  for (auto _ : state) benchmark::DoNotOptimize(op::push(op::Order::profile, handler));
}
BENCHMARK(op_plane_push);

void mul_backward(benchmark::State& state, const std::shared_ptr<saved::Hooks>& hooks) {
  at::set_num_threads(1);
  const at::Tensor x = at::ones({16}).requires_grad_(), y = at::ones({16}).requires_grad_();
  const at::Tensor seed = at::ones({16});
  const saved::Guard guard = hooks ? saved::push(saved::Order::observe, hooks) : saved::Guard();
  for (auto _ : state) {
    at::mul(x, y).backward(seed);
    x.mutable_grad().reset();
    y.mutable_grad().reset();
  }
}
BENCHMARK_CAPTURE(mul_backward, no_hooks, nullptr);
BENCHMARK_CAPTURE(mul_backward, hooks_that_leave_alone, std::make_shared<LeaveAlone>());
BENCHMARK_CAPTURE(mul_backward, hooks_that_keep, std::make_shared<KeepAsIs>(false));
BENCHMARK_CAPTURE(mul_backward, hooks_that_keep_and_read, std::make_shared<KeepAsIs>(true));

}  // namespace

BENCHMARK_MAIN();
