#include <gradus/offload/offload.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/offload/file_io.h>
#include <gradus/recompute/checkpoint.h>

#include <tests/support/message_of.h>

namespace gradus::offload {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using tests::message_of;

constexpr std::int64_t kMiB = 1 << 20;

// An empty directory of the test's own.
class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "offload-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(path_)) found.push_back(entry.path());
    return found;
  }

 private:
  fs::path path_;
};

OffloadOptions to_host(std::int64_t window_bytes = 64 * kMiB) {
  OffloadOptions options;
  options.min_bytes = 1;
  options.window_bytes = window_bytes;
  return options;
}

OffloadOptions to_disk(const Scratch& scratch, FileAccess access = FileAccess::automatic,
                       std::int64_t window_bytes = 64 * kMiB) {
  OffloadOptions options = to_host(window_bytes);
  options.target = Target::disk;
  options.disk.directory = scratch.path();
  options.disk.access = access;
  return options;
}

// Every target and way of access, with and without reading ahead, with tiny and ample buffers.
std::vector<std::pair<std::string, OffloadOptions>> all_ways(const Scratch& scratch) {
  std::vector<std::pair<std::string, OffloadOptions>> ways;
  for (const std::int64_t window : {std::int64_t{0}, std::int64_t{3000}, 64 * kMiB}) {
    const std::string suffix = " window " + std::to_string(window);
    ways.emplace_back("host" + suffix, to_host(window));
    ways.emplace_back("threads" + suffix, to_disk(scratch, FileAccess::threads, window));
    if (make_uring_io() != nullptr) {
      ways.emplace_back("io_uring" + suffix, to_disk(scratch, FileAccess::io_uring, window));
    }
  }
  OffloadOptions narrow = to_disk(scratch);
  narrow.staging_bytes = 1;
  ways.emplace_back("narrow staging", narrow);
  return ways;
}

using Program = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

std::vector<at::Tensor> leaves() {
  torch::manual_seed(3);
  std::vector<at::Tensor> tensors;
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{6, 8}, {8, 24}, {8, 8}, {24, 8}, {32, 8}, {32, 8}}) {
    tensors.push_back(torch::randn(shape).requires_grad_());
  }
  return tensors;
}

// Gradients of all leaves, the loss first.
std::vector<at::Tensor> run(const Program& program, const std::optional<OffloadOptions>& options) {
  auto tensors = leaves();
  torch::manual_seed(4);
  std::optional<OffloadGuard> guard;
  if (options) guard.emplace(*options);
  at::Tensor loss = program(tensors);
  loss.backward();
  std::vector<at::Tensor> results{loss.detach().clone()};
  for (const at::Tensor& t : tensors) {
    results.push_back(t.grad().defined() ? t.grad() : torch::zeros({}));
  }
  return results;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << "result " << i;
}

const std::vector<std::pair<std::string, Program>>& programs() {
  static const std::vector<std::pair<std::string, Program>> all{
      {"chain",
       [](const auto& t) {
         auto h = t[0];
         for (int i = 0; i < 5; ++i) h = torch::gelu(torch::dropout(h.mm(t[2]), 0.3, true)).relu();
         return h.pow(2).sum();
       }},
      {"in place",
       [](const auto& t) {
         auto h = t[0].mm(t[2]).add_(1).relu_();
         auto g = h.mm(t[1]).sigmoid_();
         return (g.mm(t[3]).tanh_() * h).sum();
       }},
      {"chunks of one product changed apart",
       [](const auto& t) {
         auto hidden = torch::zeros({6, 8});
         auto cell = torch::zeros({6, 8});
         for (int i = 0; i < 4; ++i) {
           auto gates = at::linear(t[0], t[4]) + at::linear(hidden, t[5]);
           auto parts = at::unsafe_chunk(gates, 4, 1);
           auto in = parts[0].sigmoid_(), forget = parts[1].sigmoid_();
           auto candidate = parts[2].tanh_(), out = parts[3].sigmoid_();
           cell = forget * cell + in * candidate;
           hidden = out * cell.tanh();
         }
         return hidden.sum();
       }},
      {"attention on views",
       [](const auto& t) {
         auto parts = t[0].mm(t[1]).add_(0.5).chunk(3, 1);
         std::vector<at::Tensor> heads;
         for (auto& p : parts) heads.push_back(p.reshape({1, 6, 2, 4}).transpose(1, 2));
         auto out = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, true);
         return out.transpose(1, 2).reshape({6, 8}).mm(t[2]).exp().sum();
       }},
      {"views, expand and slices",
       [](const auto& t) {
         auto h = t[0].mm(t[2]);
         auto a = h.t().mm(h.narrow(0, 1, 5).new_ones({6, 8})).sum();
         auto b = (h.select(1, 3).unsqueeze(1).expand({6, 8}) * h.exp()).sum();
         auto c = h.slice(1, 0, 8, 2).tanh().mul(h.slice(1, 1, 8, 2)).sum();
         return a + b + c;
       }},
      {"kernels that fill what they saved",
       [](const auto& t) {
         auto h = at::rrelu(t[0].mm(t[2]), 0.1, 0.4, true);
         h = at::batch_norm(h, {}, {}, {}, {}, true, 0.1, 1e-5, false);
         return at::layer_norm(h, {8}).pow(3).sum();
       }},
  };
  return all;
}

class OffloadTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  void TearDown() override { EXPECT_FALSE(plane::op::active()); }
};

int thread_count() {
  return static_cast<int>(std::distance(fs::directory_iterator("/proc/self/task"), {}));
}

TEST_F(OffloadTest, GivesTheSameGradientsBitForBitByEveryWay) {
  const Scratch scratch;
  for (const auto& [name, program] : programs()) {
    const auto plain = run(program, std::nullopt);
    for (const auto& [way, options] : all_ways(scratch)) {
      SCOPED_TRACE(name + ", " + way);
      expect_equal(plain, run(program, options));
    }
  }
  EXPECT_TRUE(scratch.files().empty());
}

TEST_F(OffloadTest, GivesTheSameGradientsOnSeveralThreads) {
  const Scratch scratch;
  at::set_num_threads(2);
  const auto x = torch::randn({128, 256});
  const auto gradient = [&](const std::optional<OffloadOptions>& options) {
    torch::manual_seed(2);
    torch::nn::Sequential net(torch::nn::Linear(256, 256), torch::nn::GELU(),
                              torch::nn::Dropout(0.2), torch::nn::Linear(256, 256),
                              torch::nn::ReLU(), torch::nn::Linear(256, 64));
    std::optional<OffloadGuard> guard;
    if (options) guard.emplace(*options);
    net->forward(x).pow(2).sum().backward();
    std::vector<at::Tensor> result;
    for (const auto& p : net->parameters()) result.push_back(p.grad());
    return result;
  };
  expect_equal(gradient(std::nullopt), gradient(to_disk(scratch)));
  expect_equal(gradient(std::nullopt), gradient(to_host()));
}

TEST_F(OffloadTest, RestoresSizesStridesAndOffset) {
  auto base = torch::randn({4, 6, 8});
  OffloadGuard guard(to_host());
  std::vector<at::Tensor> views{base, base.transpose(0, 2), base.narrow(1, 2, 3),
                                base.select(2, 1).unsqueeze(0).expand({5, 4, 6}),
                                base.slice(0, 1, 4, 2)};
  std::vector<plane::saved::Held> held;
  for (const auto& view : views) held.emplace_back(view);
  const auto expected = base.clone();
  std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> geometry;
  for (const auto& view : views) geometry.emplace_back(view.sizes().vec(), view.strides().vec());
  guard.flush();
  EXPECT_EQ(guard.statistics().tensors_out, 1);
  EXPECT_EQ(guard.statistics().shared_saves, 4);
  views.clear();
  base.reset();
  for (std::size_t i = 0; i < held.size(); ++i) {
    const at::Tensor back = held[i].get();
    EXPECT_EQ(back.sizes().vec(), geometry[i].first);
    EXPECT_EQ(back.strides().vec(), geometry[i].second);
  }
  EXPECT_TRUE(held[0].get().equal(expected));
  EXPECT_TRUE(held[2].get().equal(expected.narrow(1, 2, 3)));
  EXPECT_GT(guard.statistics().bytes_in, 0);
}

