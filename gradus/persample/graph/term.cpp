#include <gradus/persample/graph/term.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/convolution_term.h>
#include <gradus/persample/graph/internal/arithmetic.h>

namespace gradus::persample {

at::Tensor internal::squared_norm_by_example(const at::Tensor& tensor) {
  return at::linalg_vector_norm(tensor.reshape({tensor.size(0), -1}), 2, {1}).square();
}

using internal::squared_norm_by_example;

namespace {

// Gram matrices of this many steps and more are built in blocks, of which symmetry spares near
// half.
constexpr std::int64_t kGramBlock = 64;
constexpr std::int64_t kGramBytes = std::int64_t{32} << 20;
// Tables: up to so many lookups an example are compared each with each, more are sorted.
constexpr std::int64_t kComparedLookups = 64;

// <a[b], b[b]> for each example of two contiguous [B, ...].
at::Tensor dot_by_example(const at::Tensor& left, const at::Tensor& right) {
  const std::int64_t examples = left.size(0);
  return at::bmm(left.reshape({examples, 1, -1}), right.reshape({examples, -1, 1}))
      .view({examples});
}

double count(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }

// Factors as two matrices with one row a (example, step) pair, in the order that memory has.
std::pair<at::Tensor, at::Tensor> as_matrices(at::Tensor rows, at::Tensor columns) {
  if (rows.stride(0) < rows.stride(1)) {
    rows = rows.transpose(0, 1);
    columns = columns.transpose(0, 1);
  }
  return {rows.flatten(0, 1), columns.flatten(0, 1)};
}

// A Linear layer and an Embedding that share one table: tied weights.
class TiedTerm final : public Term {
 public:
  TiedTerm(ProductTerm product, LookupTerm lookup)
      : product_(std::move(product)), lookup_(std::move(lookup)) {}

  std::int64_t examples() const override { return product_.examples(); }
  std::vector<std::int64_t> sizes() const override { return product_.sizes(); }
  at::Tensor form() const override { return product_.form() + lookup_.form(); }
  at::Tensor squared_norms() const override {
    // <sum_t r_t (outer) c_t, sum_s e_{i_s} (outer) v_s> = sum_{t,s} r_t[i_s] <c_t, v_s>.
    const at::Tensor& rows = product_.rows();
    const at::Tensor& indices = lookup_.indices();
    const at::Tensor touched = rows.gather(
        2, indices.clamp_min(0).unsqueeze(1).expand({rows.size(0), rows.size(1), indices.size(1)}));
    const at::Tensor products = at::bmm(product_.columns(), lookup_.values().transpose(1, 2));
    const at::Tensor squares = product_.squared_norms() + lookup_.squared_norms() +
                               2 * dot_by_example(touched, products * (indices >= 0).unsqueeze(1));
    return guarded_squares(
        squares, product_.bounds() + lookup_.bounds(), [&](const at::Tensor& some) {
          return squared_norm_by_example(product_.at(some).form() + lookup_.at(some).form());
        });
  }
  at::Tensor weighted_sum(const at::Tensor& weights) const override {
    return product_.weighted_sum(weights).add_(lookup_.weighted_sum(weights));
  }
  double form_operations() const override {
    return product_.form_operations() + lookup_.form_operations();
  }
  double norm_operations() const override {
    return product_.norm_operations() + lookup_.norm_operations() +
           count(product_.columns()) * static_cast<double>(lookup_.indices().size(1));
  }
  std::int64_t bytes() const override { return product_.bytes() + lookup_.bytes(); }
  std::string describe() const override {
    return base::join("tied ", product_.describe(), " and ", lookup_.describe());
  }

