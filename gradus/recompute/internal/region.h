#pragma once

// What a checkpointed region did the first time, and the handlers that watch it do it.

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/flat_hash_map.h>

#include <gradus/base/rng.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/internal/operator_traits.h>
#include <gradus/recompute/selective.h>

namespace gradus::recompute::internal {

/// One operator call, as far as a second run must repeat it.
struct TracedCall {
  std::string_view name;    ///< Static storage.
  std::uint64_t signature;  ///< Of the tensors' shapes and dtypes and of all other arguments.
};

/// A tensor from outside the region that the region read. The weak handles keep the key's address
/// its own, and the tensor's name within reach.
struct OutsideTensor {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;  ///< None for a sparse tensor.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  c10::VariableVersion counter;
  std::uint32_t version = 0;  ///< When the region ended.
};

/// A storage from outside the region that the region changed.
struct ChangedStorage {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  at::Tensor bytes_before;  ///< A copy of the whole storage, uint8.
};

/// A result that a selective policy keeps: a tensor, or whatever else an operator returns.
struct KeptResult {
  bool is_tensor = false;
  plane::saved::Held held;
  at::Tensor pending;  ///< What held will hold once the region has ended.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  c10::IValue other;  ///< If it is no tensor, or an undefined one.
  bool requires_grad = false;
  bool mutated = false;  ///< By the region, later: held is a copy from before.
};

/// What autograd saved inside a kept operator: a view of one of its tensor arguments or results, or
/// a tensor of its own.
struct KeptPlace {
  enum class From : std::uint8_t { argument, result, own };
  From from = From::own;
  std::size_t index = 0;  ///< Among the tensors of the arguments, lists flattened, or the results.
  bool whole = true;      ///< The tensor itself; otherwise a view of these sizes and strides.
  std::vector<std::int64_t> sizes, strides, base_strides;
  std::int64_t offset = 0;  ///< From the base tensor's first element, in elements.
  plane::saved::Held held;
  at::Tensor pending;
};

/// An operator whose results a selective policy keeps. Ranges are half open.
struct KeptOperator {
  std::string_view name;
  bool must = false;
  std::uint64_t signature = 0;
  std::size_t ordinal = 0, ordinal_end = 0;  ///< Among all calls that a policy may decide on.
  std::size_t calls_end = 0;                 ///< In RegionRecord::calls.
  std::size_t places_begin = 0;              ///< Among the tensors that the region saves.
  std::vector<KeptResult> results;
  std::vector<KeptPlace> places;
  std::optional<base::RngState> rng_after;  ///< If it drew random numbers.
};

struct RegionRecord {
  std::vector<TracedCall> calls;
  std::vector<std::string> texts;  ///< Of the calls, in debug mode.
  std::vector<OutsideTensor> read;
  bool read_requires_grad = false;  ///< A tensor from outside that was read requires grad.
  bool ran_backward = false;        ///< Inside the region.

  std::unordered_map<const c10::StorageImpl*, ChangedStorage> changed;
  std::vector<std::pair<at::Generator, at::Tensor>>
      generators;                  ///< Custom ones, with the state at first use.
  std::vector<KeptOperator> kept;  ///< By ordinal.
};

/// @throws UserError that names a tensor which the region read and which was changed since.
void check_unchanged(const RegionRecord& record);

/// Names the innermost region that runs on this thread while it lives: its policy decides.
class [[nodiscard]] InnermostRegion {
 public:
  explicit InnermostRegion(const plane::op::Handler* watcher);
  ~InnermostRegion();
  InnermostRegion(const InnermostRegion&) = delete;
  InnermostRegion& operator=(const InnermostRegion&) = delete;

  /// Of this thread, or null.
  static const plane::op::Handler* watcher();

 private:
  const plane::op::Handler* outer_;
};

/// How the two runs of a region are compared.
enum class Compare : std::uint8_t {
  nothing,
  /// Each operator that autograd sees.
  steps,
  /// What the program itself calls, composite operators as a whole: what those call depends on
  /// whether gradients are recorded, which a reentrant region does in its second run only.
  program,
};

/// Watches the first run and fills a RegionRecord.
class Recorder final : public plane::op::Handler {
 public:
  struct Options {
    bool debug = false;
    bool keep_rng = true;  ///< Of kept operators that draw random numbers.
    Compare compare = Compare::steps;
    SelectivePolicy policy = {};  ///< What to keep.
  };
  Recorder(RegionRecord& record, Options options);
  void call(plane::op::Call& call) override;
  /// Notes the versions that outside tensors have after the region, and gives what is kept to the
  /// hooks that are on. Call it when the region's own are off.
  void finish();