// A chain of `layers` products of [n, n] whose activations are n * n * 4 bytes each.
struct Chain {
  explicit Chain(std::int64_t n, int layers) : x(torch::randn({n, n})) {
    for (int i = 0; i < layers; ++i) {
      weights.push_back(
          (torch::randn({n, n}) / std::sqrt(static_cast<double>(n))).requires_grad_());
    }
  }
  at::Tensor loss() const {
    auto h = x;
    for (const auto& w : weights) h = h.mm(w).tanh();
    return h.sum();
  }
  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> result;
    for (auto& w : weights) {
      result.push_back(w.grad().clone());
      w.mutable_grad() = at::Tensor();
    }
    return result;
  }
  std::vector<std::pair<std::string, at::Tensor>> names() const {
    std::vector<std::pair<std::string, at::Tensor>> result{{"x", x}};
    for (std::size_t i = 0; i < weights.size(); ++i) {
      result.emplace_back("weight." + std::to_string(i), weights[i]);
    }
    return result;
  }
  at::Tensor x;
  std::vector<at::Tensor> weights;
};

TEST_F(OffloadTest, TheDeviceHoldsAlmostNothingAfterForwardAndTheWindowDuringBackward) {
  auto& tracker = base::MemoryTracker::install();
  const Scratch scratch;
  constexpr std::int64_t kBytes = 256 * 256 * 4;
  Chain chain(256, 24);
  const base::NamedTensors names(chain.names());
  for (auto& w : chain.weights) w.mutable_grad() = torch::zeros_like(w);
  for (const bool disk : {false, true}) {
    SCOPED_TRACE(disk ? "disk" : "host");
    OffloadOptions options =
        disk ? to_disk(scratch, FileAccess::automatic, 3 * kBytes) : to_host(3 * kBytes);
    options.min_bytes = kBytes;
    options.staging_bytes = 2 * kBytes;
    const std::int64_t before = tracker.live().total();
    const std::int64_t host_before = tracker.live(base::Arena::host).total();
    OffloadGuard guard(options);
    tracker.reset_peak();
    at::Tensor loss = chain.loss();
    // Forward itself: a product, its tanh, and one more on its way; staging besides.
    EXPECT_LE(tracker.peak().total() - before, options.staging_bytes + 3 * kBytes + 4096);
    EXPECT_LE(tracker.live().total() - before, options.staging_bytes + 4096);
    guard.flush();
    EXPECT_LE(tracker.live().total() - before, 4096);
    EXPECT_EQ(guard.statistics().stored_bytes, 24 * kBytes);
    EXPECT_EQ(tracker.live(base::Arena::host).total() - host_before, disk ? 0 : 24 * kBytes);
    tracker.reset_peak();
    loss.backward();
    // Backward itself: gradients in and out of a node, the restored tensor, a weight's gradient.
    EXPECT_LE(tracker.peak().total() - before, options.window_bytes + 5 * kBytes + 4096);
    loss.reset();
    EXPECT_EQ(tracker.live().total(), before);
    EXPECT_EQ(tracker.live(base::Arena::host).total(), host_before);
    const auto s = guard.statistics();
    EXPECT_EQ(s.stored_bytes, 0);
    EXPECT_EQ(s.bytes_in, 24 * kBytes);  // the two uses of a tensor in turn share one read
    EXPECT_GE(s.prefetch_hits + s.prefetch_late, 20);
  }
}

// Reads take a while, as on a slow disk.
class SlowIo final : public FileIo {
 public:
  explicit SlowIo(std::chrono::milliseconds delay) : delay_(delay) {}
  void start(Transfer t) override {
    if (t.write) return t.done(transfer_now(t));
    inner_->start({false, t.file, t.data, t.bytes, t.offset, [t, delay = delay_](int error) {
                     std::this_thread::sleep_for(delay);
                     t.done(error);
                   }});
  }
  std::string_view name() const override { return "slow"; }

 private:
  std::chrono::milliseconds delay_;
  std::shared_ptr<FileIo> inner_ = make_thread_io(4);
};

