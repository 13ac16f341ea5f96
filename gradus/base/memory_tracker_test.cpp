#include <gradus/base/memory_tracker.h>

#include <cstring>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace gradus::base {
namespace {

using testing::HasSubstr;

class MemoryTrackerTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    tracker.reset_peak();
    tracker.reset_peak(Arena::host);
    start = tracker.live();
    start_host = tracker.live(Arena::host);
  }
  std::int64_t grown(MemoryCategory category) const {
    return tracker.live()[category] - start[category];
  }
  std::int64_t peak_grown(MemoryCategory category) const {
    return tracker.peak()[category] - start[category];
  }

  MemoryTracker& tracker = MemoryTracker::install();
  MemoryBreakdown start, start_host;
};

TEST_F(MemoryTrackerTest, CountsTheTemporaryOfDEqualsAPlusBOverCAsWorkspaceToTheByte) {
  at::NoGradGuard no_grad;
  const std::int64_t n = 1021, bytes = n * 4;
  at::Tensor a = torch::randn({n}), b = torch::randn({n}), c = torch::randn({n});
  for (const auto& t : {a, b, c}) EXPECT_TRUE(tracker.attribute(t, MemoryCategory::inputs));
  start = tracker.live();
  tracker.reset_peak();
  at::Tensor d = a + b / c;
  // B/C and D were alive together; B/C is gone.
  EXPECT_EQ(peak_grown(MemoryCategory::workspace), 2 * bytes);
  EXPECT_EQ(grown(MemoryCategory::workspace), bytes);
  tracker.attribute(d, MemoryCategory::activations);
  EXPECT_EQ(grown(MemoryCategory::workspace), 0);
  EXPECT_EQ(grown(MemoryCategory::inputs), 0);
}

TEST_F(MemoryTrackerTest, LapsOfOneObserverLeaveThePeakAlone) {
  auto& tracker = MemoryTracker::install();
  tracker.lap_peak();
  const std::int64_t live = tracker.live().total();
  {
    const auto a = torch::empty({1000});
  }
  tracker.reset_peak();
  {
    const auto a = torch::empty({500});
  }
  EXPECT_EQ(tracker.lap_peak(), live + 4000);
  EXPECT_EQ(tracker.peak().total(), live + 2000);
  EXPECT_EQ(tracker.lap_peak(), live);
  tracker.lap_levels();
  {
    const auto a = torch::empty({1000});
    {
      const auto b = torch::empty({10});
    }
    const auto c = torch::empty({5}), d = torch::empty({100});
  }
  EXPECT_THAT(tracker.lap_levels(), testing::ElementsAre(live + 4000, live + 4040, live + 4420));
  EXPECT_THAT(tracker.lap_levels(), testing::ElementsAre(live));
}

TEST_F(MemoryTrackerTest, SeesAFreeFromAnotherThread) {
  at::Tensor t = torch::empty({1 << 20}, at::kByte);
  EXPECT_EQ(grown(MemoryCategory::workspace), 1 << 20);
  std::thread([t = std::move(t)]() mutable { t.reset(); }).join();
  EXPECT_EQ(tracker.live(), start);
}

TEST_F(MemoryTrackerTest, SeesAnAllocationOfAnotherThread) {
  at::Tensor t;
  std::thread([&] { t = torch::empty({1 << 20}, at::kByte); }).join();
  EXPECT_EQ(grown(MemoryCategory::workspace), 1 << 20);
}

TEST_F(MemoryTrackerTest, CategoryScopeAndAttributeSayWhatABlockHolds) {
  at::Tensor state;
  {
    const MemoryCategoryScope scope(MemoryCategory::optimizer_state);
    state = torch::zeros({100});
  }
  at::Tensor weight = torch::zeros({50});
  tracker.attribute(weight.view({5, 10}), MemoryCategory::parameters);
  EXPECT_EQ(grown(MemoryCategory::optimizer_state), 400);
  EXPECT_EQ(grown(MemoryCategory::parameters), 200);
  EXPECT_FALSE(tracker.attribute(at::Tensor(), MemoryCategory::inputs));
  float foreign[4] = {};
  EXPECT_FALSE(tracker.attribute(torch::from_blob(foreign, {4}), MemoryCategory::inputs));
}