 private:
  ProductTerm product_;
  LookupTerm lookup_;
};

template <typename Kind>
std::vector<const Kind*> terms_of_kind(const std::vector<std::unique_ptr<Term>>& terms) {
  std::vector<const Kind*> found;
  for (const auto& term : terms) {
    if (const auto* const each = dynamic_cast<const Kind*>(term.get())) found.push_back(each);
  }
  return found;
}

// Steps of several uses one after another: all cross terms are then within one Gram matrix.
ProductTerm joined(const std::vector<const ProductTerm*>& terms) {
  if (terms.size() == 1) return *terms.front();
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> columns;
  for (const ProductTerm* const term : terms) {
    rows.push_back(term->rows());
    columns.push_back(term->columns());
  }
  return {at::cat(rows, 1), at::cat(columns, 1)};
}

// The images of several uses one after another, or null if these differ in shape.
std::unique_ptr<Term> joined(const std::vector<const ConvolutionTerm*>& terms) {
  auto sum = std::make_unique<ConvolutionTerm>(*terms.front());
  for (std::size_t i = 1; i < terms.size() && sum != nullptr; ++i) sum = sum->joined(*terms[i]);
  return sum;
}

LookupTerm joined(const std::vector<const LookupTerm*>& terms) {
  if (terms.size() == 1) return *terms.front();
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
  for (const LookupTerm* const term : terms) {
    indices.push_back(term->indices());
    values.push_back(term->values());
  }
  return {at::cat(indices, 1), at::cat(values, 1), terms.front()->sizes()[0]};
}

}  // namespace

at::Tensor widened(const at::Tensor& tensor) {
  const bool narrow = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return narrow ? tensor.to(at::kFloat) : tensor;
}

namespace {

// Squares below this share of their bound's square are formed: above, rounding of a sum of products
// (some units of the bound's square) is a few ten-thousandths of the norm at most.
constexpr double kTrustedShare = 1.0 / 4096;

double unit_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                             : std::numeric_limits<float>::epsilon();
}

}  // namespace

at::Tensor squares_of_formed(const at::Tensor& squares, const at::Tensor& bounds) {
  return (squares.sqrt() + 2 * unit_of(squares) * bounds).square();
}

at::Tensor guarded_squares(const at::Tensor& squares, const at::Tensor& bounds,
                           const std::function<at::Tensor(const at::Tensor&)>& exact) {
  const at::Tensor squared_bounds = bounds.square();
  at::Tensor guarded = squares + unit_of(squares) * squared_bounds;
  const at::Tensor doubtful = (squares < kTrustedShare * squared_bounds).nonzero().flatten();
  if (doubtful.numel() > 0) {
    guarded.index_copy_(0, doubtful,
                        squares_of_formed(exact(doubtful), bounds.index_select(0, doubtful)));
  }
  return guarded;
}

double Term::form_bytes() const {
  double bytes = static_cast<double>(examples()) * sizeof(float);
  for (const std::int64_t size : sizes()) bytes *= static_cast<double>(size);
  return bytes;
}

std::unique_ptr<Term> Term::transposed() const { return nullptr; }
std::unique_ptr<Term> Term::reshaped(const std::vector<std::int64_t>& /*sizes*/) const {
  return nullptr;
}

FormedTerm::FormedTerm(at::Tensor gradients) : gradients_(widened(gradients)) {}

at::Tensor FormedTerm::squared_norms() const { return squared_norm_by_example(gradients_); }

at::Tensor FormedTerm::weighted_sum(const at::Tensor& weights) const {
  const at::Tensor flat = gradients_.reshape({gradients_.size(0), -1});
  return at::mv(flat.t(), weights.to(flat.scalar_type())).view(gradients_.sizes().slice(1));
}

std::string FormedTerm::describe() const { return base::join("formed ", gradients_.sizes()); }

std::unique_ptr<Term> FormedTerm::transposed() const {
  return std::make_unique<FormedTerm>(gradients_.transpose(1, 2));
}

std::unique_ptr<Term> FormedTerm::reshaped(const std::vector<std::int64_t>& sizes) const {
  std::vector<std::int64_t> all = sizes;
  all.insert(all.begin(), gradients_.size(0));
  return std::make_unique<FormedTerm>(gradients_.reshape(all));
}

ProductTerm::ProductTerm(at::Tensor rows, at::Tensor columns)
    : rows_(widened(rows)), columns_(widened(columns)) {}

at::Tensor ProductTerm::form() const { return at::bmm(rows_.transpose(1, 2), columns_); }

namespace {

// A few examples at a time, and forgotten at once.
at::Tensor squares_by_forming(const ProductTerm& term) {
  const at::Tensor &rows = term.rows(), &columns = term.columns();
  const std::int64_t one = rows.size(2) * columns.size(2) * rows.element_size();
  const std::int64_t chunk = std::max<std::int64_t>(1, kGramBytes / std::max<std::int64_t>(1, one));
  std::vector<at::Tensor> norms;
  for (std::int64_t start = 0; start < term.examples(); start += chunk) {
    const std::int64_t length = std::min(chunk, term.examples() - start);
    norms.push_back(squared_norm_by_example(
        at::bmm(rows.narrow(0, start, length).transpose(1, 2), columns.narrow(0, start, length))));
  }
  return at::cat(norms);
}

}  // namespace

