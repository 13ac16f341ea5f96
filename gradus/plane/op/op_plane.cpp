#include <gradus/plane/op/op_plane.h>

#include <iterator>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <gradus/base/error.h>
#include <gradus/plane/op/internal/thread_stack.h>

namespace gradus::plane::op {

namespace {

using Stack = plane::internal::ThreadStack<Handler, Order>;

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr std::string_view kKindName = "GRADUS_OP_PLANE";
const c10::DebugInfoKind kKind(&kKindName);

// The operator whose next arrival is let through to its kernel (see Route::kernel).
thread_local const c10::OperatorHandle* let_through = nullptr;

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

}  // namespace

namespace internal {

struct Entry {
  std::shared_ptr<Stack::Entry> entry;
};

// One operator call and what lies before it. Lives on the stack of the dispatch.
class Route {
 public:
  Route(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>& values,
        const Stack& stack)
      : op(op),
        keys(keys),
        values(values),
        base(values.size() - op.schema().arguments().size()),
        stack_kept(stack.shared_from_this()),
        stack(stack) {}

  void run(std::size_t position) {
    position = stack.next(position);
    if (position == stack.entries.size()) {
      kernel();
      return;
    }
    // The local handle keeps the handler alive should its guard end on another thread meanwhile.
    const std::shared_ptr<Handler> handler = stack.entries[position]->handler;
    const KeyExclusion excluded(true);  // what a handler calls goes straight to its kernel
    Call call(*this, position);
    handler->call(call);
    GRADUS_INTERNAL_CHECK("op_plane", call.made_,
                          "a handler neither made nor replaced the call of ", op.schema().name());
  }

  const c10::OperatorHandle& op;
  const c10::DispatchKeySet keys;
  std::vector<c10::IValue>& values;
  const std::size_t base;  // index in values of the first argument, later of the first result
  const std::shared_ptr<const Stack> stack_kept;  // a guard may end inside the call
  const Stack& stack;
  bool whole = false;
  bool modified = false;