TEST_F(OffloadTest, ReadingAheadHalvesTheWaitsOfBackwardAtLeast) {
  const Scratch scratch;
  Chain chain(384, 24);
  const base::NamedTensors names(chain.names());
  const auto waits = [&](std::int64_t window) {
    OffloadOptions options = to_disk(scratch, FileAccess::automatic, window);
    options.min_bytes = kMiB / 4;
    options.disk.io = std::make_shared<SlowIo>(std::chrono::milliseconds(6));
    OffloadGuard guard(options);
    at::Tensor loss = chain.loss();
    guard.flush();
    const auto start = std::chrono::steady_clock::now();
    loss.backward();
    const std::chrono::duration<double> whole = std::chrono::steady_clock::now() - start;
    const double wait = guard.statistics().read_wait_s;
    std::cout << "  window " << window << ": waits " << wait * 1e3 << " ms of "
              << whole.count() * 1e3 << " ms\n";
    return wait;
  };
  const double without = waits(0);
  const double with = waits(64 * kMiB);
  EXPECT_GT(without, 24 * 0.006);
  EXPECT_LE(with, 0.5 * without);
}

TEST_F(OffloadTest, StoresAStorageOnceHoweverOftenItIsSaved) {
  OffloadGuard guard(to_host());
  auto x = torch::randn({16, 16}).requires_grad_();
  auto h = x.exp();  // saved by exp, and by all three below
  auto loss = h.mm(h.t()).sum() + h.view({256}).pow(2).sum() + h.tanh().sum();
  guard.flush();
  const auto s = guard.statistics();
  EXPECT_EQ(s.bytes_out, 2 * 16 * 16 * 4);  // h and tanh's result
  EXPECT_GE(s.shared_saves, 3);
}

TEST_F(OffloadTest, ReadsNothingThatIsStillOnTheDevice) {
  OffloadGuard guard(to_host());
  auto x = torch::randn({64, 64}).requires_grad_();
  auto h = x.exp();
  auto loss = h.tanh().sum();
  guard.flush();
  loss.backward();  // h lives in this function
  EXPECT_EQ(guard.statistics().bytes_in, 64 * 64 * 4);
  EXPECT_EQ(guard.statistics().resident_hits, 1);
}

TEST_F(OffloadTest, LeavesParametersSmallTensorsAndWhatThePolicyKeeps) {
  auto w = torch::randn({32, 32}).requires_grad_();
  auto x = torch::randn({32, 32});
  const base::NamedTensors names({{"w", w}});
  const auto written = [&](const std::function<void(OffloadOptions&)>& change) {
    OffloadOptions options = to_host();
    change(options);
    OffloadGuard guard(options);
    auto loss = x.mm(w).exp().mm(w.t()).tanh().sum();
    guard.flush();
    return guard.statistics().tensors_out;
  };
  EXPECT_EQ(written([](auto&) {}), 3);  // x, exp, tanh
  EXPECT_EQ(written([](auto& o) { o.named_tensors = true; }), 4);
  EXPECT_EQ(written([&](auto& o) { o.resident = {x.view({-1})}; }), 2);
  EXPECT_EQ(written([](auto& o) { o.min_bytes = 32 * 32 * 4 + 1; }), 0);
  EXPECT_EQ(written([](auto& o) { o.operators = {"aten::tanh"}; }), 1);
  EXPECT_EQ(written([](auto& o) { o.except_operators = {"aten::mm"}; }), 2);
  EXPECT_EQ(written([](auto& o) {
              o.policy = [](const plane::saved::Value& v) { return v.maker == "aten::exp"; };
            }),
            1);
}