at::Tensor ProductTerm::bounds() const {
  return (at::linalg_vector_norm(rows_, 2, {2}) * at::linalg_vector_norm(columns_, 2, {2})).sum(1);
}

ProductTerm ProductTerm::at(const at::Tensor& indices) const {
  return {rows_.index_select(0, indices), columns_.index_select(0, indices)};
}

at::Tensor ProductTerm::squared_norms() const {
  const std::int64_t steps = rows_.size(1);
  if (steps == 1) return squared_norm_by_example(rows_) * squared_norm_by_example(columns_);
  if (form_operations() < norm_operations()) {
    // Forming costs less than a Gram matrix.
    return squares_of_formed(squares_by_forming(*this), bounds());
  }
  const std::int64_t block = std::max(
      kGramBlock, std::min<std::int64_t>(
                      steps, kGramBytes / (2 * examples() * kGramBlock *
                                           static_cast<std::int64_t>(rows_.element_size()))));
  // Two blocks at least where there are enough steps, for the symmetry.
  const std::int64_t size = std::min(block, std::max(kGramBlock, (steps + 3) / 4));
  at::Tensor total = at::zeros({examples()}, rows_.options());
  for (std::int64_t i = 0; i < steps; i += size) {
    const std::int64_t height = std::min(size, steps - i);
    const at::Tensor rows = rows_.narrow(1, i, height);
    const at::Tensor columns = columns_.narrow(1, i, height);
    total += dot_by_example(at::bmm(rows, rows.transpose(1, 2)),
                            at::bmm(columns, columns.transpose(1, 2)));
    for (std::int64_t j = i + size; j < steps; j += size) {
      const std::int64_t width = std::min(size, steps - j);
      const at::Tensor other_rows = rows_.narrow(1, j, width).transpose(1, 2);
      const at::Tensor other_columns = columns_.narrow(1, j, width).transpose(1, 2);
      total.add_(dot_by_example(at::bmm(rows, other_rows), at::bmm(columns, other_columns)), 2);
    }
  }
  return guarded_squares(total, bounds(),
                         [&](const at::Tensor& some) { return squares_by_forming(at(some)); });
}

at::Tensor ProductTerm::weighted_sum(const at::Tensor& weights) const {
  auto [rows, columns] = as_matrices(rows_, columns_);
  const bool step_major = rows_.stride(0) < rows_.stride(1);
  const std::int64_t steps = rows_.size(1);
  const at::Tensor cast = weights.to(rows_.scalar_type());
  const at::Tensor scale = (step_major ? cast.unsqueeze(0).expand({steps, examples()})
                                       : cast.unsqueeze(1).expand({examples(), steps}))
                               .reshape({-1, 1});
  if (rows.size(1) < columns.size(1)) return at::mm((rows * scale).t(), columns);
  return at::mm(rows.t(), columns * scale);
}

double ProductTerm::form_operations() const {
  return 2 * count(rows_) * static_cast<double>(columns_.size(2));
}

double ProductTerm::norm_operations() const {
  const auto steps = static_cast<double>(rows_.size(1));
  // Half of both Gram matrices, by symmetry, and blocks on the diagonal.
  return 1.25 * steps * (count(rows_) + count(columns_));
}

std::int64_t ProductTerm::bytes() const {
  return static_cast<std::int64_t>(rows_.nbytes() + columns_.nbytes());
}

std::string ProductTerm::describe() const {
  return base::join("product ", rows_.sizes(), " x ", columns_.sizes(), " ", rows_.strides(), " ",
                    columns_.strides());
}

std::unique_ptr<Term> ProductTerm::transposed() const {
  return std::make_unique<ProductTerm>(columns_, rows_);
}

LookupTerm::LookupTerm(at::Tensor indices, at::Tensor values, std::int64_t table_rows)
    : indices_(indices.to(at::kLong)), values_(widened(values)), table_rows_(table_rows) {}

namespace {

struct Touched {
  at::Tensor keys{};       // [U] example * table rows + row, ascending
  at::Tensor gradients{};  // [U, D]
};

Touched touched_rows(const LookupTerm& term) {
  const std::int64_t rows = term.sizes()[0];
  const at::Tensor example =
      at::arange(term.examples(), term.indices().options()).unsqueeze(1) * rows;
  const at::Tensor valid = (term.indices() >= 0).flatten();
  const at::Tensor keys = (term.indices() + example).flatten().index({valid});
  const at::Tensor values = term.values().flatten(0, 1).index({valid});
  auto [unique, place, counts] = at::_unique2(keys, /*sorted=*/true, /*return_inverse=*/true);
  at::Tensor gradients = at::zeros({unique.size(0), values.size(1)}, values.options());
  gradients.index_add_(0, place, values);
  return {unique, gradients};
}

}  // namespace

