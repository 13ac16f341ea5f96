#pragma once

#include <cstdint>

namespace gradus::optim::internal {

/// What a parameter of dtype Value is computed in, and what its state is kept in: float32, and
/// float64 for float64.
template <typename Value>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};

/// Loops of Adafactor over a matrix [rows, columns] without gaps, or over a flat vector. An update
/// is g * min(row_factor * column_factor, limit): the caller turns the factored second moment into
/// one factor a row and one a column, so that no root is taken of an element.
template <typename Value>
struct AdafactorLoops {
  using Real = typename ComputeOf<Value>::type;

  double (*square_sum)(const Value* x, std::int64_t n);
  /// row_sums[i] = sum_j g_ij^2; column_sums[j] += sum_i g_ij^2.
  void (*matrix_squares)(const Value* g, std::int64_t rows, std::int64_t columns, double* row_sums,
                         double* column_sums);
  /// Sum of the squared updates.
  double (*matrix_update_square)(const Value* g, std::int64_t rows, std::int64_t columns,
                                 const Real* row_factors, const Real* column_factors, Real limit);
  /// p = keep * p - scale * update; with @p mean: mean = beta1 * mean + rest * scale * update
  /// and p = keep * p - mean.
  void (*matrix_apply)(Value* p, const Value* g, Real* mean, std::int64_t rows,
                       std::int64_t columns, const Real* row_factors, const Real* column_factors,
                       Real limit, Real keep, Real scale, Real beta1, Real rest);
  /// variance += weight * (g^2 + floor - variance); returns the sum of (g * min(1 /
  /// sqrt(variance), limit))^2.
  double (*vector_measure)(const Value* g, Real* variance, std::int64_t n, Real weight, Real floor,
                           Real limit);
  /// As matrix_apply, with the update g * min(1 / sqrt(variance), limit).
  void (*vector_apply)(Value* p, const Value* g, Real* mean, const Real* variance, std::int64_t n,
                       Real limit, Real keep, Real scale, Real beta1, Real rest);
};

/// @param widest  For this processor; else for any. Both give the same bits.
template <typename Value>
const AdafactorLoops<Value>& adafactor_loops(bool widest = true);

/// Values that share one scale.
inline constexpr std::int64_t kBlock = 256;

/// 256 values and the way to the nearest, for a map of decades of equal cells. A magnitude in [0,
/// 1] finds its decade, 1 to 7 or 0 for zero, by comparison, and its place there by one product and
/// one sum; the value of a place likewise. @see block_quantise.h for the numbers.
///
/// Places count from zero in a signed map (0 to 128), from 1 in an unsigned one (1 to 256).
struct CodeMap {
  float values[256] = {};     ///< Ascending.
  float thresholds[8] = {};   ///< From which magnitude on it is decade 1, ..., 7, and the value 1.
  float places[8] = {};       ///< Of a decade: places a unit of magnitude,
  float zero_places[8] = {};  ///< the place that a magnitude of zero would have,
  float least[8] = {};        ///< and the first place: the last is 2 least - 1 (0 if least is 0).
  float widths[8] = {};       ///< By the exponent of the place: the magnitudes that it spans,
  float firsts[8] = {};       ///< and its first value.
  bool is_signed = false;     ///< Zero is code 127, else 0.
};

/// State in blocks of kBlock values: a code each, and the largest magnitude of each block.
struct BlockState {
  std::uint8_t* codes = nullptr;
  float* absmax = nullptr;
};

/// The numbers of one update of Adam. Complements are given, not taken in float32, where 1 - 0.999
/// is wrong in the fifth place.
struct AdamScalars {
  float beta1 = 0.0F, rest1 = 1.0F;  ///< rest1 = 1 - beta1
  float beta2 = 0.0F, rest2 = 1.0F;  ///< rest2 = 1 - beta2
  float eps = 0.0F;
  float keep = 1.0F;             ///< The parameter is multiplied by it (decoupled weight decay).
  float l2 = 0.0F;               ///< Share of the parameter that is added to its gradient.
  float sign = 1.0F;             ///< -1 goes up the gradient.
  float step_size = 0.0F;        ///< lr / (1 - beta1^t).
  float root_correction = 1.0F;  ///< sqrt(1 - beta2^t).
};

/// buffer = kept * buffer + added * gradient, then p -= lr * (of_gradient * gradient + of_buffer *
/// buffer), where gradient = sign * g + l2 * p.
struct SgdScalars {
  float lr = 0.0F, kept = 0.0F, added = 1.0F, of_gradient = 0.0F, of_buffer = 1.0F;
  float l2 = 0.0F, sign = 1.0F;
};

/// Loops over values [n] that begin with a block; the last block may be shorter.
template <typename Value>
struct BlockLoops {
  void (*adam)(Value* p, const Value* g, BlockState mean, BlockState square, std::int64_t n,
               const CodeMap& signed_map, const CodeMap& unsigned_map, const AdamScalars& scalars);
  void (*sgd)(Value* p, const Value* g, BlockState buffer, std::int64_t n,
              const CodeMap& signed_map, const SgdScalars& scalars);
  /// The same updates with float32 state.
  void (*plain_adam)(Value* p, const Value* g, float* mean, float* square, std::int64_t n,
                     const AdamScalars& scalars);
  void (*plain_sgd)(Value* p, const Value* g, float* buffer, std::int64_t n,
                    const SgdScalars& scalars);
};
template <typename Value>
const BlockLoops<Value>& block_loops(bool widest = true);

/// The halves of the loops above alone.
struct CodeLoops {
  void (*quantise)(const float* x, std::int64_t n, const CodeMap& map, BlockState state);
  void (*dequantise)(const BlockState& state, std::int64_t n, const CodeMap& map, float* x);
};
const CodeLoops& code_loops(bool widest = true);

}  // namespace gradus::optim::internal