TEST_F(OffloadTest, SurvivesRetainedGraphsDoubleBackwardAndDroppedGraphs) {
  auto& tracker = base::MemoryTracker::install();
  const Scratch scratch;
  for (const auto& [way, options] : all_ways(scratch)) {
    SCOPED_TRACE(way);
    auto x = torch::randn({32, 8}, at::kDouble).requires_grad_();
    const auto host = tracker.live(base::Arena::host).total();
    {
      OffloadGuard guard(options);
      auto loss = x.pow(3).exp().tanh().sum();
      guard.flush();
      loss.backward({}, /*retain_graph=*/true);
      const auto first = x.grad().clone();
      x.mutable_grad() = at::Tensor();
      loss.backward();
      EXPECT_TRUE(x.grad().equal(first));
      x.mutable_grad() = at::Tensor();
    }
    const auto penalty = [&] {
      auto g = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, true, true)[0];
      g.pow(2).sum().backward();
      auto result = x.grad().clone();
      x.mutable_grad() = at::Tensor();
      return result;
    };
    const auto plain = penalty();
    {
      const OffloadGuard guard(options);
      EXPECT_TRUE(penalty().equal(plain));
    }
    OffloadGuard guard(options);
    {
      auto dropped = x.exp().tanh().sum();
    }
    guard.flush();
    EXPECT_EQ(guard.statistics().stored_bytes, 0);
    EXPECT_EQ(tracker.live(base::Arena::host).total(), host);
  }
}

TEST_F(OffloadTest, BackwardRunsOnOtherThreadsAndAfterTheGuard) {
  const Scratch scratch;
  for (const auto& [way, options] : all_ways(scratch)) {
    SCOPED_TRACE(way);
    Chain chain(16, 6);
    chain.loss().backward();
    const auto plain = chain.gradients();
    const int threads = thread_count();
    at::Tensor loss;
    {
      const OffloadGuard guard(options);
      loss = chain.loss();
    }
    EXPECT_EQ(thread_count(), threads);
    std::thread([&] { loss.backward(); }).join();
    expect_equal(chain.gradients(), plain);
    {
      const OffloadGuard guard(options);
      loss = chain.loss();
      std::thread([&] { loss.backward(); }).join();
    }
    expect_equal(chain.gradients(), plain);
  }
}