TEST_F(MemoryTrackerTest, SavedMarkCountsWorkspaceAsActivationAndLeavesParametersAlone) {
  at::Tensor x = torch::zeros({100}), w = torch::zeros({10});
  tracker.attribute(w, MemoryCategory::parameters);
  {
    SavedMark first(x), again(x.view({10, 10})), of_weight(w);
    EXPECT_EQ(grown(MemoryCategory::activations), 400);
    EXPECT_EQ(grown(MemoryCategory::parameters), 40);
    SavedMark moved = std::move(first);
    EXPECT_EQ(grown(MemoryCategory::activations), 400);
  }
  EXPECT_EQ(grown(MemoryCategory::activations), 0);
  EXPECT_EQ(grown(MemoryCategory::workspace), 400);
}

TEST_F(MemoryTrackerTest, SavedMarkKeepsItsStorageAndSurvivesAResize) {
  SavedMark mark;
  {
    at::Tensor x = torch::zeros({100});
    mark = SavedMark(x);
  }
  EXPECT_EQ(grown(MemoryCategory::activations), 400);
  mark = SavedMark();
  EXPECT_EQ(tracker.live(), start);
  at::Tensor y = torch::zeros({100});
  SavedMark on_y(y);
  y.resize_({1000});  // other memory: the mark's block is gone
  on_y = SavedMark();
  y.reset();
  EXPECT_EQ(tracker.live(), start);
}

TEST_F(MemoryTrackerTest, AMarkDoesNotTouchALaterBlockAtTheSameAddress) {
  at::Tensor x = torch::zeros({1000});
  SavedMark first(x);
  for (int i = 0; i < 20; ++i) {
    x.storage().set_data_ptr_noswap(at::DataPtr());
    x.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::getCPUAllocator()->allocate(4000));
    SavedMark second(x);
    first = SavedMark();
    EXPECT_EQ(grown(MemoryCategory::activations), 4000);
    first = std::move(second);
  }
}

TEST_F(MemoryTrackerTest, AUsersRecordFunctionIsNoOperatorName) {
  at::Tensor t;
  const OperatorNaming naming;
  {
    std::string name(100, 'q');
    RECORD_FUNCTION(name, std::vector<c10::IValue>{});
    t = torch::empty({1 << 22}, at::kByte);
  }
  EXPECT_STREQ(tracker.largest(1)[0].operator_name, "aten::empty");
}

TEST_F(MemoryTrackerTest, AnAttributionAtThePeakBelongsToThePeak) {
  at::Tensor x = torch::zeros({1 << 16});
  const SavedMark mark(x);
  EXPECT_EQ(peak_grown(MemoryCategory::activations), 4 << 16);
}

TEST_F(MemoryTrackerTest, HostArenaIsCountedApart) {
  at::Tensor host;
  {
    const ArenaScope scope(Arena::host);
    host = torch::zeros({100});
  }
  EXPECT_EQ(tracker.live(), start);
  EXPECT_EQ(tracker.live(Arena::host).total() - start_host.total(), 400);
}

TEST_F(MemoryTrackerTest, LimitRefusesByOperatorLimitAndLargestTensorsAndTheProgramGoesOn) {
  at::Tensor a = torch::ones({300, 300});
  tracker.attribute(a, MemoryCategory::inputs);
  const auto before = tracker.live();
  {
    const MemoryLimit limit({.device_bytes = before.total() + 100000});
    try {
      at::mm(a, a);
      FAIL() << "not refused";
    } catch (const MemoryLimitError& error) {
      EXPECT_THAT(error.what(), HasSubstr("aten::mm needs 351.6 KiB (360000 bytes)"));
      EXPECT_THAT(error.what(), HasSubstr("device memory limit of"));
      EXPECT_THAT(error.what(), HasSubstr("Largest live tensors: "));
      EXPECT_THAT(error.what(), HasSubstr("351.6 KiB inputs"));
      EXPECT_EQ(error.requested_bytes, 360000);
      EXPECT_EQ(error.limit_bytes, before.total() + 100000);
    }
    EXPECT_EQ(tracker.live(), before);
    EXPECT_NO_THROW(torch::ones({1000}));
    // Exactly up to the limit is allowed; one byte more is not.
    EXPECT_NO_THROW(torch::empty({100000}, at::kByte));
    EXPECT_THROW(torch::empty({100001}, at::kByte), MemoryLimitError);
  }
  EXPECT_NO_THROW(at::mm(a, a));
}

