#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <gradus/plane/saved/saved_plane.h>

/// Encodings of saved activations after Jain et al. 2018, "Gist: Efficient Data Encoding for Deep
/// Neural Network Training". All take CPU tensors that are dense in memory, of any strides, and
/// give them back with the same strides and the same alignment. All are thread-safe. None calls an
/// operator. Each returns nullopt for tensors that it cannot encode: other devices and layouts,
/// gaps, no values, other dtypes than stated.
namespace gradus::compress {

/// What backward reads of a tensor that an operator saves.
enum class Need : std::uint8_t {
  values,           ///< Everything, for all that is known.
  positive,         ///< Only whether a value is > 0; NaN counts as not.
  positive_or_nan,  ///< Only whether a value is > 0 or NaN.
  shape,            ///< Sizes and memory format only.
  positions,        ///< Integers: all of them, but they need few bits.
};

/// What the backward formula of @p maker ("aten::relu") reads of its saved tensor @p tensor. Holds
/// for each save on its own: the same tensor saved again by a convolution is saved by another
/// maker.
Need need_of(std::string_view maker, const at::Tensor& tensor);

/// Gist's Binarize: 1 bit a value. Gives back a tensor of ones (> 0) and zeros, which makes the
/// same gradients where @p need is `positive` or `positive_or_nan`. Floating dtypes.
/// @throws UserError for another need.
std::optional<plane::saved::Packed> binarize(const at::Tensor& tensor, Need need);

/// Keeps no values: gives back a tensor of the same sizes and memory format. A contiguous one takes
/// the memory of one element, a NaN, so that a backward formula that did read it would show; the
/// values of others are undefined. Floating dtypes.
std::optional<plane::saved::Packed> keep_shape(const at::Tensor& tensor);

/// Sparse storage, dense when given back, lossless to the bit (also -0 and NaN): a bitmap of the
/// values that are not +0, and these values. Any dtype of 1, 2, 4 or 8 bytes.
/// @param max_ratio  nullopt unless encoded bytes <= max_ratio x plain bytes; in (0, 1].
/// @param sample  Look at a thousand values first, and leave a tensor that is clearly too dense
/// after those.
std::optional<plane::saved::Packed> pack_sparse(const at::Tensor& tensor, double max_ratio = 1.0,
                                                bool sample = true);

/// A tensor of at most two different values, lossless to the bit: 1 bit a value. The noise of
/// dropout is one. Any dtype of 1, 2, 4 or 8 bytes.
std::optional<plane::saved::Packed> pack_two_valued(const at::Tensor& tensor);

/// int64 without negative values in 1, 2 or 4 bytes a value, the fewest that hold all of them;
/// nullopt if none does. The positions of max-pooling are such. Lossless.
std::optional<plane::saved::Packed> narrow_integers(const at::Tensor& tensor);

/// Formats of delayed precision reduction (Gist's DPR), as sign + exponent + mantissa bits. They
/// carry a power of two per tensor, so that the largest magnitude is always representable, and have
/// subnormals.
enum class Precision : std::uint8_t {
  bf16,  ///< 1 + 8 + 7, 2 bytes.
  fp16,  ///< 1 + 5 + 10, 2 bytes.
  fp10,  ///< 1 + 5 + 4, three to 4 bytes.
  fp8,   ///< 1 + 4 + 3, 1 byte.
};

/// Lossy: rounds to nearest in @p precision. Floating dtypes; nullopt for tensors with an infinity
/// or NaN and where nothing is gained (half to fp16).
///
/// |x - restored| <= precision_error_bound(precision, |x|, largest magnitude in the tensor), and
/// half a unit in the last place of the tensor's own dtype more if that is narrower than float.
std::optional<plane::saved::Packed> reduce_precision(const at::Tensor& tensor, Precision precision);

/// 2^-(m + 1) max(|x|, t) with m mantissa bits and the smallest normal number t = max(2^-102,
/// 2^(2 - 2^e) x the power of two at or below @p largest, rounded) with e exponent bits; plus
/// 2^-24 |x|, for double.
double precision_error_bound(Precision precision, double magnitude, double largest);

}  // namespace gradus::compress