TEST_F(OffloadTest, SeveralThreadsTrainUnderGuardsOfTheirOwn) {
  const Scratch scratch;
  const auto work = [&](int seed) {
    for (int i = 0; i < 10; ++i) {
      at::Tensor x, plain;
      x = torch::full({16, 16}, 0.01 * seed).requires_grad_();
      x.exp().tanh().mm(x).sum().backward();
      plain = x.grad().clone();
      x.mutable_grad() = at::Tensor();
      const OffloadGuard guard(seed % 2 == 0 ? to_host() : to_disk(scratch));
      x.exp().tanh().mm(x).sum().backward();
      EXPECT_TRUE(x.grad().equal(plain));
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i <= 4; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
}

TEST_F(OffloadTest, TakesWhatCompressionAndCheckpointsLeave) {
  struct Halve final : plane::saved::Hooks {
    std::optional<plane::saved::Packed> pack(const plane::saved::Value& v) override {
      return plane::saved::Packed{{v.tensor.to(at::kBFloat16)},
                                  [](auto p) { return p[0].to(at::kFloat); }};
    }
  };
  struct Drop final : plane::saved::Hooks {
    std::optional<plane::saved::Packed> pack(const plane::saved::Value& v) override {
      if (v.maker != "aten::tanh") return std::nullopt;
      return plane::saved::Packed{{}, [t = v.tensor.clone()](auto) { return t; }};
    }
  };
  auto x = torch::randn({16, 16}).requires_grad_();
  OffloadGuard guard(to_host());
  const auto compress =
      plane::saved::push(plane::saved::Order::compress, std::make_shared<Halve>());
  const auto checkpoint =
      plane::saved::push(plane::saved::Order::checkpoint, std::make_shared<Drop>());
  x.exp().tanh().sum().backward();
  guard.flush();
  EXPECT_EQ(guard.statistics().bytes_out + 512 * guard.statistics().cancelled, 16 * 16 * 2);
  const auto e = x.detach().exp();
  const auto expected =
      at::tanh_backward(torch::ones_like(e), e.tanh()) * e.to(at::kBFloat16).to(at::kFloat);
  EXPECT_TRUE(x.grad().equal(expected));
}

TEST_F(OffloadTest, TakesTheInputsOfNestedCheckpointsAndNothingOfWhatTheyMake) {
  const Scratch scratch;
  const Program program = [](const std::vector<at::Tensor>& t) {
    const auto inner = [w = t[2]](at::Tensor h) { return at::dropout(h.mm(w).tanh(), 0.2, true); };
    const auto outer = [inner](at::Tensor h) {
      return recompute::checkpoint(inner, recompute::checkpoint(inner, h).exp());
    };
    auto h = t[0].mm(t[2]);
    for (int i = 0; i < 3; ++i) h = recompute::checkpoint(outer, h);
    return h.pow(2).sum();
  };
  const auto plain = run(program, std::nullopt);
  for (const auto& [way, options] : all_ways(scratch)) {
    SCOPED_TRACE(way);
    expect_equal(plain, run(program, options));
  }
}

TEST_F(OffloadTest, ATensorChangedAfterItWasSavedIsAnErrorAsEver) {
  const OffloadGuard guard(to_host());
  auto x = torch::randn({16}).requires_grad_();
  auto h = x.exp();
  auto loss = h.tanh().sum();
  h.detach().add_(1);
  EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("must not change before it is used"));
}

// --- Failures ----------------------------------------------------------------------------------

// Fails the transfers that `error` gives an errno for.
class FaultyIo final : public FileIo {
 public:
  explicit FaultyIo(std::function<int(const Transfer&)> error) : error_(std::move(error)) {}
  void start(Transfer t) override {
    const int error = error_(t);
    inner_->start({t.write, t.file, t.data, error == 0 ? t.bytes : 0, t.offset,
                   [done = t.done, error](int real) { done(error != 0 ? error : real); }});
  }
  std::string_view name() const override { return "faulty"; }

 private:
  std::function<int(const Transfer&)> error_;
  std::shared_ptr<FileIo> inner_ = make_thread_io(2);
};

void expect_healthy_plane() {
  Chain chain(16, 4);
  chain.loss().backward();
  const auto plain = chain.gradients();
  const Scratch scratch;
  const OffloadGuard guard(to_disk(scratch));
  chain.loss().backward();
  expect_equal(chain.gradients(), plain);
}

TEST_F(OffloadTest, AnInputOutputErrorNamesPlaceAndCauseAndLeavesAllInOrder) {
  auto& tracker = base::MemoryTracker::install();
  const Scratch scratch;
  Chain chain(64, 12);
  for (auto& w : chain.weights) w.mutable_grad() = torch::zeros_like(w);
  const auto before = tracker.live().total();
  for (const bool write : {true, false}) {
    for (const std::int64_t window : {std::int64_t{0}, 64 * kMiB}) {
      SCOPED_TRACE(base::join(write ? "write" : "read", " window ", window));
      std::atomic<int> transfers{0};
      OffloadOptions options = to_disk(scratch, FileAccess::automatic, window);
      options.disk.io = std::make_shared<FaultyIo>(
          [&](const Transfer& t) { return t.write == write && ++transfers == 5 ? EIO : 0; });
      OffloadGuard guard(options);
      const std::string message = message_of([&] {
        at::Tensor loss = chain.loss();
        guard.flush();
        loss.backward();
      });
      EXPECT_THAT(message, HasSubstr(write ? "[offload] writing 16.0 KiB to a temporary file in '"
                                           : "[offload] reading 16.0 KiB from a temporary file"));
      EXPECT_THAT(message, HasSubstr(scratch.path()));
      EXPECT_THAT(message, HasSubstr("Input/output error"));
      guard.flush();
      EXPECT_EQ(guard.statistics().stored_bytes, 0);
      EXPECT_EQ(guard.statistics().waiting_bytes, 0);
      chain.loss().backward();  // the same guard goes on
    }
  }
  EXPECT_EQ(tracker.live().total(), before);
  expect_healthy_plane();
}

// Runs `body` in a child process; returns its exit code, or 128 + signal.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (...) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::vector<FileAccess> accesses() {
  std::vector<FileAccess> all{FileAccess::threads};
  if (make_uring_io() != nullptr) all.push_back(FileAccess::io_uring);
  return all;
}

std::string train_until_error(const OffloadOptions& options) {
  return message_of([&] {
    Chain chain(256, 16);
    OffloadGuard guard(options);
    at::Tensor loss = chain.loss();
    guard.flush();
    loss.backward();
  });
}

