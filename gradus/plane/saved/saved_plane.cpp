#include <gradus/plane/saved/saved_plane.h>

#include <algorithm>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plane/op/internal/thread_stack.h>

namespace gradus::plane::saved {
namespace {

using Stack = plane::internal::ThreadStack<Hooks, Order>;

constexpr std::string_view kKindName = "GRADUS_SAVED_PLANE";
const c10::DebugInfoKind kKind(&kKindName);

// Slots of this thread that wait for the operator that saved them to return. thread_local is right
// here: an operator returns on the thread it was called on.
thread_local std::vector<internal::Slot*> pending;
thread_local int operator_depth = 0;
thread_local std::string_view operator_name;

// A saved value after the hooks: either the tensor itself, or parts from which `restore` makes it.
struct Kept {
  at::Tensor tensor;
  std::vector<Kept> parts;
  std::function<at::Tensor(std::vector<at::Tensor>)> restore;

  at::Tensor get() const {
    if (!restore) return tensor;
    std::vector<at::Tensor> payload;
    payload.reserve(parts.size());
    for (const Kept& part : parts) payload.push_back(part.get());
    return restore(std::move(payload));
  }
};

Kept keep(const std::vector<std::shared_ptr<Hooks>>& hooks, std::size_t first, Value value) {
  for (std::size_t i = first; i < hooks.size(); ++i) {
    std::optional<Packed> packed = hooks[i]->pack(value);
    if (!packed) continue;
    GRADUS_INTERNAL_CHECK("saved_plane", packed->restore != nullptr,
                          "hooks packed a tensor without a way back");
    Kept kept;
    kept.restore = std::move(packed->restore);
    for (at::Tensor& part : packed->payload) {
      kept.parts.push_back(keep(
          hooks, i + 1, {std::move(part), value.maker, packed->as_saved && value.saved_by_maker}));
    }
    return kept;
  }
  Kept kept;
  kept.tensor = std::move(value.tensor);
  return kept;
}

// detach() without a trip through the dispatcher: op handlers should not see the plane's own work.
at::Tensor detached(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/tensor.unsafeGetTensorImpl()->version_counter(),
      /*allow_tensor_metadata_change=*/false));
}

}  // namespace

namespace internal {

struct Entry {
  std::shared_ptr<Stack::Entry> entry;
};

// One saved tensor on its way through the hooks.
class Slot {
 public:
  Slot(const at::Tensor& tensor, bool saved_by_maker) {
    versioned_ = !tensor.is_inference();
    if (versioned_) {
      counter_ = tensor.unsafeGetTensorImpl()->version_counter();
      version_ = counter_.current_version();
    }
    name_ = base::tensor_name(tensor);
    // Nested tensors have no sizes of this kind.
    if (!tensor.is_nested()) sizes_ = tensor.sizes().vec();
    dtype_ = tensor.scalar_type();
    // A hook that held the saved variable itself would keep its operator's node alive through its
    // own output.
    value_ = {detached(tensor), operator_name, saved_by_maker};
    if (const Stack* const stack = Stack::current(kKind)) {
      for (const auto& entry : stack->entries) {
        if (entry->active) hooks_.push_back(entry->handler);
      }
    }
    const bool wait =
        operator_depth > 0 &&
        std::any_of(hooks_.begin(), hooks_.end(), [](const auto& h) { return h->reads_data(); });
    if (!wait) {
      // Outside operators (custom functions, Held) values are complete when they are saved.
      settle();
    } else {
      pending.push_back(this);
      waiting_ = true;
    }
  }
  ~Slot() {
    if (waiting_) std::erase(pending, this);
  }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  void settle() {
    waiting_ = false;
    const at::NoGradGuard no_grad;
    kept_ = keep(hooks_, 0, std::move(value_));
    value_ = {};
    hooks_.clear();
  }

  at::Tensor get() const {
    if (versioned_ && counter_.current_version() != version_) {
      throw UserError(base::join(
          "[saved_plane] a tensor saved for backward must not change before it is used; ",
          name_.empty() ? "an unnamed tensor" : name_, " (", dtype_, " ", at::IntArrayRef(sizes_),
          ") was saved at version ", version_, " and is now at version ",
          counter_.current_version(),
          ". Change it in place only after backward, or change a clone."));
    }
    if (waiting_) return value_.tensor;
    at::Tensor tensor = kept_.get();
    GRADUS_INTERNAL_CHECK(
        "saved_plane",
        tensor.defined() && (tensor.is_nested() || tensor.sizes() == at::IntArrayRef(sizes_)) &&
            tensor.scalar_type() == dtype_,
        "hooks gave back another tensor than was saved: ", base::describe_tensor(tensor), " for ",
        dtype_, " ", at::IntArrayRef(sizes_));
    return tensor;
  }

