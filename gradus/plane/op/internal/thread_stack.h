#pragma once

// The stack of handlers that each thread has, for planes only (needs LibTorch's DebugInfo).

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/ThreadLocalDebugInfo.h>

namespace gradus::plane::internal {

/// One pushed handler.
template <typename Handler, typename Order>
struct StackEntry {
  Order order;
  std::shared_ptr<Handler> handler;
  std::thread::id owner = std::this_thread::get_id();
  std::atomic<bool> active{true};
};

/// A thread's handlers, the lowest order first and, within one order, the newest first. Immutable:
/// every push makes a new one, so that a backward pass on another thread keeps the one it started
/// with. Kept as DebugInfo because LibTorch carries that, unlike thread_local variables, to the
/// engine's pool threads (re-entrant backward deeper than 60).
template <typename Handler, typename Order>
struct ThreadStack final : c10::DebugInfoBase,
                           std::enable_shared_from_this<ThreadStack<Handler, Order>> {
  using Entry = StackEntry<Handler, Order>;

  std::vector<std::shared_ptr<Entry>> entries;
  std::shared_ptr<Entry> own;  ///< The entry whose push made this stack; null for an inner stack.

  static ThreadStack* current(c10::DebugInfoKind kind) {
    return static_cast<ThreadStack*>(c10::ThreadLocalDebugInfo::get(kind));
  }

  bool any_active() const {
    return std::any_of(entries.begin(), entries.end(),
                       [](const auto& entry) { return entry->active.load(); });
  }

  /// Position of the first active handler from @p position on, or entries.size().
  std::size_t next(std::size_t position) const {
    while (position < entries.size() && !entries[position]->active.load(std::memory_order_relaxed))
      ++position;
    return position;
  }

  static std::shared_ptr<Entry> push(c10::DebugInfoKind kind, Order order,
                                     std::shared_ptr<Handler> handler) {
    auto entry = std::make_shared<Entry>();
    entry->order = order;
    entry->handler = std::move(handler);
    auto next = std::make_shared<ThreadStack>();
    if (const ThreadStack* const stack = current(kind)) next->entries = stack->entries;
    const auto place = std::find_if(next->entries.begin(), next->entries.end(),
                                    [&](const auto& other) { return other->order >= order; });
    next->entries.insert(place, entry);
    next->own = entry;
    c10::ThreadLocalDebugInfo::_push(kind, std::move(next));
    return entry;
  }

  /// Silences @p entry and drops what is silent from the top of this thread's stack. On another
  /// thread than the owner's the entry is only silenced; the owner drops it at its next end().
  /// Returns false there.
  static bool end(c10::DebugInfoKind kind, Entry& entry) noexcept {
    entry.active = false;
    if (entry.owner != std::this_thread::get_id()) return false;
    drop_silent(kind);
    return true;
  }

  /// Drops silent entries from the top of this thread's stack.
  static void drop_silent(c10::DebugInfoKind kind) noexcept {
    for (const ThreadStack* top = current(kind);
         top != nullptr && top->own != nullptr && !top->own->active; top = current(kind)) {
      try {
        c10::ThreadLocalDebugInfo::_pop(kind);
      } catch (const std::exception&) {
        break;  // another kind of DebugInfo lies on top; a silent entry costs a look at each call
                // until it ends
      }
    }
  }
};

}  // namespace gradus::plane::internal