 private:
  void kernel() {
    const KeyExclusion excluded(whole);
    if (!modified) {
      op.redispatchBoxed(after_plane(keys), &values);
      return;
    }
    // Other arguments may want another kernel: dispatch from the start, past the plane.
    if (!whole) let_through = &op;
    op.callBoxed(&values);
  }
};

}  // namespace internal

namespace {

void include_key(bool included) {
  if (c10::impl::tls_is_dispatch_key_included(kKey) != included) {
    c10::impl::tls_set_dispatch_key_included(kKey, included);
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              std::vector<c10::IValue>* values) {
  const c10::OperatorHandle* const passing = std::exchange(let_through, nullptr);
  const Stack* const stack = Stack::current(kKind);
  if (stack == nullptr || (passing != nullptr && *passing == op)) {
    op.redispatchBoxed(after_plane(keys), values);
    return;
  }
  if (!stack->any_active()) {
    // A guard that ended inside a backward pass left this thread's earlier state to be put back.
    Stack::drop_silent(kKind);
    include_key(active());
    op.redispatchBoxed(after_plane(keys), values);
    return;
  }
  internal::Route(op, keys, *values, *stack).run(0);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

const c10::FunctionSchema& Call::schema() const { return route_->op.schema(); }

const c10::OperatorHandle& Call::op() const { return route_->op; }

std::string_view Call::name() const { return schema().name(); }

Frame Call::frame() const {
  static const c10::DispatchKeySet autocast = c10::autocast_dispatch_keyset;
  if (after_plane(route_->keys).has_any(autocast)) return Frame::autocast;
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality)) {
    return Frame::below_autograd;
  }
  // The dispatcher prefers an implicit composite to an Autograd kernel (matmul has both, the latter
  // for nested tensors) unless the backend has a kernel of its own.
  if (route_->op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    const auto component = route_->keys.highestBackendKey();
    const auto backend = c10::toRuntimePerBackendFunctionalityKey(
        c10::DispatchKey::Dense,
        component == c10::BackendComponent::InvalidBit ? c10::BackendComponent::CPUBit : component);
    if (!route_->op.hasKernelForDispatchKey(backend) &&
        !route_->op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      return Frame::composite;
    }
  }
  return Frame::autograd;
}

c10::ArrayRef<c10::IValue> Call::arguments() const {
  if (made_) return {};
  return c10::ArrayRef<c10::IValue>(route_->values.data() + route_->base,
                                    route_->values.size() - route_->base);
}

void Call::set_argument(std::size_t index, c10::IValue value) {
  GRADUS_INTERNAL_CHECK("op_plane", !made_ && index < arguments().size(), "argument ", index,
                        " of ", name(), made_ ? " set after the call was made" : " does not exist");
  route_->values[route_->base + index] = std::move(value);
  route_->modified = true;
}

c10::ArrayRef<c10::IValue> Call::results() const {
  if (!made_) return {};
  return c10::ArrayRef<c10::IValue>(route_->values.data() + route_->base,
                                    route_->values.size() - route_->base);
}

void Call::set_result(std::size_t index, c10::IValue value) {
  GRADUS_INTERNAL_CHECK("op_plane", made_ && index < results().size(), "result ", index, " of ",
                        name(), made_ ? " does not exist" : " set before the call was made");
  route_->values[route_->base + index] = std::move(value);
}

void Call::make(bool whole, std::size_t next) {
  GRADUS_INTERNAL_CHECK("op_plane", !made_, "a handler made the call of ", name(), " twice");
  route_->whole = route_->whole || whole;
  route_->run(next);
  made_ = true;
}

void Call::proceed() { make(false, position_ + 1); }

void Call::proceed_whole() { make(true, position_ + 1); }

void Call::proceed_past_order() {
  const auto& entries = route_->stack.entries;
  std::size_t next = position_ + 1;
  while (next < entries.size() && entries[next]->order == entries[position_]->order) ++next;
  make(false, next);
}

void Call::replace(std::vector<c10::IValue> results) {
  GRADUS_INTERNAL_CHECK("op_plane", !made_, "a handler replaced the call of ", name(),
                        " after making it");
  GRADUS_INTERNAL_CHECK("op_plane", results.size() == schema().returns().size(), name(),
                        " returns ", schema().returns().size(), " values; got ", results.size());
  route_->values.resize(route_->base);
  std::move(results.begin(), results.end(), std::back_inserter(route_->values));
  made_ = true;
}

Call::InnerOperators::InnerOperators(const Call& call) {
  if (call.route_->stack.next(call.position_ + 1) == call.route_->stack.entries.size()) return;
  was_excluded_ = c10::impl::tls_is_dispatch_key_excluded(kKey);
  auto inner = std::make_shared<Stack>();
  const auto& entries = call.route_->stack.entries;
  inner->entries.assign(entries.begin() + static_cast<std::ptrdiff_t>(call.position_) + 1,
                        entries.end());
  c10::ThreadLocalDebugInfo::_push(kKind, std::move(inner));
  c10::impl::tls_set_dispatch_key_excluded(kKey, false);
  pushed_ = true;
}

Call::InnerOperators::~InnerOperators() {
  if (!pushed_) return;
  c10::impl::tls_set_dispatch_key_excluded(kKey, was_excluded_);
  c10::ThreadLocalDebugInfo::_pop(kKind);
}

Guard push(Order order, std::shared_ptr<Handler> handler) {
  GRADUS_CHECK("op_plane", handler != nullptr, "a handler is required; got null");
  auto entry = std::make_shared<internal::Entry>();
  entry->entry = Stack::push(kKind, order, std::move(handler));
  include_key(true);
  return Guard(std::move(entry));
}

void call_kernel(const c10::OperatorHandle& op, std::vector<c10::IValue>& values) {
  const KeyExclusion excluded(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(&values);
}

std::shared_ptr<Handler> newest(Order order) {
  const Stack* const stack = Stack::current(kKind);
  if (stack == nullptr) return nullptr;
  for (const auto& entry : stack->entries) {
    if (entry->order == order && entry->active) return entry->handler;
  }
  return nullptr;
}

bool active() {
  const Stack* const stack = Stack::current(kKind);
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
  const std::shared_ptr<internal::Entry> entry = std::move(entry_);
  if (entry == nullptr) return;
  if (Stack::end(kKind, *entry->entry)) include_key(active());
}

}  // namespace gradus::plane::op
