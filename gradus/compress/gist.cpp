#include <gradus/compress/gist.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <gradus/base/error.h>
#include <gradus/compress/internal/dense.h>
#include <gradus/compress/internal/kernels.h>

namespace gradus::compress {
namespace {

using internal::bitmap_words;
using internal::DenseLayout;
using plane::saved::Packed;

using Tensors = std::vector<at::Tensor>;

struct Rule {
  std::string_view maker;
  Need need;
};

// From LibTorch's derivatives.yaml and the CPU kernels behind it:
//   relu, relu_          threshold_backward(grad, result, 0): x <= 0 ? 0 : grad, so NaN passes.
//   leaky_relu(_)        leaky_relu_backward(grad, self or result, slope): x > 0 ? grad : grad *
//   slope. max_pool*, avg_pool* read the input's sizes and memory format; max_pool also its own
//   indices.
// threshold, hardtanh and clamp compare with an argument that a saved tensor does not show: they
// are not here.
constexpr std::array kRules{
    Rule{"aten::relu", Need::positive_or_nan},
    Rule{"aten::relu_", Need::positive_or_nan},
    Rule{"aten::leaky_relu", Need::positive},
    Rule{"aten::leaky_relu_", Need::positive},
    Rule{"aten::max_pool2d_with_indices", Need::shape},
    Rule{"aten::max_pool3d_with_indices", Need::shape},
    Rule{"aten::adaptive_max_pool2d", Need::shape},
    Rule{"aten::adaptive_max_pool3d", Need::shape},
    Rule{"aten::avg_pool2d", Need::shape},
    Rule{"aten::avg_pool3d", Need::shape},
    Rule{"aten::_adaptive_avg_pool2d", Need::shape},
    Rule{"aten::_adaptive_avg_pool3d", Need::shape},
};

at::Tensor make_bitmap(std::int64_t values) {
  return internal::make_array(bitmap_words(values) * 8, at::kByte);
}

std::uint64_t* words(const at::Tensor& bitmap) {
  return static_cast<std::uint64_t*>(bitmap.mutable_data_ptr());
}

const std::uint64_t* const_words(const at::Tensor& bitmap) {
  return static_cast<const std::uint64_t*>(bitmap.const_data_ptr());
}

template <typename Word>
const Word* values_of(const at::Tensor& tensor) {
  return static_cast<const Word*>(tensor.const_data_ptr());
}

template <typename Word>
Word* new_values_of(const at::Tensor& tensor) {
  return static_cast<Word*>(tensor.mutable_data_ptr());
}

// Calls fn with a zero of the unsigned type as wide as the tensor's elements.
template <typename Fn>
auto with_word(std::size_t element_size, Fn fn) -> decltype(fn(std::uint32_t{})) {
  switch (element_size) {
    case 1:
      return fn(std::uint8_t{});
    case 2:
      return fn(std::uint16_t{});
    case 4:
      return fn(std::uint32_t{});
    case 8:
      return fn(std::uint64_t{});
    default:
      return {};
  }
}

template <typename Fn>
auto with_real(at::ScalarType dtype, Fn fn) -> decltype(fn(float{})) {
  switch (dtype) {
    case at::kFloat:
      return fn(float{});
    case at::kDouble:
      return fn(double{});
    case at::kHalf:
      return fn(at::Half{});
    case at::kBFloat16:
      return fn(at::BFloat16{});
    default:
      return {};
  }
}

// Evenly spaced values, for a first guess.
constexpr std::int64_t kSamples = 1024;

template <typename Word, typename Fn>
void for_samples(const Word* x, std::int64_t n, Fn fn) {
  const std::int64_t samples = std::min(n, kSamples);
  const std::int64_t step = n / samples;
  // fn tells whether to go on. The place within each step moves: rows may be alike.
  for (std::int64_t i = 0; i < samples; ++i) {
    if (!fn(x[i * step + i % step])) return;
  }
}

// A bitmap and the bit patterns of its two values.
template <typename Word>
Packed selection(at::Tensor bitmap, DenseLayout layout, Word zero, Word one) {
  return {{std::move(bitmap)}, [layout = std::move(layout), zero, one](Tensors payload) {
            at::Tensor tensor = layout.make();
            internal::word_kernels<Word>().select(const_words(payload.at(0)), layout.numel(), zero,
                                                  one, new_values_of<Word>(tensor));
            return tensor;
          }};
}

template <typename Real>
Packed binarized(const at::Tensor& tensor, DenseLayout layout, bool nan) {
  using Word =
      std::conditional_t<sizeof(Real) == 2, std::uint16_t,
                         std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>>;
  at::Tensor bitmap = make_bitmap(layout.numel());
  internal::word_kernels<Word>().positive(
      values_of<Word>(tensor), layout.numel(),
      std::bit_cast<Word>(std::numeric_limits<Real>::infinity()), nan, words(bitmap));
  return selection<Word>(std::move(bitmap), std::move(layout), 0,
                         std::bit_cast<Word>(static_cast<Real>(1.0F)));
}

template <typename Word>
std::optional<Packed> sparse(const at::Tensor& tensor, DenseLayout layout, double max_ratio,
                             bool sample) {
  const std::int64_t n = layout.numel();
  const auto* const x = values_of<Word>(tensor);
  // 1 bit for each value and the others in full.
  const double max_kept = (max_ratio - 1.0 / (8.0 * sizeof(Word))) * static_cast<double>(n);
  if (sample) {
    std::int64_t kept = 0;
    for_samples(x, n, [&](Word value) {
      kept += value != 0 ? 1 : 0;
      return true;
    });
    // A margin of three standard deviations of a share near one half, over a thousand samples.
    const double share = static_cast<double>(kept) / static_cast<double>(std::min(n, kSamples));
    if (share * static_cast<double>(n) > max_kept + 0.05 * static_cast<double>(n)) {
      return std::nullopt;
    }
  }
  at::Tensor bitmap = make_bitmap(n);
  const auto& kernels = internal::word_kernels<Word>();
  const std::int64_t kept = kernels.nonzero(x, n, words(bitmap));
  if (static_cast<double>(bitmap.numel() + kept * static_cast<std::int64_t>(sizeof(Word))) >
      max_ratio * static_cast<double>(n) * sizeof(Word)) {
    return std::nullopt;
  }
  at::Tensor values = internal::make_array(kept, layout.dtype());
  if (kept > 0) kernels.compact(x, n, const_words(bitmap), new_values_of<Word>(values));
  return Packed{{std::move(bitmap), std::move(values)},
                [layout = std::move(layout)](Tensors payload) {
                  at::Tensor out = layout.make();
                  internal::word_kernels<Word>().expand(const_words(payload.at(0)), layout.numel(),
                                                        values_of<Word>(payload.at(1)),
                                                        new_values_of<Word>(out));
                  return out;
                }};
}

template <typename Word>
std::optional<Packed> two_valued(const at::Tensor& tensor, DenseLayout layout) {
  const auto* const x = values_of<Word>(tensor);
  const Word zero = x[0];
  Word one = zero;
  bool more = false;
  for_samples(x, layout.numel(), [&](Word value) {
    if (value == zero || value == one) return true;
    more = one != zero;
    one = value;
    return !more;
  });
  if (more) return std::nullopt;
  at::Tensor bitmap = make_bitmap(layout.numel());
  if (!internal::word_kernels<Word>().either(x, layout.numel(), zero, one, words(bitmap))) {
    return std::nullopt;
  }
  return selection<Word>(std::move(bitmap), std::move(layout), zero, one);
}

template <typename Narrow>
Packed narrowed(const at::Tensor& tensor, DenseLayout layout, at::ScalarType dtype) {
  at::Tensor small = internal::make_array(layout.numel(), dtype);
  const auto* const x = values_of<std::int64_t>(tensor);
  auto* const out = new_values_of<Narrow>(small);
  for (std::int64_t i = 0; i < layout.numel(); ++i) out[i] = static_cast<Narrow>(x[i]);
  return {{std::move(small)}, [layout = std::move(layout)](Tensors payload) {
            at::Tensor wide = layout.make();
            const auto* const in = values_of<Narrow>(payload.at(0));
            auto* const values = new_values_of<std::int64_t>(wide);
            for (std::int64_t i = 0; i < layout.numel(); ++i) values[i] = in[i];
            return wide;
          }};
}

internal::Minifloat format_of(Precision precision) {
  switch (precision) {
    case Precision::bf16:
      return {.exponent_bits = 8, .mantissa_bits = 7};
    case Precision::fp16:
      return {.exponent_bits = 5, .mantissa_bits = 10};
    case Precision::fp10:
      return {.exponent_bits = 5, .mantissa_bits = 4};
    case Precision::fp8:
      break;
  }
  return {.exponent_bits = 4, .mantissa_bits = 3};
}

// The steps of subnormals, and their inverses, must be normal floats.
constexpr std::int32_t kLeastBase = 24;

template <typename Real>
std::optional<Packed> reduced(const at::Tensor& tensor, DenseLayout layout,
                              internal::Minifloat format) {
  constexpr std::uint32_t kInfinity = 0x7f800000;
  const std::int64_t n = layout.numel();
  const std::int64_t bytes = internal::code_bytes(n, format.bits());
  if (bytes >= n * static_cast<std::int64_t>(sizeof(Real))) return std::nullopt;
  const auto& kernels = internal::real_kernels<Real>();
  const auto* const x = values_of<Real>(tensor);
  // The top exponent is that of the largest value once rounded, which must not round to infinity.
  const std::uint32_t largest = kernels.largest(x, n);
  const std::uint32_t rounded = largest + (1U << (22 - format.mantissa_bits));
  if (largest >= kInfinity || rounded >= kInfinity) return std::nullopt;
  format.base = std::max(
      kLeastBase, static_cast<std::int32_t>(rounded >> 23) - ((1 << format.exponent_bits) - 1));
  at::Tensor codes = internal::make_array(bytes, at::kByte);
  kernels.encode(x, n, format, new_values_of<std::uint8_t>(codes));
  return Packed{{std::move(codes)}, [layout = std::move(layout), format](Tensors payload) {
                  at::Tensor out = layout.make();
                  internal::real_kernels<Real>().decode(values_of<std::uint8_t>(payload.at(0)),
                                                        layout.numel(), format,
                                                        new_values_of<Real>(out));
                  return out;
                }};
}

}  // namespace

Need need_of(std::string_view maker, const at::Tensor& tensor) {
  const auto* const rule =
      std::find_if(kRules.begin(), kRules.end(), [&](const Rule& r) { return r.maker == maker; });
  if (rule == kRules.end()) return Need::values;
  if (tensor.is_floating_point()) return rule->need;
  return rule->need == Need::shape && tensor.scalar_type() == at::kLong ? Need::positions
                                                                        : Need::values;
}

std::optional<Packed> binarize(const at::Tensor& tensor, Need need) {
  GRADUS_CHECK("compress", need == Need::positive || need == Need::positive_or_nan,
               "binarize keeps whether values are positive; got a need for something else. Use "
               "pack_sparse for values");
  const auto layout = DenseLayout::of(tensor);
  if (!layout) return std::nullopt;
  return with_real(tensor.scalar_type(), [&](auto real) -> std::optional<Packed> {
    return binarized<decltype(real)>(tensor, *layout, need == Need::positive_or_nan);
  });
}

std::optional<Packed> keep_shape(const at::Tensor& tensor) {
  const auto layout = DenseLayout::of(tensor);
  if (!layout) return std::nullopt;
  if (!with_real(tensor.scalar_type(), [](auto) { return true; })) return std::nullopt;
  if (tensor.is_contiguous() && tensor.suggest_memory_format() == at::MemoryFormat::Contiguous) {
    return Packed{{}, [sizes = tensor.sizes().vec(), dtype = tensor.scalar_type()](Tensors) {
                    return internal::make_repeated(sizes, dtype,
                                                   std::numeric_limits<double>::quiet_NaN());
                  }};
  }
  // Strides are told from sizes that differ: a full tensor is needed, though not its values.
  return Packed{{}, [layout = *layout](Tensors) { return layout.make(); }};
}

std::optional<Packed> pack_sparse(const at::Tensor& tensor, double max_ratio, bool sample) {
  GRADUS_CHECK("compress", max_ratio > 0 && max_ratio <= 1, "max_ratio must be in (0, 1]; got ",
               max_ratio);
  const auto layout = DenseLayout::of(tensor);
  if (!layout) return std::nullopt;
  return with_word(tensor.element_size(), [&](auto word) -> std::optional<Packed> {
    return sparse<decltype(word)>(tensor, *layout, max_ratio, sample);
  });
}

std::optional<Packed> pack_two_valued(const at::Tensor& tensor) {
  const auto layout = DenseLayout::of(tensor);
  if (!layout) return std::nullopt;
  return with_word(tensor.element_size(), [&](auto word) -> std::optional<Packed> {
    return two_valued<decltype(word)>(tensor, *layout);
  });
}

std::optional<Packed> narrow_integers(const at::Tensor& tensor) {
  const auto layout = DenseLayout::of(tensor);
  if (!layout || tensor.scalar_type() != at::kLong) return std::nullopt;
  // The bits that any value has set tell how many bytes all of them need.
  const auto* const x = values_of<std::uint64_t>(tensor);
  std::uint64_t set = 0;
  for (std::int64_t i = 0; i < layout->numel(); ++i) set |= x[i];
  if (set <= std::numeric_limits<std::uint8_t>::max()) {
    return narrowed<std::uint8_t>(tensor, *layout, at::kByte);
  }
  // In a tensor of signed 16-bit values, which more operators take than unsigned ones.
  if (set <= std::numeric_limits<std::uint16_t>::max()) {
    return narrowed<std::uint16_t>(tensor, *layout, at::kShort);
  }
  if (set <= std::numeric_limits<std::int32_t>::max()) {
    return narrowed<std::int32_t>(tensor, *layout, at::kInt);
  }
  return std::nullopt;
}

std::optional<Packed> reduce_precision(const at::Tensor& tensor, Precision precision) {
  const auto layout = DenseLayout::of(tensor);
  if (!layout) return std::nullopt;
  return with_real(tensor.scalar_type(), [&](auto real) -> std::optional<Packed> {
    return reduced<decltype(real)>(tensor, *layout, format_of(precision));
  });
}

double precision_error_bound(Precision precision, double magnitude, double largest) {
  const internal::Minifloat format = format_of(precision);
  const double rounding = std::exp2(-format.mantissa_bits - 1);
  const double top = largest > 0 ? std::exp2(std::floor(std::log2(largest * (1 + rounding)))) : 0;
  const double least_normal =
      std::max(0x1p-102, top * std::exp2(2 - std::exp2(format.exponent_bits)));
  return rounding * std::max(std::abs(magnitude), least_normal) + 0x1p-24 * std::abs(magnitude);
}

}  // namespace gradus::compress
