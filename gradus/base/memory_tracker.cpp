#include <gradus/base/memory_tracker.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/host_heap.h>

namespace gradus::base {
namespace {

constexpr std::size_t kHeaderBytes = 64;  // also the alignment of the data behind it
constexpr std::size_t kArenas = 2;

struct Block {
  Block* previous = nullptr;
  Block* next = nullptr;
  std::int64_t bytes = 0;
  const char* operator_name = nullptr;
  std::uint64_t number = 0;  ///< Of the allocation: an address is used again, a number is not.
  std::int32_t saved_marks = 0;
  Arena arena = Arena::device;
  MemoryCategory category = MemoryCategory::workspace;

  MemoryCategory counted_as() const {
    return saved_marks > 0 && category == MemoryCategory::workspace ? MemoryCategory::activations
                                                                    : category;
  }
};
static_assert(sizeof(Block) <= kHeaderBytes);

struct ArenaState {
  MemoryBreakdown live;
  std::int64_t live_total = 0;
  MemoryBreakdown peak;
  std::int64_t peak_total = 0;
  std::int64_t lap_peak = 0;
  std::int64_t limit = 0;
  Block* head = nullptr;
};

struct State {
  std::mutex mutex;
  Clock clock;
  std::array<ArenaState, kArenas> arenas;
  std::uint64_t allocations = 0;
  bool lap_levels_on = false;
  std::vector<std::int64_t> lap_levels;
  bool timeline_on = false;
  std::size_t timeline_max = 0;
  MemoryTimeline timeline;
  std::vector<std::shared_ptr<PressureHandler>> pressure;  // the newest last
  int naming = 0;
  at::CallbackHandle naming_handle = 0;

