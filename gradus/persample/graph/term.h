#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::persample {

/// One contribution to the per-sample gradients of one parameter, perhaps not yet formed: a rule
/// gives factors, and what is asked of them decides what is computed. Values are float32, or
/// float64 where the operator computed in it. Shapes: B examples.
class Term {
 public:
  virtual ~Term() = default;

  virtual std::int64_t examples() const = 0;
  /// Shape of the parameter (or operand) that this is a gradient of.
  virtual std::vector<std::int64_t> sizes() const = 0;

  /// The per-sample gradients, [B, *sizes].
  virtual at::Tensor form() const = 0;
  /// Squared L2 norm of each example's gradient, [B], without forming it where that is possible.
  virtual at::Tensor squared_norms() const = 0;
  /// Sum over examples of weights[b] * gradient[b], in shape sizes(). @p weights [B].
  virtual at::Tensor weighted_sum(const at::Tensor& weights) const = 0;

  /// Floating-point operations that form() takes, and squared_norms(): what choose() compares
  /// where it may not measure.
  virtual double form_operations() const = 0;
  virtual double norm_operations() const = 0;
  /// Bytes of factors kept until the weighted sum.
  virtual std::int64_t bytes() const = 0;
  /// Bytes of what form() gives.
  double form_bytes() const;
  /// Kind and shapes, equal for terms that cost the same: "product [64, 128, 256] x [64, 128,
  /// 512]".
  virtual std::string describe() const = 0;

  /// Of several ways to compute the same, takes the one that is fastest where it runs; without this
  /// call, the one of fewest counted operations.
  virtual void choose_by_measurement() {}

  /// The gradient of the transposed matrix, or null if the term does not know how.
  virtual std::unique_ptr<Term> transposed() const;
  /// The same gradient in another shape of as many elements in the same order, or null.
  virtual std::unique_ptr<Term> reshaped(const std::vector<std::int64_t>& sizes) const;
};

/// Gradients that are formed: [B, *sizes].
class FormedTerm final : public Term {
 public:
  explicit FormedTerm(at::Tensor gradients);

  std::int64_t examples() const override { return gradients_.size(0); }
  std::vector<std::int64_t> sizes() const override { return gradients_.sizes().slice(1).vec(); }
  at::Tensor form() const override { return gradients_; }
  at::Tensor squared_norms() const override;
  at::Tensor weighted_sum(const at::Tensor& weights) const override;
  double form_operations() const override { return 0; }
  double norm_operations() const override { return static_cast<double>(gradients_.numel()); }
  std::int64_t bytes() const override { return static_cast<std::int64_t>(gradients_.nbytes()); }
  std::string describe() const override;
  std::unique_ptr<Term> transposed() const override;
  std::unique_ptr<Term> reshaped(const std::vector<std::int64_t>& sizes) const override;

 private:
  at::Tensor gradients_;
};

/// Matrix gradients sum_t rows[b, t, :] (outer) columns[b, t, :], as a Linear layer has them
/// (rows: gradients of the outputs, columns: inputs). Norms by Gram matrices: ||R^T C||^2 = <R R^T,
/// C C^T> (Goodfellow 2015 for one step; Li et al. 2021, "Large language models can be strong
/// differentially private learners", section 4, for T steps).
class ProductTerm final : public Term {
 public:
  /// @p rows [B, T, p], @p columns [B, T, d].
  ProductTerm(at::Tensor rows, at::Tensor columns);

  std::int64_t examples() const override { return rows_.size(0); }
  std::vector<std::int64_t> sizes() const override { return {rows_.size(2), columns_.size(2)}; }
  at::Tensor form() const override;
  at::Tensor squared_norms() const override;
  at::Tensor weighted_sum(const at::Tensor& weights) const override;
  double form_operations() const override;
  double norm_operations() const override;
  std::int64_t bytes() const override;
  std::string describe() const override;
  std::unique_ptr<Term> transposed() const override;

  /// sum_t |rows[b, t]| |columns[b, t]|, [B]: what the norm would be if no two steps cancelled.
  at::Tensor bounds() const;
  /// Of the examples at @p indices (long).
  ProductTerm at(const at::Tensor& indices) const;

  const at::Tensor& rows() const { return rows_; }
  const at::Tensor& columns() const { return columns_; }

 private:
  at::Tensor rows_;
  at::Tensor columns_;
};

/// Matrix gradients of a table: sum_t e_{indices[b, t]} (outer) values[b, t, :]. Norms and
/// sums cost what the touched rows cost. Index -1 touches none.
class LookupTerm final : public Term {
 public:
  /// @p indices [B, T] long, @p values [B, T, D], @p table_rows the table's number of rows.
  LookupTerm(at::Tensor indices, at::Tensor values, std::int64_t table_rows);

  std::int64_t examples() const override { return values_.size(0); }
  std::vector<std::int64_t> sizes() const override { return {table_rows_, values_.size(2)}; }
  at::Tensor form() const override;
  at::Tensor squared_norms() const override;
  at::Tensor weighted_sum(const at::Tensor& weights) const override;
  double form_operations() const override;
  double norm_operations() const override;
  std::int64_t bytes() const override;
  std::string describe() const override;

  /// sum_t |values[b, t]|, [B].
  at::Tensor bounds() const;
  /// Of the examples at @p indices (long).
  LookupTerm at(const at::Tensor& indices) const;

  const at::Tensor& indices() const { return indices_; }
  const at::Tensor& values() const { return values_; }
  /// The gradients as one sparse tensor [B, rows, D], duplicate rows summed.
  at::Tensor form_sparse() const;

 private:
  at::Tensor indices_;
  at::Tensor values_;
  std::int64_t table_rows_;
};

/// Squared norms that a sum of products gave, so that a gradient clipped by them is never longer
/// than it should be. A norm that is small beside its products, as when steps nearly cancel, is
/// rounding: where that may be, @p exact forms the gradients of those examples (indices, long) and
/// gives their squared norms. What rounding may have taken elsewhere is added.
/// @param squares  [B].
/// @param bounds   [B], sum_t |r_t| |c_t| of the products or more.
at::Tensor guarded_squares(const at::Tensor& squares, const at::Tensor& bounds,
                           const std::function<at::Tensor(const at::Tensor& examples)>& exact);

/// Squared norms of formed gradients whose weighted sum comes from the factors, whose rounding is
/// relative to @p bounds.
at::Tensor squares_of_formed(const at::Tensor& squares, const at::Tensor& bounds);

/// The sum of terms of one parameter that is used several times: norms hold the cross terms.
std::unique_ptr<Term> sum_of(std::vector<std::unique_ptr<Term>> terms);

/// Float32 for 16-bit types, else as it is: norms and sums are never taken in 16 bits.
at::Tensor widened(const at::Tensor& tensor);

}  // namespace gradus::persample
