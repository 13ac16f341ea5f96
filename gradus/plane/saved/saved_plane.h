#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/plane/op/op_plane.h>

namespace gradus::plane::saved {

/// Where hooks stand among others: an earlier order takes a saved tensor first (is innermost) and
/// passes what it keeps on to the next. Of one order, the hooks pushed last take it first.
enum class Order : std::uint8_t {
  round,          ///< Keeps a value in the precision that it was computed from.
  checkpoint,     ///< Keeps nothing: the value will be computed again.
  rematerialise,  ///< Keeps it until memory is short, and can compute it again.
  compress,       ///< Keeps a smaller form.
  offload,        ///< Keeps it elsewhere.
  observe,        ///< Keeps it as it is and looks at it: accounting.
};

/// A tensor that autograd saves for backward.
struct Value {
  at::Tensor
      tensor;  ///< Detached; shares storage and version with what is saved. Do not change it.
  std::string_view
      maker;  ///< The operator that saves it ("aten::mm"), or "" outside any. Static storage.
  /// True for what @p maker itself saved. False for what a technique keeps for purposes of its own:
  /// a Held, a part of what an earlier hook keeps. Then the maker's backward formula does not tell
  /// what is needed of it.
  bool saved_by_maker = true;
};

/// What is kept of a saved tensor.
struct Packed {
  /// Tensors to keep; they pass through the hooks of later orders.
  std::vector<at::Tensor> payload{};
  /// Gives the saved tensor back from the payload: same shape and dtype, same device. May be called
  /// several times (retain_graph), from any thread, under the thread state of the backward pass.
  std::function<at::Tensor(std::vector<at::Tensor> payload)> restore = nullptr;
  /// The payload is what the maker saved, passed on as it is: later hooks see it as saved by it.
  bool as_saved = false;
};

/// Decides what autograd keeps while its Guard lives. pack() runs without gradient recording.
class Hooks {
 public:
  virtual ~Hooks() = default;

  /// Returns what to keep, or nullopt to leave the tensor to the hooks of later orders.
  virtual std::optional<Packed> pack(const Value& value) = 0;

  /// True if pack() reads the tensor's data. Some kernels save a tensor before they fill it (the
  /// noise of rrelu, the statistics of batch-norm variants): such hooks are called only once the
  /// operator returned.
  virtual bool reads_data() const { return true; }
};

namespace internal {
struct Entry;
class Slot;
}  // namespace internal

/// Ends a push. Rules as for plane::op::Guard.
class [[nodiscard]] Guard {
 public:
  Guard() = default;
  Guard(std::shared_ptr<internal::Entry> entry, op::Guard settler)
      : settler_(std::move(settler)), entry_(std::move(entry)) {}
  ~Guard();
  Guard(Guard&& other) noexcept = default;
  Guard& operator=(Guard&& other) noexcept;
  Guard(const Guard&) = delete;

 private:
  void end() noexcept;
  op::Guard settler_;
  std::shared_ptr<internal::Entry> entry_;
};

/// Starts to give what autograd saves on this thread to @p hooks. Backward passes started under the
/// guard carry it along (a double backward saves tensors too); what was saved is given back whether
/// or not the guard still lives.
///
/// A tensor changed in place between save and use is an error that names it: LibTorch itself stops
/// checking versions once hooks are on.
/// @throws UserError if @p hooks is null.
Guard push(Order order, std::shared_ptr<Hooks> hooks);

/// A tensor kept as autograd would keep it: through the hooks that are on when it is made. For
/// techniques whose own state must obey outer hooks (a checkpoint's inputs inside an outer
/// checkpoint).
class Held {
 public:
  Held();
  explicit Held(const at::Tensor& tensor);
  Held(Held&&) noexcept;
  Held& operator=(Held&&) noexcept;
  ~Held();

  /// The tensor, detached. @throws UserError if it was changed in place since.
  at::Tensor get() const;

 private:
  std::unique_ptr<internal::Slot> slot_;
};

/// The autograd pass now running on this thread, or -1: equal numbers mean the same backward()
/// call.
int current_backward();

/// Calls @p fn once when the backward pass now running on this thread has ended well. A pass that
/// fails calls nothing: what must go then belongs to an object that the graph owns.
/// @throws UserError outside a backward pass.
void on_backward_end(std::function<void()> fn);

}  // namespace gradus::plane::saved