  ArenaState& of(Arena arena) { return arenas[static_cast<std::size_t>(arena)]; }
};

// Never destroyed: tensors with static storage duration are freed after main.
State& state() {
  static State* const instance = new State;
  return *instance;
}

thread_local MemoryCategory thread_category = MemoryCategory::workspace;
thread_local Arena thread_arena = Arena::device;
thread_local const char* thread_operator = nullptr;
thread_local bool relieving = false;  // inside a pressure handler

// All functions below this line want state().mutex held.

void changed(State& s, Arena arena) {
  ArenaState& a = s.of(arena);
  // A retag at the peak's own moment belongs to the peak, hence >=.
  if (a.live_total >= a.peak_total) {
    a.peak_total = a.live_total;
    a.peak = a.live;
  }
  if (a.live_total > a.lap_peak) {
    a.lap_peak = a.live_total;
    if (s.lap_levels_on && arena == Arena::device) s.lap_levels.push_back(a.live_total);
  }
  if (!s.timeline_on || arena != Arena::device) return;
  s.timeline.push_back({s.clock(), a.live});
  if (s.timeline.size() < 2 * s.timeline_max) return;
  std::size_t kept = 0;
  for (std::size_t i = 0; i + 1 < s.timeline.size(); i += 2) {
    const bool first = s.timeline[i].live.total() > s.timeline[i + 1].live.total();
    s.timeline[kept++] = s.timeline[first ? i : i + 1];
  }
  s.timeline.resize(kept);
}

void link(State& s, Block& block) {
  ArenaState& a = s.of(block.arena);
  block.previous = nullptr;
  block.next = a.head;
  if (a.head != nullptr) a.head->previous = &block;
  a.head = &block;
  a.live[block.counted_as()] += block.bytes;
  a.live_total += block.bytes;
  changed(s, block.arena);
}

void unlink(State& s, Block& block) {
  ArenaState& a = s.of(block.arena);
  (block.previous != nullptr ? block.previous->next : a.head) = block.next;
  if (block.next != nullptr) block.next->previous = block.previous;
  a.live[block.counted_as()] -= block.bytes;
  a.live_total -= block.bytes;
  changed(s, block.arena);
}

template <typename Change>
void recount(State& s, Block& block, Change change) {
  ArenaState& a = s.of(block.arena);
  const MemoryCategory before = block.counted_as();
  change(block);
  const MemoryCategory after = block.counted_as();
  if (before == after) return;
  a.live[before] -= block.bytes;
  a.live[after] += block.bytes;
  changed(s, block.arena);
}

std::vector<LiveBlock> largest_blocks(State& s, std::size_t count, Arena arena) {
  std::vector<LiveBlock> blocks;
  for (const Block* b = s.of(arena).head; b != nullptr; b = b->next) {
    blocks.push_back({b->bytes, b->counted_as(), b->operator_name});
  }
  count = std::min(count, blocks.size());
  std::partial_sort(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(count),
                    blocks.end(),
                    [](const LiveBlock& l, const LiveBlock& r) { return l.bytes > r.bytes; });
  blocks.resize(count);
  return blocks;
}

[[noreturn]] void refuse(State& s, Arena arena, std::int64_t bytes) {
  const ArenaState& a = s.of(arena);
  std::ostringstream text;
  text << "[memory] " << (arena == Arena::device ? "device" : "host") << " memory limit of "
       << format_bytes(a.limit) << " (" << a.limit << " bytes) reached: "
       << (thread_operator != nullptr ? thread_operator : "an allocation outside any operator")
       << " needs " << format_bytes(bytes) << " (" << bytes << " bytes) while "
       << format_bytes(a.live_total) << " are live. By kind: ";
  const char* separator = "";
  for (std::size_t i = 0; i < kMemoryCategoryCount; ++i) {
    if (a.live.bytes[i] == 0) continue;
    text << separator << kMemoryCategoryNames[i] << ' ' << format_bytes(a.live.bytes[i]);
    separator = ", ";
  }
  text << ". Largest live tensors: ";
  separator = "";
  for (const LiveBlock& block : largest_blocks(s, 5, arena)) {
    text << separator << format_bytes(block.bytes) << ' '
         << kMemoryCategoryNames[static_cast<std::size_t>(block.category)];
    if (block.operator_name != nullptr) text << " made by " << block.operator_name;
    separator = "; ";
  }
  text << ". Raise the limit, use smaller micro-batches, or recompute activations.";
  throw MemoryLimitError(text.str(), bytes, a.live_total, a.limit);
}

Block* block_of(void* data) {
  return reinterpret_cast<Block*>(static_cast<char*>(data) - kHeaderBytes);
}

void release_block(void* data) {
  if (data == nullptr) return;
  Block* const block = block_of(data);
  const std::int64_t bytes = block->bytes;
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    unlink(s, *block);
  }
  block->~Block();
  std::free(block);
  if (c10::memoryProfilingEnabled()) {
    c10::reportMemoryUsageToProfiler(data, -bytes, 0, 0, c10::Device(c10::kCPU));
  }
}

// The deleter identifies our storages: c10 swaps it when a storage's memory is replaced.
Block* block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &release_block || data.get_context() == nullptr) return nullptr;
  return block_of(data.get_context());
}

class TrackingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t count) override {
    const c10::Device cpu(c10::kCPU);
    if (count == 0) return {nullptr, nullptr, &release_block, cpu};
    const auto bytes = static_cast<std::int64_t>(count);
    State& s = state();
    const Arena arena = thread_arena;
    // Checked before the memory is taken; two threads racing here may pass together, so link() is
    // preceded by the same check again.
    make_room(s, arena, bytes);
    void* memory = nullptr;
    if (count > SIZE_MAX - kHeaderBytes ||
        ::posix_memalign(&memory, kHeaderBytes, count + kHeaderBytes) != 0) {
      throw MemoryLimitError(
          join("[memory] the operating system refused ", format_bytes(bytes), " to ",
               thread_operator != nullptr ? thread_operator : "an allocation outside any operator"),
          bytes, s.of(arena).live_total, 0);
    }
    auto* const block = new (memory) Block;
    block->bytes = bytes;
    block->arena = arena;
    block->category = thread_category;
    block->operator_name = thread_operator;
    {
      const std::lock_guard lock(s.mutex);
      try {
        check_limit(s, arena, bytes);
      } catch (...) {
        std::free(memory);
        throw;
      }
      block->number = ++s.allocations;
      link(s, *block);
    }
    void* const data = static_cast<char*>(memory) + kHeaderBytes;
    if (c10::memoryProfilingEnabled()) {
      c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, cpu);
    }
    return {data, data, &release_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static std::int64_t excess(State& s, Arena arena, std::int64_t bytes) {
    const ArenaState& a = s.of(arena);
    return a.limit > 0 ? bytes - (a.limit - a.live_total) : 0;
  }
  static void check_limit(State& s, Arena arena, std::int64_t bytes) {
    if (excess(s, arena, bytes) > 0) refuse(s, arena, bytes);
  }

  // Asks the pressure handlers, newest first, until the allocation fits or none of them frees
  // anything.
  static void make_room(State& s, Arena arena, std::int64_t bytes) {
    std::unique_lock lock(s.mutex);
    while (excess(s, arena, bytes) > 0) {
      if (arena != Arena::device || relieving || s.pressure.empty()) refuse(s, arena, bytes);
      const std::int64_t needed = excess(s, arena, bytes);
      const auto handlers = s.pressure;
      lock.unlock();
      bool freed = false;
      {
        relieving = true;
        struct Done {
          ~Done() { relieving = false; }
        } const done;
        for (auto handler = handlers.rbegin(); handler != handlers.rend() && !freed; ++handler) {
          freed = (**handler)(needed);
        }
      }
      lock.lock();
      if (!freed) check_limit(s, arena, bytes);
    }
  }
};

// RecordFunction is LibTorch's public operator observer; unlike the op plane it needs no boxing,
// and it sees every thread.
struct NameContext final : at::ObserverContext {
  const char* outer = nullptr;
};

std::unique_ptr<at::ObserverContext> enter_operator(const at::RecordFunction& call) {
  auto context = std::make_unique<NameContext>();
  context->outer = thread_operator;
  // Only an operator's name is static; a user's RECORD_FUNCTION may name a string of its own.
  if (call.operator_name().has_value()) thread_operator = call.name();
  return context;
}

void leave_operator(const at::RecordFunction&, at::ObserverContext* context) {
  thread_operator = static_cast<NameContext*>(context)->outer;
}

MemoryTracker* tracker = nullptr;

}  // namespace

MemoryTracker::MemoryTracker(MemoryTrackerOptions options) {
  keep_freed_memory();
  state().clock = std::move(options.clock);
  static TrackingAllocator* const allocator = new TrackingAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/100);
}

MemoryTracker& MemoryTracker::install(MemoryTrackerOptions options) {
  static MemoryTracker* const instance = [&] {
    tracker = new MemoryTracker(std::move(options));
    return tracker;
  }();
  return *instance;
}

MemoryTracker* MemoryTracker::installed() { return tracker; }

MemoryBreakdown MemoryTracker::live(Arena arena) const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.of(arena).live;
}

MemoryBreakdown MemoryTracker::peak(Arena arena) const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.of(arena).peak;
}

std::int64_t MemoryTracker::lap_peak() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ArenaState& a = s.of(Arena::device);
  s.lap_levels_on = false;
  s.lap_levels.clear();
  return std::exchange(a.lap_peak, a.live_total);
}

std::vector<std::int64_t> MemoryTracker::lap_levels() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ArenaState& a = s.of(Arena::device);
  std::vector<std::int64_t> levels = std::exchange(s.lap_levels, {});
  if (levels.empty()) levels.push_back(a.lap_peak);
  s.lap_levels_on = true;
  a.lap_peak = a.live_total;
  return levels;
}

void MemoryTracker::reset_peak(Arena arena) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ArenaState& a = s.of(arena);
  a.peak = a.live;
  a.peak_total = a.live_total;
}

bool MemoryTracker::attribute(const at::Tensor& tensor, MemoryCategory category) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  Block* const block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return false;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  recount(s, *block, [&](Block& b) { b.category = category; });
  return true;
}

std::vector<LiveBlock> MemoryTracker::largest(std::size_t count, Arena arena) const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return largest_blocks(s, count, arena);
}