at::Tensor LookupTerm::form() const {
  const std::int64_t width = values_.size(2);
  at::Tensor result = at::zeros({examples() * table_rows_, width}, values_.options());
  const Touched touched = touched_rows(*this);
  result.index_copy_(0, touched.keys, touched.gradients);
  return result.view({examples(), table_rows_, width});
}

at::Tensor LookupTerm::form_sparse() const {
  const Touched touched = touched_rows(*this);
  const at::Tensor places =
      at::stack({touched.keys.floor_divide(table_rows_), touched.keys.remainder(table_rows_)});
  return at::_sparse_coo_tensor_unsafe(places, touched.gradients,
                                       {examples(), table_rows_, values_.size(2)})
      ._coalesced_(true);
}

namespace {

at::Tensor squares_of_touched(const LookupTerm& term) {
  const Touched touched = touched_rows(term);
  at::Tensor total = at::zeros({term.examples()}, term.values().options());
  return total.index_add_(0, touched.keys.floor_divide(term.sizes()[0]),
                          touched.gradients.square().sum(1));
}

}  // namespace

at::Tensor LookupTerm::squared_norms() const {
  if (indices_.size(1) == 1) {
    return squared_norm_by_example(values_) * (indices_.view({-1}) >= 0);
  }
  if (indices_.size(1) <= kComparedLookups) {
    const at::Tensor left = indices_.unsqueeze(2);
    const at::Tensor same = (left == indices_.unsqueeze(1)).logical_and_(left >= 0);
    const at::Tensor squares =
        dot_by_example(at::bmm(values_, values_.transpose(1, 2)), same.to(values_.scalar_type()));
    return guarded_squares(squares, bounds(),
                           [&](const at::Tensor& some) { return squares_of_touched(at(some)); });
  }
  return squares_of_formed(squares_of_touched(*this), bounds());
}

at::Tensor LookupTerm::bounds() const { return at::linalg_vector_norm(values_, 2, {2}).sum(1); }

LookupTerm LookupTerm::at(const at::Tensor& indices) const {
  return {indices_.index_select(0, indices), values_.index_select(0, indices), table_rows_};
}

at::Tensor LookupTerm::weighted_sum(const at::Tensor& weights) const {
  at::Tensor result = at::zeros({table_rows_, values_.size(2)}, values_.options());
  const at::Tensor factors =
      weights.to(values_.scalar_type()).unsqueeze(1) * (indices_ >= 0);  // [B, T]
  return result.index_add_(0, indices_.clamp_min(0).flatten(),
                           (values_ * factors.unsqueeze(2)).flatten(0, 1));
}

double LookupTerm::form_operations() const {
  return static_cast<double>(examples()) * static_cast<double>(table_rows_ * values_.size(2));
}

double LookupTerm::norm_operations() const {
  return count(values_) * static_cast<double>(std::min(indices_.size(1), kComparedLookups));
}

std::int64_t LookupTerm::bytes() const {
  return static_cast<std::int64_t>(indices_.nbytes() + values_.nbytes());
}

std::string LookupTerm::describe() const {
  return base::join("lookup ", values_.sizes(), " of ", table_rows_);
}

std::unique_ptr<Term> sum_of(std::vector<std::unique_ptr<Term>> terms) {
  GRADUS_CHECK("persample", !terms.empty(), "at least one term is required; got none");
  if (terms.size() == 1) return std::move(terms.front());
  const auto products = terms_of_kind<ProductTerm>(terms);
  const auto lookups = terms_of_kind<LookupTerm>(terms);
  if (products.size() == terms.size()) return std::make_unique<ProductTerm>(joined(products));
  if (lookups.size() == terms.size()) return std::make_unique<LookupTerm>(joined(lookups));
  if (products.size() + lookups.size() == terms.size()) {
    return std::make_unique<TiedTerm>(joined(products), joined(lookups));
  }
  if (terms_of_kind<ConvolutionTerm>(terms).size() == terms.size()) {
    if (auto joined_images = joined(terms_of_kind<ConvolutionTerm>(terms))) return joined_images;
  }
  at::Tensor total = terms.front()->form().clone();
  for (std::size_t i = 1; i < terms.size(); ++i) total += terms[i]->form();
  return std::make_unique<FormedTerm>(total);
}

}  // namespace gradus::persample