TEST_F(OffloadTest, TakesThreadsWhereTheKernelForbidsIoUring) {
  const Scratch scratch;
  const int code = in_child([&] {
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog filter{4, code};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return 77;
    if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) return 77;
    if (make_uring_io() != nullptr) return 1;
    const std::string refusal =
        message_of([&] { const OffloadGuard guard(to_disk(scratch, FileAccess::io_uring)); });
    if (refusal.find("FileAccess::io_uring needs a kernel") == std::string::npos) return 2;
    Chain chain(32, 6);
    chain.loss().backward();
    const auto plain = chain.gradients();
    OffloadGuard guard(to_disk(scratch));
    at::Tensor loss = chain.loss();
    guard.flush();
    loss.backward();
    const auto offloaded = chain.gradients();
    for (std::size_t i = 0; i < plain.size(); ++i) {
      if (!plain[i].equal(offloaded[i])) return 3;
    }
    return guard.statistics().access == "threads" ? 0 : 4;
  });
  if (code == 77) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_EQ(code, 0);
}

TEST_F(OffloadTest, AFullDiskIsAnErrorInForward) {
  const Scratch scratch;
  for (const FileAccess access : accesses()) {
    const int code = in_child([&] {
      // A mount namespace of the child's own: nothing of it is left behind.
      if (::unshare(CLONE_NEWNS) != 0) return 77;
      if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
      if (::mount("none", scratch.path().c_str(), "tmpfs", 0, "size=1m") != 0) return 77;
      const std::string message = train_until_error(to_disk(scratch, access));
      const bool right = message.find("No space left on device") != std::string::npos &&
                         message.find(scratch.path()) != std::string::npos;
      if (!right) std::cerr << message << "\n";
      return right ? 0 : 1;
    });
    if (code == 77) GTEST_SKIP() << "no mount namespaces here; the next test fills a file instead";
    EXPECT_EQ(code, 0);
  }
}

TEST_F(OffloadTest, AFileSizeLimitIsAnErrorAndNoSignal) {
  const Scratch scratch;
  for (const FileAccess access : accesses()) {
    const int code = in_child([&] {
      const rlimit limit{kMiB, kMiB};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      const std::string message = train_until_error(to_disk(scratch, access));
      const bool right = message.find("File too large") != std::string::npos;
      if (!right) std::cerr << message << "\n";
      return right ? 0 : 1;
    });
    EXPECT_EQ(code, 0);
  }
  expect_healthy_plane();
}

TEST_F(OffloadTest, ATruncatedFileIsAnErrorInBackwardEvenAfterItGrewAgain) {
  const Scratch scratch;
  for (const FileAccess access : accesses()) {
    for (const bool grow : {false, true}) {
      OffloadOptions options = to_disk(scratch, access);
      options.disk.named_file = true;
      Chain chain(64, 8);
      OffloadGuard guard(options);
      at::Tensor loss = chain.loss();
      guard.flush();
      ASSERT_EQ(scratch.files().size(), 1);
      const fs::path file = scratch.files()[0];
      const auto size = fs::file_size(file);
      fs::resize_file(file, 0);
      if (grow) fs::resize_file(file, size);
      const std::string message = message_of([&] { loss.backward(); });
      EXPECT_THAT(message, HasSubstr(file.string()));
      EXPECT_THAT(message, HasSubstr(grow ? "the bytes are not those that were written"
                                          : "the file ends earlier"));
    }
  }
  expect_healthy_plane();
}

TEST_F(OffloadTest, ARemovedDirectoryDoesNotHurtARunAndRefusesTheNext) {
  const Scratch scratch;
  Chain chain(64, 8);
  chain.loss().backward();
  const auto plain = chain.gradients();
  OffloadGuard guard(to_disk(scratch));
  at::Tensor loss = chain.loss();
  fs::remove_all(scratch.path());
  loss.backward();
  expect_equal(chain.gradients(), plain);
  EXPECT_THAT(message_of([&] { const OffloadGuard next(to_disk(scratch)); }),
              HasSubstr("offload to disk needs an existing directory; got '" + scratch.path()));
}