void MemoryTracker::start_timeline(std::size_t max_points) {
  GRADUS_CHECK("memory", max_points >= 2, "a timeline needs at least 2 points; got ", max_points);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.timeline_on = true;
  s.timeline_max = max_points;
  s.timeline.clear();
  s.timeline.push_back({s.clock(), s.of(Arena::device).live});
}

MemoryTimeline MemoryTracker::stop_timeline() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.timeline_on = false;
  return std::exchange(s.timeline, {});
}

MemoryCategoryScope::MemoryCategoryScope(MemoryCategory category)
    : previous_(std::exchange(thread_category, category)) {}
MemoryCategoryScope::~MemoryCategoryScope() { thread_category = previous_; }

ArenaScope::ArenaScope(Arena arena) : previous_(std::exchange(thread_arena, arena)) {}
ArenaScope::~ArenaScope() { thread_arena = previous_; }

SavedMark::SavedMark(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  Block* const block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return;
  storage_ = tensor.storage();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  number_ = block->number;
  recount(s, *block, [](Block& b) { ++b.saved_marks; });
}

SavedMark::SavedMark(SavedMark&& other) noexcept
    : storage_(std::move(other.storage_)), number_(std::exchange(other.number_, 0)) {}

SavedMark& SavedMark::operator=(SavedMark&& other) noexcept {
  if (this != &other) {
    release();
    storage_ = std::move(other.storage_);
    number_ = std::exchange(other.number_, 0);
  }
  return *this;
}

SavedMark::~SavedMark() { release(); }

void SavedMark::release() {
  // A storage may have been given other memory since (resize_); that block was freed with its
  // marks.
  if (number_ != 0) {
    Block* const block = block_of(storage_.data_ptr());
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (block != nullptr && block->number == number_)
      recount(s, *block, [](Block& b) { --b.saved_marks; });
  }
  number_ = 0;
  storage_ = c10::Storage();
}

MemoryLimit::MemoryLimit(MemoryLimitOptions options) {
  GRADUS_CHECK("memory", options.device_bytes >= 0 && options.host_bytes >= 0,
               "a memory limit must be >= 0 bytes (0 is none); got device ", options.device_bytes,
               ", host ", options.host_bytes);
  MemoryTracker::install();
  State& s = state();
  const std::lock_guard lock(s.mutex);
  previous_.device_bytes = std::exchange(s.of(Arena::device).limit, options.device_bytes);
  previous_.host_bytes = std::exchange(s.of(Arena::host).limit, options.host_bytes);
}

MemoryLimit::~MemoryLimit() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.of(Arena::device).limit = previous_.device_bytes;
  s.of(Arena::host).limit = previous_.host_bytes;
}

OperatorNaming::OperatorNaming() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.naming++ > 0) return;
  s.naming_handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&enter_operator, &leave_operator)
                                .scopes({at::RecordScope::FUNCTION}));
}

OperatorNaming::~OperatorNaming() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (--s.naming == 0) at::removeCallback(s.naming_handle);
}

PressureGuard::PressureGuard(PressureHandler handler)
    : handler_(std::make_shared<PressureHandler>(std::move(handler))) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.pressure.push_back(handler_);
}

PressureGuard::~PressureGuard() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  std::erase(s.pressure, handler_);
}

DeviceMemory device_memory(c10::Device device) {
  if (device.is_cpu()) {
    GRADUS_CHECK("memory", MemoryTracker::installed() != nullptr,
                 "CPU memory is counted only after MemoryTracker::install(); call it first");
    const MemoryTracker& counted = *MemoryTracker::installed();
    return {counted.live().total(), counted.peak().total()};
  }
  GRADUS_CHECK("memory", at::getAccelerator() == device.type(),
               "memory statistics exist for the CPU and for "
               "this build's accelerator; got device ",
               device.str());
  const auto statistics = at::accelerator::getDeviceStats(device.index());
  const auto& bytes =
      statistics
          .allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {bytes.current, bytes.peak};
}

}  // namespace gradus::base