  /// Whether the region made @p tensor's storage.
  bool made(const at::Tensor& tensor) const;
  /// While paused, calls pass unseen: a second run inside the first.
  void pause(bool paused) { paused_ = paused; }
  /// Tells of a tensor that autograd saves now.
  void saved(const plane::saved::Value& value);

 private:
  struct Span;
  void note_without_storage(const c10::IValue& value);
  void note_arguments(const plane::op::Call& call, const OperatorTraits& traits);
  void note_tensor(const at::Tensor& tensor, bool written, const plane::op::Call& call);
  void note_results(const plane::op::Call& call);
  void note_write_to_kept(const at::Tensor& tensor, const plane::op::Call& call);
  void decide(const plane::op::Call& call, const OperatorTraits& traits, const Span& span);
  void keep(const plane::op::Call& call, const Span& span, bool must);
  void close();
  KeptPlace place_of(const at::Tensor& saved, const std::vector<at::Tensor>& arguments,
                     const std::vector<at::Tensor>& results);

  RegionRecord& record_;
  const Options options_;
  // Storages seen so far: made inside, or from outside.
  enum class Origin : std::uint8_t { inside, outside };
  ska::flat_hash_map<const c10::StorageImpl*, Origin> storages_;
  ska::flat_hash_map<const c10::TensorImpl*, Origin> without_storage_;
  const void* casting_for_ = nullptr;
  const int pass_;           // the backward pass that the region is called from, or -1
  std::size_t nesting_ = 0;  // operators that are running
  bool paused_ = false;
  // For the policy.
  std::size_t ordinal_ = 0;
  std::size_t places_ = 0;
  std::size_t seeded_ = 0;
  std::vector<at::Tensor> saved_;  // since the outermost operator that runs, or ran last, began
  std::size_t saved_begin_ = 0;
  // The operator that was kept last, while its saved tensors may still come.
  bool open_ = false;
  std::size_t open_end_ = 0;
  std::vector<at::Tensor> open_arguments_, open_results_;
};

/// @p tensor's shape over a copy of its storage's earlier bytes.
at::Tensor over_bytes(const at::Tensor& tensor, const at::Tensor& bytes);

/// Thrown through the region when all that backward wants is made; caught by the checkpoint.
struct StopRegion : std::exception {
  explicit StopRegion(const void* of) : frame(of) {}
  const void* frame;
};

/// Takes what autograd would have saved in an operator that is not run.
class Places {
 public:
  virtual ~Places() = default;
  virtual void fill(const at::Tensor& tensor) = 0;
  virtual std::size_t count() const = 0;
};

/// Watches the second run: compares it with the record, gives what was kept, and keeps the run from
/// changing anything outside.
class Replayer final : public plane::op::Handler {
 public:
  Replayer(const RegionRecord& record, const void* frame, Compare compare, bool debug = false);
  void call(plane::op::Call& call) override;
  /// From now on the region ends after the operator that is running, or after the next one.
  void stop() { stop_ = true; }
  /// Where the saved tensors of operators that are not run go.
  void set_places(Places* places) { places_ = places; }
  /// @throws UserError unless the whole record was repeated.
  void finish();
  /// @throws UserError if the run was found to differ, and (debug mode) went on so far.
  void report_difference() const;

 private:
  void compare(const plane::op::Call& call);
  bool replace_kept(plane::op::Call& call);
  void substitute(plane::op::Call& call);
  at::Tensor shadow_of(const at::Tensor& tensor);

  const RegionRecord& record_;
  const void* frame_;
  const Compare compare_;
  const bool debug_;
  Places* places_ = nullptr;
  bool stop_ = false;
  std::size_t next_ = 0;
  std::size_t ordinal_ = 0;
  std::size_t next_kept_ = 0;
  std::optional<std::size_t> different_at_;
  std::string difference_;
  std::vector<std::string> texts_;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> shadows_;
  const void* casting_for_ = nullptr;
  const int pass_;
  std::size_t nesting_ = 0;
};

}  // namespace gradus::recompute::internal
