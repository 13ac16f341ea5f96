#pragma once

// How the values of a forward pass were made, which of them are in memory, and how to make one
// again.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <gradus/plane/op/op_plane.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus::recompute::internal {

struct Recipe;

/// The content of a storage at one moment: an operator in place makes a new content of the same
/// storage. Kept in memory by a strong handle or not at all.
struct Content {
  std::shared_ptr<Recipe> maker;  ///< Null if it came from outside, or cannot be made again.
  std::size_t output = 0;         ///< Which result of the maker, or which argument it changed.
  std::int64_t bytes = 0;
  c10::Storage storage;  ///< Defined while we keep it.
  c10::weak_intrusive_ptr<c10::StorageImpl>
      program;  ///< The program's own storage, while it holds this content.
  std::optional<c10::VariableVersion> version;  ///< Of an outside tensor, when it was read.
  std::uint32_t version_read = 0;
  std::string description;     ///< Of an outside tensor.
  std::int64_t last_used = 0;  ///< On the tape's own clock, which counts operators.
  int pins = 0;                ///< A replay needs it now.
  int saved = 0;               ///< Places of autograd that stand for it.

  Content(std::int64_t bytes, c10::weak_intrusive_ptr<c10::StorageImpl> program)
      : bytes(bytes), program(std::move(program)) {}
};

/// A tensor over a content: all but the memory.
struct Shape {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  at::TensorOptions options;
};

/// One argument of a recipe: a value as it is, or tensors over contents.
struct Argument {
  c10::IValue value;
  std::vector<std::pair<std::shared_ptr<Content>, Shape>>
      tensors;                ///< One, or the elements of a list.
  std::vector<bool> present;  ///< For a list: which elements are tensors over contents.
  bool written = false;       ///< The call changes it.
};

/// One operator call.
struct Recipe {
  explicit Recipe(const c10::OperatorHandle& op) : op(op) {}
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<std::weak_ptr<Content>> made;  ///< What it made.
  at::Generator generator;  ///< With its state before the call, if it drew numbers.
  at::Tensor generator_state;
  bool grad_mode = true;
  double seconds = 0.0;
  std::int64_t number = 0;  ///< Of the call, ascending.
};

/// Records a forward pass, drops contents under pressure and makes them again. Thread-safe.
class Tape final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override;

  /// The content of a tensor that autograd saves, if the tape can make it again; else null.
  std::shared_ptr<Content> find(const at::Tensor& tensor);
  /// Says that a place of autograd stands for @p content from now on, or no longer.
  void save(const std::shared_ptr<Content>& content);
  void release(const std::shared_ptr<Content>& content);
  /// The tensor over @p content, made again if need be.
  at::Tensor get(const std::shared_ptr<Content>& content, const Shape& shape);

  /// Drops the cheapest contents until @p bytes are freed. Returns the bytes freed.
  std::int64_t evict(std::int64_t bytes);

  BudgetStatistics statistics() const;

  static Shape shape_of(const at::Tensor& tensor);

 private:
  std::shared_ptr<Content> content_of(const at::Tensor& tensor, bool outside_too);
  void record(plane::op::Call& call);
  Argument argument_of(const c10::IValue& value);
  c10::Storage materialise(const std::shared_ptr<Content>& content);
  void run(Recipe& recipe);
  bool purge();
  bool prepare_change(const at::Tensor& tensor, bool only_changes);
  bool replayable(const Content& content) const { return content.maker != nullptr; }

  // Recursive: making a value again allocates, which may ask this tape to evict.
  mutable std::recursive_mutex mutex_;
  // Contents by the storage that holds them now. The weak handles in them keep a key's address its
  // own.
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Content>>
      current_;  // made by recipes
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Content>>
      outside_;                               // owned by recipes that read them
  std::vector<std::weak_ptr<Content>> kept_;  // what may be evicted: contents with a strong handle
  std::int64_t clock_ = 0;
  std::int64_t saved_ = 0;  // places of autograd that stand for contents
  std::int64_t calls_since_purge_ = 0;
  BudgetStatistics statistics_;
};

}  // namespace gradus::recompute::internal
