#include <gradus/plane/op/op_plane.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <gradus/base/error.h>

namespace gradus::plane::op {

namespace internal {

struct Entry {
  Order order;
  std::shared_ptr<Handler> handler;
  std::thread::id owner = std::this_thread::get_id();
  std::atomic<bool> active{true};
};

// A thread's handlers, outermost first. Immutable: every push makes a new one, so that a backward pass on
// another thread keeps the one it started with. Kept as DebugInfo because LibTorch carries that, unlike
// thread_local variables, to the engine's pool threads (re-entrant backward deeper than 60).
struct Stack final : c10::DebugInfoBase {
  std::vector<std::shared_ptr<Entry>> entries;
  std::shared_ptr<Entry> own;  // the entry whose push made this stack; null for a handler's inner stack

  bool any_active() const {
    return std::any_of(entries.begin(), entries.end(), [](const auto& e) { return e->active.load(); });
  }

  // Position of the first active handler from `position` on, or entries.size().
  std::size_t next(std::size_t position) const {
    while (position < entries.size() && !entries[position]->active.load(std::memory_order_relaxed)) ++position;
    return position;
  }

  static void run(const c10::OperatorHandle& op, const c10::DispatchKeySet& keys, std::vector<c10::IValue>& values,
                  const Stack& stack, std::size_t position, bool whole, bool modified);
  static void kernel(const c10::OperatorHandle& op, const c10::DispatchKeySet& keys,
                     std::vector<c10::IValue>& values, bool whole, bool modified);
};

}  // namespace internal

namespace {

using internal::Entry;
using internal::Stack;

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr std::string_view kKindName = "GRADUS_OP_PLANE";
const c10::DebugInfoKind kKind(&kKindName);

// The operator whose next arrival is let through to its kernel (see Stack::kernel).
thread_local const c10::OperatorHandle* let_through = nullptr;

Stack* current() { return static_cast<Stack*>(c10::ThreadLocalDebugInfo::get(kKind)); }

class KeyExclusion {
 public:
  explicit KeyExclusion(bool excluded) : previous_(c10::impl::tls_is_dispatch_key_excluded(kKey)) {
    if (previous_ != excluded) c10::impl::tls_set_dispatch_key_excluded(kKey, excluded);
  }
  ~KeyExclusion() {
    if (c10::impl::tls_is_dispatch_key_excluded(kKey) != previous_) {
      c10::impl::tls_set_dispatch_key_excluded(kKey, previous_);
    }
  }
  KeyExclusion(const KeyExclusion&) = delete;
  KeyExclusion& operator=(const KeyExclusion&) = delete;

 private:
  bool previous_;
};

c10::DispatchKeySet after_plane(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* values) {
  const c10::OperatorHandle* const passing = std::exchange(let_through, nullptr);
  const Stack* const stack = current();
  if (stack == nullptr || (passing != nullptr && *passing == op)) {
    op.redispatchBoxed(after_plane(keys), values);
    return;
  }
  Stack::run(op, keys, *values, *stack, 0, /*whole=*/false, /*modified=*/false);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void include_key(bool included) {
  if (c10::impl::tls_is_dispatch_key_included(kKey) != included) {
    c10::impl::tls_set_dispatch_key_included(kKey, included);
  }
}

}  // namespace

void Stack::run(const c10::OperatorHandle& op, const c10::DispatchKeySet& keys, std::vector<c10::IValue>& values,
                const Stack& stack, std::size_t position, bool whole, bool modified) {
  position = stack.next(position);
  if (position == stack.entries.size()) {
    kernel(op, keys, values, whole, modified);
    return;
  }
  // The local handle keeps the handler alive should its guard end on another thread meanwhile.
  const std::shared_ptr<Handler> handler = stack.entries[position]->handler;
  const KeyExclusion excluded(true);  // what a handler calls goes straight to its kernel
  Call call(op, keys, values, values.size() - op.schema().arguments().size(), stack, position, whole, modified);
  handler->call(call);
  GRADUS_INTERNAL_CHECK("op_plane", call.made_, "a handler neither made nor replaced the call of ",
                        op.schema().name());
}

void Stack::kernel(const c10::OperatorHandle& op, const c10::DispatchKeySet& keys,
                   std::vector<c10::IValue>& values, bool whole, bool modified) {
  const KeyExclusion excluded(whole);
  if (!modified) {
    op.redispatchBoxed(after_plane(keys), &values);
    return;
  }
  // Other arguments may want another kernel: dispatch from the start, past the plane.
  if (!whole) let_through = &op;
  op.callBoxed(&values);
}

const c10::FunctionSchema& Call::schema() const { return op_->schema(); }

std::string_view Call::name() const { return op_->schema().name(); }

Frame Call::frame() const {
  static const c10::DispatchKeySet autocast = c10::autocast_dispatch_keyset;
  if (after_plane(*keys_).has_any(autocast)) return Frame::autocast;
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality)) {
    return Frame::below_autograd;
  }
  // The dispatcher prefers an implicit composite to an Autograd kernel (matmul has both, the latter for
  // nested tensors) unless the backend has a kernel of its own.
  if (op_->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    const auto component = keys_->highestBackendKey();
    const auto backend = c10::toRuntimePerBackendFunctionalityKey(
        c10::DispatchKey::Dense,
        component == c10::BackendComponent::InvalidBit ? c10::BackendComponent::CPUBit : component);
    if (!op_->hasKernelForDispatchKey(backend) &&
        !op_->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      return Frame::composite;
    }
  }
  return Frame::autograd;
}

