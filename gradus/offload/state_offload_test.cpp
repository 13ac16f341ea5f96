#include <gradus/offload/state_offload.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/offload/file_io.h>

namespace gradus::offload {
namespace {

using testing::HasSubstr;

std::string scratch_directory() {
  std::string name =
      (std::filesystem::temp_directory_path() / "state-offload-test-XXXXXX").string();
  return ::mkdtemp(name.data()) != nullptr ? name : "";
}

class StateOffloadTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
    directory_ = scratch_directory();
    ASSERT_FALSE(directory_.empty());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  OffloadOptions options(Target target, FileAccess access = FileAccess::automatic) const {
    OffloadOptions o;
    o.target = target;
    o.min_bytes = 1024;
    o.staging_bytes = 20000;
    o.disk.directory = directory_;
    o.disk.access = access;
    return o;
  }
  std::string directory_;
};

std::vector<at::Tensor> state_tensors(torch::optim::AdamW& optimizer) {
  std::vector<at::Tensor> tensors;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& p : group.params()) {
      auto& state = static_cast<torch::optim::AdamWParamState&>(
          *optimizer.state().at(p.unsafeGetTensorImpl()));
      tensors.push_back(state.exp_avg());
      tensors.push_back(state.exp_avg_sq());
      tensors.push_back(state.max_exp_avg_sq());  // undefined without amsgrad
    }
  }
  return tensors;
}

TEST_F(StateOffloadTest, AHundredAdamWStepsEqualResidentOnesBitForBit) {
  auto& tracker = base::MemoryTracker::install();
  const auto x = torch::randn({16, 64}), y = torch::randn({16, 8});
  const auto train = [&](const std::optional<OffloadOptions>& how) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(64, 96), torch::nn::Tanh(),
                              torch::nn::Linear(96, 8));
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
    std::optional<StateOffload> state;
    for (int step = 0; step < 100; ++step) {
      if (state) {
        const auto before = tracker.live().total();
        state->offload();
        // Both moments of both weights; the biases lie below min_bytes.
        EXPECT_EQ(before - tracker.live().total(), 2 * 4 * (64 * 96 + 96 * 8));
        EXPECT_TRUE(state->away());
      }
      optimizer.zero_grad();
      torch::mse_loss(net->forward(x), y).backward();
      if (state) {
        if (step % 2 == 0) state->prefetch(step % 4 == 0 ? 30000 : INT64_MAX);
        state->fetch();
        EXPECT_FALSE(state->away());
      }
      optimizer.step();
      if (how && step == 0) state.emplace(state_tensors(optimizer), *how);
    }
    std::vector<at::Tensor> result;
    for (const auto& p : net->parameters()) result.push_back(p.detach().clone());
    return result;
  };
  const auto plain = train(std::nullopt);
  std::vector<OffloadOptions> ways{options(Target::host),
                                   options(Target::disk, FileAccess::threads)};
  if (make_uring_io() != nullptr) ways.push_back(options(Target::disk, FileAccess::io_uring));
  for (const auto& how : ways) {
    const auto host = tracker.live(base::Arena::host).total();
    const auto offloaded = train(how);
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(plain[i].equal(offloaded[i]));
    EXPECT_EQ(tracker.live(base::Arena::host).total(), host);
  }
}

TEST_F(StateOffloadTest, ViewsSeeTheTensorComeBackAndTheDestructorBringsItBack) {
  auto t = torch::randn({64, 32});
  const auto view = t.t().narrow(0, 3, 5);
  const auto expected = t.clone();
  {
    StateOffload state({t, t.view({-1}), torch::ones({2}), at::Tensor()}, options(Target::disk));
    EXPECT_EQ(t.storage().nbytes(), 64 * 32 * 4);
    state.offload();
    EXPECT_EQ(t.storage().nbytes(), 0);
    state.offload();  // nothing is left to do
    EXPECT_EQ(state.statistics().tensors_out, 1);
    EXPECT_EQ(state.statistics().stored_bytes, 64 * 32 * 4);
  }
  EXPECT_TRUE(t.equal(expected));
  EXPECT_TRUE(view.equal(expected.t().narrow(0, 3, 5)));
}

class FaultyIo final : public FileIo {
 public:
  FaultyIo(bool write, int which) : write_(write), which_(which) {}
  void start(Transfer t) override {
    if (t.write == write_ && ++count_ == which_) return t.done(EIO);
    t.done(transfer_now(t));
  }
  std::string_view name() const override { return "faulty"; }

 private:
  bool write_;
  int which_;
  int count_ = 0;
};

TEST_F(StateOffloadTest, AFailedTransferLosesNothing) {
  for (const bool write : {true, false}) {
    SCOPED_TRACE(write ? "write" : "read");
    std::vector<at::Tensor> tensors, expected;
    for (int i = 0; i < 4; ++i) {
      tensors.push_back(torch::randn({1000}));
      expected.push_back(tensors.back().clone());
    }
    OffloadOptions how = options(Target::disk);
    how.disk.io = std::make_shared<FaultyIo>(write, 2);
    StateOffload state(tensors, how);
    const auto message = [&](const std::function<void()>& fn) -> std::string {
      try {
        fn();
      } catch (const UserError& error) {
        return error.what();
      }
      return "";
    };
    std::string text = message([&] { state.offload(); });
    if (!write) {
      EXPECT_EQ(text, "");
      text = message([&] { state.fetch(); });
      EXPECT_TRUE(state.away());
    }
    EXPECT_THAT(text, HasSubstr("Input/output error"));
    EXPECT_THAT(text, HasSubstr(directory_));
    state.fetch();
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(tensors[i].equal(expected[i]));
  }
}

TEST_F(StateOffloadTest, AFetchThatTheLimitRefusesCanBeRepeated) {
  auto& tracker = base::MemoryTracker::install();
  std::vector<at::Tensor> tensors, expected;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::randn({1000}));
    expected.push_back(tensors.back().clone());
  }
  StateOffload state(tensors, options(Target::host));
  state.offload();
  {
    const base::MemoryLimit limit({.device_bytes = tracker.live().total() + 9000});
    EXPECT_THROW(state.fetch(), MemoryLimitError);
  }
  state.fetch();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(tensors[i].equal(expected[i]));
}

}  // namespace
}  // namespace gradus::offload
