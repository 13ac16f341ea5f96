#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <gradus/base/clock.h>
#include <gradus/compress/quantise.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::compress {

/// What may be done to values that no lossless encoding makes small enough.
enum class Lossy : std::uint8_t {
  none,
  bf16,  ///< Delayed precision reduction, see Precision.
  fp16,
  fp10,
  fp8,
  int8,  ///< Block quantisation with stochastic rounding, see Quantiser.
  int4,
  int2,
};

struct CompressOptions {
  /// Gradients may change, within the error bound of `lossy`. Without it every encoding is lossless
  /// and gradients are bitwise those of plain training.
  bool allow_lossy = false;
  Lossy lossy = Lossy::none;  ///< Needs allow_lossy.
  /// Smaller tensors are left alone. >= 0.
  std::int64_t min_bytes = 16 << 10;
  /// Lossless encodings of values are used where they take at most this share of the plain bytes.
  /// In (0, 1].
  double max_ratio = 0.9;
  /// True for tensors to leave alone, besides parameters, buffers and whatever else came from
  /// outside. May be called from several threads.
  std::function<bool(const plane::saved::Value&)> keep = nullptr;
  /// Encode what autograd saves. False: nothing but what encode() is given.
  bool on_save = true;
  /// True for operators whose saved tensors may be lossy; default: lossy_by_default().
  std::function<bool(const plane::saved::Value&)> may_lose = nullptr;
  RoundingState rounding = {};                  ///< Where stochastic rounding starts.
  base::Clock clock = base::monotonic_clock();  ///< Times the statistics.
};

/// Operators whose gradients err in proportion to the error of what they saved: products,
/// convolutions, normalisations, attention, smooth activations. Not those whose backward divides by
/// a saved value, exponentiates it or compares it (div, log, log_softmax, hardtanh), not
/// statistics, and nothing that was saved outside an operator (custom functions, inputs of
/// checkpoint regions).
bool lossy_by_default(const plane::saved::Value& value);

enum class Method : std::uint8_t {
  shape,         ///< keep_shape
  binarize,      ///< binarize
  two_valued,    ///< pack_two_valued
  positions,     ///< narrow_integers
  sparse,        ///< pack_sparse, values in full
  reduced,       ///< reduce_precision
  quantised,     ///< Quantiser
  sparse_lossy,  ///< pack_sparse, values reduced or quantised
};
inline constexpr std::size_t kMethodCount = 8;
inline constexpr std::array<std::string_view, kMethodCount> kMethodNames{
    "shape only", "binarize", "two-valued", "positions",
    "sparse",     "reduced",  "quantised",  "sparse, lossy"};

/// What one method did. Bytes are those of saved tensors: two that share memory count twice.
struct MethodStatistics {
  std::int64_t tensors = 0;       ///< Encoded, and kept in that form.
  std::int64_t shared = 0;        ///< Of these, saves that found the same tensor encoded already.
  std::int64_t bytes_before = 0;  ///< Of all of them in full.
  std::int64_t bytes_after = 0;   ///< Of what was kept; 0 for shared ones.
  std::int64_t restores = 0;      ///< Times that backward asked for one.
  double encode_s = 0.0;          ///< Seconds, all threads together.
  double restore_s = 0.0;         ///< Seconds, all threads together.
};

struct CompressStatistics {
  std::array<MethodStatistics, kMethodCount> methods{};
  std::int64_t left_tensors =
      0;  ///< Saved as they are: too small, from outside, or not compressible.
  std::int64_t left_bytes = 0;

  const MethodStatistics& operator[](Method method) const {
    return methods[static_cast<std::size_t>(method)];
  }
  MethodStatistics total() const;
};

/// What a CompressGuard would make of one saved tensor, as measured.
struct Probe {
  Method method = Method::shape;
  std::int64_t bytes = 0;  ///< Of what would be kept.
  double encode_s = 0.0;
  double restore_s = 0.0;
  /// True if method and bytes do not depend on the values: they hold for every tensor of the same
  /// maker, dtype, sizes and strides.
  bool by_layout = false;
};

namespace internal {
class Compressor;
}

/// Compresses what autograd saves on this thread while it lives, with no change to the model:
///
///   const CompressGuard compression({.allow_lossy = true, .lossy = Lossy::int4});
///   model->forward(x).sum().backward();
///
/// Each saved tensor gets the smallest encoding that is exact for what its operator's backward
/// reads (need_of); values that stay large get the lossy one, if allowed. A tensor that several
/// operators save is encoded once. What it encoded is given back whether or not the guard still
/// lives. A guard and its statistics() may be read from any thread; end it on the thread that made
/// it.
class [[nodiscard]] CompressGuard {
 public:
  /// @throws UserError if a lossy method is named but not allowed, or a number is out of range.
  explicit CompressGuard(const CompressOptions& options = {});
  ~CompressGuard();
  CompressGuard(CompressGuard&&) noexcept;
  CompressGuard& operator=(CompressGuard&&) noexcept;
  CompressGuard(const CompressGuard&) = delete;

  /// What the guard would make of @p value if `keep` let it; nullopt if it would leave it alone.
  /// Encodes it and gives it back once, in the host arena, and keeps neither. Takes no part in
  /// statistics() and rounding(). Each value on its own: what several operators save is encoded
  /// once by the guard, where they need the same of it.
  std::optional<Probe> probe(const plane::saved::Value& value) const;

  /// Encodes @p value as the guard's own hooks would, for a technique that keeps saved tensors
  /// itself; nullopt where they would leave it alone, or the form takes more than @p max_ratio of
  /// its bytes. Counts in statistics().
  std::optional<plane::saved::Packed> encode(const plane::saved::Value& value,
                                             double max_ratio = 1.0) const;

  CompressStatistics statistics() const;
  /// For CompressOptions::rounding of a run that goes on from here with the same numbers.
  RoundingState rounding() const;

 private:
  std::shared_ptr<internal::Compressor> compressor_;
  // The order matters: hooks end before the handler that they ask.
  plane::op::Guard origins_guard_;
  plane::saved::Guard saved_guard_;
};

}  // namespace gradus::compress