c10::ArrayRef<c10::IValue> Call::arguments() const {
  if (made_) return {};
  return c10::ArrayRef<c10::IValue>(values_->data() + base_, values_->size() - base_);
}

void Call::set_argument(std::size_t index, c10::IValue value) {
  GRADUS_INTERNAL_CHECK("op_plane", !made_ && index < arguments().size(), "argument ", index, " of ", name(),
                        made_ ? " set after the call was made" : " does not exist");
  (*values_)[base_ + index] = std::move(value);
  modified_ = true;
}

c10::ArrayRef<c10::IValue> Call::results() const {
  if (!made_) return {};
  return c10::ArrayRef<c10::IValue>(values_->data() + base_, values_->size() - base_);
}

void Call::set_result(std::size_t index, c10::IValue value) {
  GRADUS_INTERNAL_CHECK("op_plane", made_ && index < results().size(), "result ", index, " of ", name(),
                        made_ ? " does not exist" : " set before the call was made");
  (*values_)[base_ + index] = std::move(value);
}

void Call::make(bool whole) {
  GRADUS_INTERNAL_CHECK("op_plane", !made_, "a handler made the call of ", name(), " twice");
  Stack::run(*op_, *keys_, *values_, *stack_, position_ + 1, whole_ || whole, modified_);
  made_ = true;
}

void Call::proceed() { make(false); }

void Call::proceed_whole() { make(true); }

void Call::replace(std::vector<c10::IValue> results) {
  GRADUS_INTERNAL_CHECK("op_plane", !made_, "a handler replaced the call of ", name(), " after making it");
  GRADUS_INTERNAL_CHECK("op_plane", results.size() == schema().returns().size(), name(), " returns ",
                        schema().returns().size(), " values; got ", results.size());
  values_->resize(base_);
  std::move(results.begin(), results.end(), std::back_inserter(*values_));
  made_ = true;
}

Call::InnerOperators::InnerOperators(const Call& call)
    : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kKey)) {
  auto inner = std::make_shared<Stack>();
  inner->entries.assign(call.stack_->entries.begin() + static_cast<std::ptrdiff_t>(call.position_) + 1,
                        call.stack_->entries.end());
  c10::ThreadLocalDebugInfo::_push(kKind, std::move(inner));
  c10::impl::tls_set_dispatch_key_excluded(kKey, false);
}

Call::InnerOperators::~InnerOperators() {
  c10::impl::tls_set_dispatch_key_excluded(kKey, was_excluded_);
  c10::ThreadLocalDebugInfo::_pop(kKind);
}

Guard push(Order order, std::shared_ptr<Handler> handler) {
  GRADUS_CHECK("op_plane", handler != nullptr, "a handler is required; got null");
  auto entry = std::make_shared<Entry>();
  entry->order = order;
  entry->handler = std::move(handler);
  auto next = std::make_shared<Stack>();
  if (const Stack* const stack = current()) next->entries = stack->entries;
  const auto place = std::find_if(next->entries.begin(), next->entries.end(),
                                  [&](const auto& other) { return other->order >= order; });
  next->entries.insert(place, entry);
  next->own = entry;
  c10::ThreadLocalDebugInfo::_push(kKind, std::move(next));
  include_key(true);
  return Guard(std::move(entry));
}

bool active() {
  const Stack* const stack = current();
  return stack != nullptr && stack->any_active();
}

Guard::~Guard() { end(); }

Guard& Guard::operator=(Guard&& other) noexcept {
  if (this != &other) {
    end();
    entry_ = std::move(other.entry_);
  }
  return *this;
}

void Guard::end() noexcept {
  const std::shared_ptr<Entry> entry = std::move(entry_);
  if (entry == nullptr) return;
  entry->active = false;
  // On another thread the handler is silent from now on, and its owner drops the entry at its next end().
  if (entry->owner != std::this_thread::get_id()) return;
  for (const Stack* top = current(); top != nullptr && top->own != nullptr && !top->own->active; top = current()) {
    try {
      c10::ThreadLocalDebugInfo::_pop(kKind);
    } catch (const std::exception&) {
      break;  // another kind of DebugInfo lies on top; inactive entries cost a look each until it ends
    }
  }
  include_key(active());
}

}  // namespace gradus::plane::op
