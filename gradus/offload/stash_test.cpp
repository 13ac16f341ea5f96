#include <gradus/offload/stash.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/offload/file_io.h>

namespace gradus::offload {
namespace {

std::string temporary_directory() {
  const auto path = std::filesystem::temp_directory_path() / "gradus_stash_test";
  std::filesystem::create_directories(path);
  return path.string();
}

OffloadOptions disk(const std::string& directory = temporary_directory()) {
  OffloadOptions options;
  options.target = Target::disk;
  options.disk.directory = directory;
  return options;
}

bool same_bytes(const c10::Storage& a, const c10::Storage& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.data(), b.data(), a.nbytes()) == 0;
}

// Refuses every transfer, as a full disk does.
class FullDisk final : public FileIo {
 public:
  void start(Transfer transfer) override { transfer.done(ENOSPC); }
  std::string_view name() const override { return "full"; }
};

TEST(StorageStoreTest, GivesBackTheBytesFromHostAndDisk) {
  for (const OffloadOptions& options : {OffloadOptions(), disk()}) {
    StorageStore store(options);
    const at::Tensor tensor = torch::randn({1000, 37});
    auto handle = store.put(tensor.storage());
    ASSERT_NE(handle, nullptr) << store.last_error();
    EXPECT_EQ(store.stored_bytes(), 148'000);
    const c10::Storage back = store.get(handle);
    EXPECT_TRUE(same_bytes(back, tensor.storage()));
    EXPECT_NE(back.data(), tensor.storage().data());
    handle.reset();
    EXPECT_EQ(store.stored_bytes(), 0);
  }
}

TEST(StorageStoreTest, HandlesOutliveTheStore) {
  const at::Tensor tensor = torch::randn({1 << 14});
  std::shared_ptr<void> handle;
  StorageStore other;
  {
    StorageStore store(disk());
    handle = store.put(tensor.storage());
  }
  handle.reset();
}

TEST(StorageStoreTest, TakesNoDeviceMemory) {
  auto& tracker = base::MemoryTracker::install();
  const at::Tensor tensor = torch::randn({1 << 18});
  StorageStore store;
  tracker.reset_peak();
  const auto before = tracker.live().total();
  const auto handle = store.put(tensor.storage());
  ASSERT_NE(handle, nullptr);
  EXPECT_EQ(tracker.peak().total(), before);
  EXPECT_GE(tracker.live(base::Arena::host).total(), 1 << 20);
}

TEST(StorageStoreTest, SaysWhyItHasNoRoom) {
  OffloadOptions options = disk();
  options.disk.io = std::make_shared<FullDisk>();
  StorageStore store(options);
  EXPECT_EQ(store.put(torch::randn({1000}).storage()), nullptr);
  EXPECT_NE(store.last_error().find("No space left"), std::string::npos) << store.last_error();
  EXPECT_EQ(store.stored_bytes(), 0);
}

TEST(StorageStoreTest, RefusesADirectoryThatIsNotThere) {
  EXPECT_THROW(StorageStore(disk("/nowhere/at/all")), UserError);
}

}  // namespace
}  // namespace gradus::offload