TEST_F(MemoryTrackerTest, LimitIsEnforcedInBackwardAndOnOtherThreads) {
  auto w = torch::ones({256, 256}).requires_grad_();
  auto loss = (w * w).exp().sum();
  {
    const MemoryLimit limit({.device_bytes = tracker.live().total() + 1000});
    EXPECT_THROW(loss.backward(), MemoryLimitError);
    bool refused = false;
    std::thread([&] {
      try {
        torch::empty({4000}, at::kByte);
      } catch (const MemoryLimitError&) {
        refused = true;
      }
    }).join();
    EXPECT_TRUE(refused);
  }
}

TEST_F(MemoryTrackerTest, NestedLimitEndsWithItsScopeAndNamesLiveTensorsMakers) {
  const MemoryLimit outer({.device_bytes = start.total() + (1 << 20)});
  at::Tensor kept = torch::ones({1 << 16}).exp();
  {
    const MemoryLimit inner({.device_bytes = tracker.live().total() + 10});
    try {
      torch::empty({100}, at::kByte);
      FAIL() << "not refused";
    } catch (const MemoryLimitError& error) {
      EXPECT_THAT(error.what(), HasSubstr("256.0 KiB workspace made by aten::"));
    }
  }
  EXPECT_NO_THROW(torch::empty({100}, at::kByte));
  EXPECT_THROW(MemoryLimit({.device_bytes = -1}), UserError);
}

TEST_F(MemoryTrackerTest, HostLimitIsItsOwn) {
  const MemoryLimit limit({.host_bytes = start_host.total() + 1000});
  EXPECT_NO_THROW(torch::empty({4000}, at::kByte));
  const ArenaScope scope(Arena::host);
  EXPECT_THROW(torch::empty({4000}, at::kByte), MemoryLimitError);
}

TEST_F(MemoryTrackerTest, PressureHandlersFreeMemoryBeforeTheLimitRefuses) {
  std::vector<at::Tensor> cache;
  for (int i = 0; i < 8; ++i) cache.push_back(torch::empty({1000}, at::kByte));
  int asked = 0;
  const MemoryLimit limit({.device_bytes = tracker.live().total()});
  {
    const PressureGuard guard([&](std::int64_t needed) {
      ++asked;
      EXPECT_GT(needed, 0);
      if (cache.empty()) return false;
      cache.pop_back();
      return true;
    });
    const at::Tensor t = torch::empty({2500}, at::kByte);
    EXPECT_EQ(cache.size(), 5u);
    EXPECT_EQ(asked, 3);
    EXPECT_THROW(torch::empty({1 << 20}, at::kByte), MemoryLimitError);
    EXPECT_TRUE(cache.empty());
  }
  EXPECT_THROW(torch::empty({1 << 20}, at::kByte), MemoryLimitError);
}

TEST_F(MemoryTrackerTest, TimelineKeepsThePeakWhenItMergesPoints) {
  tracker.start_timeline(16);
  for (int i = 0; i < 500; ++i) torch::empty({i == 250 ? 1 << 20 : 1 << 10}, at::kByte);
  const MemoryTimeline timeline = tracker.stop_timeline();
  ASSERT_GE(timeline.size(), 2u);
  EXPECT_LE(timeline.size(), 32u);
  std::int64_t highest = 0;
  for (std::size_t i = 0; i < timeline.size(); ++i) {
    highest = std::max(highest, timeline[i].live.total());
    if (i > 0) EXPECT_GE(timeline[i].time_s, timeline[i - 1].time_s);
  }
  EXPECT_EQ(highest - start.total(), 1 << 20);
}

TEST_F(MemoryTrackerTest, BlocksAreAlignedResizableAndClonable) {
  auto t = torch::arange(10);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data_ptr()) % 64, 0u);
  t.resize_({100000});
  EXPECT_EQ(t[9].item<std::int64_t>(), 9);
  EXPECT_EQ(grown(MemoryCategory::workspace), 800000);
  EXPECT_EQ(torch::empty({0}).numel(), 0);
}

TEST_F(MemoryTrackerTest, DeviceMemoryReadsTheDeviceArena) {
  at::Tensor t = torch::empty({5000}, at::kByte);
  EXPECT_EQ(device_memory(at::kCPU).live_bytes, start.total() + 5000);
  EXPECT_GE(device_memory(at::kCPU).peak_bytes, start.total() + 5000);
  EXPECT_THROW(device_memory(at::Device(at::kCUDA, 0)), UserError);
}

TEST_F(MemoryTrackerTest, ManyThreadsAllocateAndFreeWithoutLosingAByte) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int k = 0; k < 2000; ++k) torch::empty({1 + k % 77}, at::kByte);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(tracker.live(), start);
}

}  // namespace
}  // namespace gradus::base