 private:
  Value value_;
  std::vector<std::shared_ptr<Hooks>> hooks_;
  Kept kept_;
  bool waiting_ = false;
  bool versioned_ = false;
  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
  std::string name_;
  std::vector<std::int64_t> sizes_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
};

}  // namespace internal

namespace {

// What LibTorch holds in place of a saved tensor.
class SavedTensor final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = std::make_unique<internal::Slot>(tensor, /*saved_by_maker=*/true);
  }
  at::Tensor call_unpack_hook() override { return slot_->get(); }

 private:
  std::unique_ptr<internal::Slot> slot_;
};

class Engine final : public torch::autograd::Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const Stack* const stack = Stack::current(kKind);
    if (stack == nullptr || !stack->any_active()) return nullptr;
    return std::make_unique<SavedTensor>();
  }
  ~Engine() override { stop(); }
};

// Never destroyed: the engine's threads may outlive main's statics.
torch::autograd::Engine& engine() {
  static Engine* const instance = new Engine;
  return *instance;
}

// When this library is loaded, so that no backward pass ever ran on another engine.
[[maybe_unused]] const bool engine_set = [] {
  torch::autograd::set_default_engine_stub(&engine);
  return true;
}();

// Tells the plane when the operator that saved a tensor has returned.
class Settler final : public op::Handler {
 public:
  void call(op::Call& call) override {
    const std::size_t mark = pending.size();
    const std::string_view outer = std::exchange(operator_name, call.name());
    ++operator_depth;
    struct Leave {
      std::string_view outer;
      ~Leave() {
        --operator_depth;
        operator_name = outer;
      }
    };
    {
      const Leave leave{outer};
      call.proceed();
    }
    settle_from(mark);
  }

 private:
  // In the order of saving, which hooks may count on.
  static void settle_from(std::size_t mark) {
    if (pending.size() == mark) return;
    const std::vector<internal::Slot*> ready(pending.begin() + static_cast<std::ptrdiff_t>(mark),
                                             pending.end());
    pending.resize(mark);
    for (internal::Slot* const slot : ready) slot->settle();
  }
};

}  // namespace

Guard push(Order order, std::shared_ptr<Hooks> hooks) {
  GRADUS_CHECK("saved_plane", hooks != nullptr, "hooks are required; got null");
  GRADUS_CHECK("saved_plane", &torch::autograd::Engine::get_default_engine() == &engine(),
               "saved-tensor hooks need gradus's own autograd engine; another library "
               "(libtorch_python?) has set one "
               "since. Load gradus after it");
  static const std::shared_ptr<op::Handler> settler = std::make_shared<Settler>();
  op::Guard settling;
  // Outermost of all: a call is over for the hooks when it is over for every handler, so that those
  // that record how values were made know this one.
  if (hooks->reads_data()) settling = op::push(op::Order::profile, settler);
  auto entry = std::make_shared<internal::Entry>();
  entry->entry = Stack::push(kKind, order, std::move(hooks));
  return Guard(std::move(entry), std::move(settling));
}

Guard::~Guard() { end(); }

Guard& Guard::operator=(Guard&& other) noexcept {
  if (this != &other) {
    end();
    entry_ = std::move(other.entry_);
    settler_ = std::move(other.settler_);
  }
  return *this;
}

void Guard::end() noexcept {
  const std::shared_ptr<internal::Entry> entry = std::move(entry_);
  if (entry != nullptr) Stack::end(kKind, *entry->entry);
  settler_ = op::Guard();
}

Held::Held() = default;
Held::Held(const at::Tensor& tensor)
    : slot_(std::make_unique<internal::Slot>(tensor, /*saved_by_maker=*/false)) {}
Held::Held(Held&&) noexcept = default;
Held& Held::operator=(Held&&) noexcept = default;
Held::~Held() = default;

at::Tensor Held::get() const {
  GRADUS_INTERNAL_CHECK("saved_plane", slot_ != nullptr, "nothing is held");
  return slot_->get();
}

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

void on_backward_end(std::function<void()> fn) {
  GRADUS_CHECK("saved_plane", current_backward() >= 0,
               "a running backward pass is required; none runs on this thread");
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(fn));
}

}  // namespace gradus::plane::saved
