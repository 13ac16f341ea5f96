#pragma once

// The values of a forward pass, and how each was made.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <gradus/recompute/eviction_plan.h>

namespace gradus::recompute::internal {

struct Recipe;

/// A smaller form of a content, at one place of autograd.
struct Encoded {
  std::vector<at::Tensor> payload;
  std::function<at::Tensor(std::vector<at::Tensor>)> restore;
  bool dropped = false;   ///< It went for want of memory.
  bool decoding = false;  ///< Its payload is being read.
};

/// The content of a storage at one moment: an operator in place makes a new content of the same
/// storage. Kept in memory by a strong handle or not at all.
struct Content {
  std::shared_ptr<Recipe> maker;  ///< Null if it came from outside, or cannot be made again.
  std::size_t output = 0;         ///< Which result of the maker, or which argument it changed.
  std::int64_t bytes = 0;
  c10::Storage storage;  ///< Defined while we keep it.
  c10::weak_intrusive_ptr<c10::StorageImpl>
      program;                 ///< The program's own storage, while it holds this content.
  std::shared_ptr<void> away;  ///< In the stash.
  std::optional<c10::VariableVersion> version;  ///< Of an outside tensor, when it was read.
  std::uint32_t version_read = 0;
  std::string description;     ///< Of an outside tensor.
  std::int64_t last_used = 0;  ///< On the tape's own clock, which counts operators.
  std::int64_t call = -1;      ///< Of the pass, that made it; -1 outside a pass.
  int pins = 0;                ///< A replay needs it now.
  int saved = 0;               ///< Places of autograd that stand for it.
  std::vector<std::shared_ptr<Encoded>> encoded;  ///< And those that keep a smaller form.
  c10::weak_intrusive_ptr<c10::StorageImpl> decoded{
      c10::intrusive_ptr<c10::StorageImpl>()};  ///< What backward was given of it last.

  Content(std::int64_t bytes, c10::weak_intrusive_ptr<c10::StorageImpl> program)
      : bytes(bytes), program(std::move(program)) {}

  bool held_by_program() const {
    const bool ours = storage && storage.unsafeGetStorageImpl() == program._unsafe_get_target();
    return program.use_count() > (ours ? 1U : 0U);
  }
  /// Of its smaller forms; what two of them share counts once.
  std::int64_t encoded_bytes() const {
    std::int64_t bytes = 0;
    std::vector<const c10::StorageImpl*> counted;
    for (const auto& form : encoded) {
      for (const at::Tensor& part : form->payload) {
        const auto* const key = part.storage().unsafeGetStorageImpl();
        if (std::find(counted.begin(), counted.end(), key) != counted.end()) continue;
        counted.push_back(key);
        bytes += static_cast<std::int64_t>(part.storage().nbytes());
      }
    }
    return bytes;
  }
  bool in_memory() const { return storage || program.use_count() > 0; }
};

/// A tensor over a content: all but the memory.
struct Shape {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
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
  std::int64_t number = 0;       ///< Of the call, ascending.
  std::int64_t call = -1;        ///< In the pass; -1 outside one.
  std::int64_t small_call = -1;  ///< The number of its small results, if they have one.
};

}  // namespace gradus::recompute::internal