TEST_F(OffloadTest, TheHostArenaFullIsAnErrorAndTheProgramGoesOn) {
  base::MemoryTracker::install();
  Chain chain(64, 12);
  {
    const base::MemoryLimit limit({.host_bytes = 5 * 64 * 64 * 4});
    OffloadGuard guard(to_host());
    EXPECT_THROW(
        {
          at::Tensor loss = chain.loss();
          guard.flush();
        },
        MemoryLimitError);
  }
  EXPECT_EQ(base::MemoryTracker::installed()->live(base::Arena::host).total(), 0);
  expect_healthy_plane();
}

TEST_F(OffloadTest, AWindowThatTheDeviceCannotHoldGivesWay) {
  auto& tracker = base::MemoryTracker::install();
  constexpr std::int64_t kBytes = 128 * 128 * 4;
  Chain chain(128, 16);
  for (auto& w : chain.weights) w.mutable_grad() = torch::zeros_like(w);
  const base::NamedTensors names(chain.names());
  OffloadOptions options = to_host();
  options.staging_bytes = kBytes;
  OffloadGuard guard(options);
  const base::MemoryLimit limit({.device_bytes = tracker.live().total() + 7 * kBytes});
  at::Tensor loss = chain.loss();
  guard.flush();
  loss.backward();
  // Each tensor is read once, but for those that were read ahead and had to go.
  EXPECT_GE(guard.statistics().bytes_in, 16 * kBytes);
  EXPECT_LE(guard.statistics().bytes_in, 24 * kBytes);
  EXPECT_GT(guard.statistics().prefetch_hits + guard.statistics().prefetch_late, 4);
}

TEST_F(OffloadTest, FilesVanishWithTheProcessAndNamedOnesAtTheNextStart) {
  const Scratch scratch;
  for (const bool named : {false, true}) {
    SCOPED_TRACE(named ? "named" : "without a name");
    OffloadOptions options = to_disk(scratch);
    options.disk.named_file = named;
    {
      const OffloadGuard guard(options);
      EXPECT_EQ(scratch.files().size(), named ? 1 : 0);
    }
    EXPECT_TRUE(scratch.files().empty());
    const int code = in_child([&] {
      OffloadGuard guard(options);
      Chain chain(64, 4);
      at::Tensor loss = chain.loss();
      guard.flush();
      ::kill(::getpid(), SIGKILL);
      return 0;
    });
    EXPECT_EQ(code, 128 + SIGKILL);
    EXPECT_EQ(scratch.files().size(), named ? 1 : 0);
    const OffloadGuard living(options);
    const OffloadGuard other(options);  // must not take the living one's file
    EXPECT_EQ(scratch.files().size(), named ? 2 : 0);
  }
}

TEST_F(OffloadTest, RefusesOptionsOutOfRange) {
  const auto refused = [](const std::function<void(OffloadOptions&)>& change) {
    OffloadOptions options;
    change(options);
    return message_of([&] { const OffloadGuard guard(options); });
  };
  EXPECT_THAT(refused([](auto& o) { o.staging_bytes = 0; }),
              HasSubstr("[offload] staging_bytes must be positive; got 0"));
  EXPECT_THAT(refused([](auto& o) { o.window_bytes = -1; }),
              HasSubstr("window_bytes must be >= 0"));
  EXPECT_THAT(refused([](auto& o) { o.target = Target::disk; }),
              HasSubstr("offload to disk needs a directory; got none"));
  EXPECT_THAT(refused([](auto& o) { o.target = Target::device; }), HasSubstr("got cpu"));
  EXPECT_THROW(make_thread_io(0), UserError);
}

TEST_F(OffloadTest, MeasuresABandwidthThatPredictsTransfers) {
  const Scratch scratch;
  for (const OffloadOptions& options : {to_host(), to_disk(scratch)}) {
    const Bandwidth b = measure_bandwidth(options, {.bytes = 4 * kMiB, .repeats = 3});
    EXPECT_GT(b.write_bytes_per_s, 1e6);
    EXPECT_GT(b.read_bytes_per_s, 1e6);
    EXPECT_GE(b.write_latency_s, 0.0);
    EXPECT_GT(b.read_s(2 * kMiB), b.read_s(kMiB));
    EXPECT_GT(b.write_s(kMiB), 0.0);
  }
  EXPECT_THROW(measure_bandwidth(to_host(), {.bytes = 1}), UserError);
}

}  // namespace
}  // namespace gradus::offload
