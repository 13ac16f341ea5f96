#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/graph/term.h>

namespace gradus::persample {

/// How a weight gradient correlates its two factors. One value for each spatial dimension.
struct Correlation {
  std::vector<std::int64_t> kernel{};
  std::vector<std::int64_t> stride{};
  std::vector<std::int64_t> padding{};  ///< Zeros around the wide factor, on both sides.
  std::vector<std::int64_t> dilation{};
  std::int64_t groups = 1;
};

/// Weight gradients of convolutions of 1 to 3 spatial dimensions:
///
///     gradient[b, o, c, k] = sum_{i, t} narrow[b, i, o, t] wide[b, i, c, stride t + dilation k -
///     padding]
///
/// wide is the input and narrow the output's gradient; of a transposed convolution it is the other
/// way round, and all else is the same. Shapes: B examples of I images each (more than one where a
/// model folds time into the batch).
class ConvolutionTerm final : public Term {
 public:
  /// How gradients are formed.
  enum class Form : std::uint8_t {
    unfold,       ///< Patches of the wide factor as a matrix (im2col), a few examples at a time.
    convolution,  ///< Each example's gradient as a convolution of its own: no patches in memory.
  };
  /// How norms are computed where gradients are not kept.
  enum class Norms : std::uint8_t {
    patches,    ///< Gram matrices of patches (Bu et al. 2022, "Scalable and efficient training of
                ///< large convolutional neural networks with differential privacy", eq. 2.1).
    positions,  ///< Gram matrices of the wide factor itself, of which those of patches are sums of
                ///< shifted parts: kernel / stride times less to multiply in each dimension.
    forget,     ///< Gradients formed a few examples at a time and forgotten.
  };

  /// @p wide [B, I, C, *wide extents], @p narrow [B, I, O, *narrow extents]; where 16-bit, they are
  /// widened a part at a time.
  /// @throws UserError if the extents do not fit each other.
  ConvolutionTerm(at::Tensor wide, at::Tensor narrow, Correlation correlation);

  std::int64_t examples() const override { return narrow_.size(0); }
  /// [O, C / groups, *kernel], or what reshaped() was asked for.
  std::vector<std::int64_t> sizes() const override { return sizes_; }
  at::Tensor form() const override { return form(form_); }
  at::Tensor squared_norms() const override { return squared_norms(norms_); }
  /// One convolution whose gradient is scaled by example.
  at::Tensor weighted_sum(const at::Tensor& weights) const override;
  double form_operations() const override { return operations(form_); }
  double norm_operations() const override { return operations(norms_); }
  std::int64_t bytes() const override;
  std::string describe() const override;
  std::unique_ptr<Term> reshaped(const std::vector<std::int64_t>& sizes) const override;
  /// Measures the ways on a few examples, once for all terms that describe() themselves alike.
  void choose_by_measurement() override;

  at::Tensor form(Form way) const;
  at::Tensor squared_norms(Norms way) const;
  /// Counted operations, in which a copied or written element counts for what it costs.
  double operations(Form way) const;
  double operations(Norms way) const;
  Form form_way() const { return form_; }
  Norms norms_way() const { return norms_; }

  /// The sum of two uses of one weight as one term of more images, or null if they differ in shape.
  std::unique_ptr<ConvolutionTerm> joined(const ConvolutionTerm& other) const;

 private:
  at::Tensor form_range(Form way, std::int64_t first, std::int64_t count) const;
  at::Tensor gradient_of(const at::Tensor& wide, const at::Tensor& narrow) const;
  at::Tensor patch_norms(std::int64_t first, std::int64_t count) const;
  at::Tensor position_norms(std::int64_t first, std::int64_t count) const;
  std::int64_t chunk(double bytes_of_one, double budget) const;
  ConvolutionTerm first_examples(std::int64_t count) const;
  double element_size() const;

  at::Tensor wide_;
  at::Tensor narrow_;
  Correlation correlation_;
  std::vector<std::int64_t> weight_sizes_;
  std::vector<std::int64_t> sizes_;
  Form form_ = Form::convolution;
  Norms norms_ = Norms::forget;
};

}  // namespace gradus::persample
