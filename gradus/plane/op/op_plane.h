#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <c10/util/ArrayRef.h>

namespace c10 {
class FunctionSchema;
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace gradus::plane::op {

/// Where a handler stands among others: an earlier order sees a call first (is outermost). Of one
/// order, the handler pushed last sees it first.
enum class Order : std::uint8_t {
  autocast,   ///< Chooses the precision: all others see the casts, and calls with cast arguments.
  profile,    ///< Measures what the user's program calls.
  record,     ///< Remembers how values were made; holds handles from before any substitution.
  transform,  ///< Replaces operators by others (functorch substitution).
  gather,     ///< Makes arguments usable just before the kernel (sharded or offloaded parameters).
};

/// Which of the several frames of one operator call this is. A call passes through every frame it
/// has: an operator under autocast comes once as `autocast`, then, its arguments cast, as
/// `autograd`.
enum class Frame : std::uint8_t {
  autocast,   ///< Autocast will cast the arguments and call the operator anew.
  composite,  ///< The operator is made of others, which follow as calls of their own.
  autograd,   ///< Just above autograd: each differentiable step of a program comes here exactly
              ///< once.
  below_autograd,  ///< A part that a kernel calls; autograd does not see it.
};

namespace internal {
struct Entry;
class Route;
}  // namespace internal

/// One operator call on its way from the program to the kernel. Lives during Handler::call only.
class Call {
 public:
  const c10::OperatorHandle& op() const;
  const c10::FunctionSchema& schema() const;
  /// "aten::mm". Static storage.
  std::string_view name() const;
  Frame frame() const;

  /// The arguments by position; empty once the call was made.
  c10::ArrayRef<c10::IValue> arguments() const;
  /// Replaces one argument before the call is made. Dispatch is computed anew from the new
  /// arguments.
  void set_argument(std::size_t index, c10::IValue value);

  /// Makes the call: next handler, or the kernel. Parts of composite operators come as calls of
  /// their own.
  void proceed();
  /// Makes the call as a whole: handlers see none of its parts.
  void proceed_whole();
  /// Makes the call past all other handlers of this handler's own order: where the newest of an
  /// order stands for all.
  void proceed_past_order();
  /// Gives @p results instead of making the call.
  void replace(std::vector<c10::IValue> results);

  /// What the call returned; empty before it was made.
  c10::ArrayRef<c10::IValue> results() const;
  /// Replaces one result after the call was made.
  void set_result(std::size_t index, c10::IValue value);

  /// While this lives inside a handler, operators that the handler itself calls come to the
  /// handlers behind it. Without it they go straight to their kernels. Costs next to nothing where
  /// no handler is behind.
  class [[nodiscard]] InnerOperators {
   public:
    explicit InnerOperators(const Call& call);
    ~InnerOperators();
    InnerOperators(const InnerOperators&) = delete;
    InnerOperators& operator=(const InnerOperators&) = delete;

   private:
    bool was_excluded_ = false;
    bool pushed_ = false;
  };

 private:
  friend class internal::Route;
  Call(internal::Route& route, std::size_t position) : route_(&route), position_(position) {}
  void make(bool whole, std::size_t next);

  internal::Route* route_;
  std::size_t position_;  // of this call's handler
  bool made_ = false;
};

/// Sees every operator call while its Guard lives: forward and, since autograd takes a thread's
/// state along, backward, on whatever thread that runs. Must make or replace the call exactly once;
/// may be called from several threads at once if the program computes on several.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void call(Call& call) = 0;
};

/// Ends a push. Guards are moved, never copied. End them on the thread that made them, the newest
/// first; a guard that ends out of turn, or elsewhere, at once stops its own handler and no other.
class [[nodiscard]] Guard {
 public:
  Guard() = default;
  explicit Guard(std::shared_ptr<internal::Entry> entry) : entry_(std::move(entry)) {}
  ~Guard();
  Guard(Guard&& other) noexcept = default;
  Guard& operator=(Guard&& other) noexcept;
  Guard(const Guard&) = delete;

 private:
  void end() noexcept;
  std::shared_ptr<internal::Entry> entry_;
};

/// Starts to show operator calls of this thread (and of backward passes it starts) to @p handler.
/// A pass-through handler costs well under a microsecond an operator; with no guard there is no
/// cost. Threads that the program starts itself see the handlers only under an
/// at::ThreadLocalStateGuard.
/// @throws UserError if @p handler is null.
Guard push(Order order, std::shared_ptr<Handler> handler);

/// Runs the kernel of @p op on @p values (arguments in, results out), below handlers, autocast and
/// autograd: for running again a call that was seen at Frame::autograd, with arguments as they were
/// then.
void call_kernel(const c10::OperatorHandle& op, std::vector<c10::IValue>& values);

/// The handler of @p order that sees this thread's calls first, or null.
std::shared_ptr<Handler> newest(Order order);

/// True while this thread shows its calls to at least one handler.
bool active();

}  // namespace gradus::plane::op
