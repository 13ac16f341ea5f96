#include <gradus/persample/graph/convolution_term.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/internal/arithmetic.h>
#include <gradus/persample/graph/internal/patches.h>

namespace gradus::persample {

using internal::milliseconds_of;
using internal::squared_norm_by_example;

namespace {

using internal::Grid;
using internal::Triple;

// What is unfolded at once should stay in the cache of one core.
constexpr double kPatchBytes = 256.0 * 1024;
constexpr double kGramBytes = 1024.0 * 1024;
constexpr double kForgottenBytes = 4.0 * 1024 * 1024;
// More than this for one example is refused where there is another way.
constexpr double kOneExampleBytes = 64.0 * 1024 * 1024;

// Costs in floating-point operations at the rate of a large product, fitted to one core.
constexpr double kCopied = 30;        // an element into patches
constexpr double kWritten = 120;      // an element of a formed gradient, by a product
constexpr double kWrittenOnce = 20;   // the same by a convolution, from registers
constexpr double kShifted = 4;        // a product of shifted Gram matrices
constexpr double kCall = 4e6;         // a convolution
constexpr double kProductCall = 3e4;  // one of a batch of products

// Gram matrices of more positions than twice this are computed in blocks, without what symmetry
// gives.
constexpr std::int64_t kGramBlock = 64;

constexpr std::int64_t kMeasuredExamples = 8;
constexpr double kWorthMeasuring = 6;  // times the fewest counted operations

double as_double(std::int64_t value) { return static_cast<double>(value); }

// [n, I, C, *] as [n * groups, C / groups, I * positions].
at::Tensor as_matrices(const at::Tensor& values, std::int64_t groups) {
  const std::int64_t count = values.size(0);
  return values.transpose(1, 2).reshape({count * groups, values.size(2) / groups, -1});
}

std::vector<Triple> taps_of(const Grid& grid) {
  std::vector<Triple> taps;
  for (std::int64_t a = 0; a < grid.kernel[0]; ++a) {
    for (std::int64_t b = 0; b < grid.kernel[1]; ++b) {
      for (std::int64_t c = 0; c < grid.kernel[2]; ++c) {
        taps.push_back({a * grid.dilation[0], b * grid.dilation[1], c * grid.dilation[2]});
      }
    }
  }
  return taps;
}

// The positions of the wide factor that the taps touch, by their remainder modulo the stride, which
// all positions of one tap share. Within one class a tap is a shift.
struct Positions {
  Triple extents{};
  std::map<Triple, std::vector<std::int64_t>> shifts{};  // of flat indices, by class
  std::int64_t largest_shift = 0;
};

Positions positions_of(const Grid& grid) {
  Positions positions;
  for (std::size_t dim = 0; dim < 3; ++dim) {
    positions.extents[dim] =
        grid.narrow[dim] + (grid.kernel[dim] - 1) * grid.dilation[dim] / grid.stride[dim];
  }
  for (const Triple& tap : taps_of(grid)) {
    Triple remainder{};
    std::int64_t shift = 0;
    for (std::size_t dim = 0; dim < 3; ++dim) {
      remainder[dim] = tap[dim] % grid.stride[dim];
      shift = shift * positions.extents[dim] + tap[dim] / grid.stride[dim];
    }
    positions.shifts[remainder].push_back(shift);
    positions.largest_shift = std::max(positions.largest_shift, shift);
  }
  return positions;
}

Triple minus(const Triple& left, const Triple& right) {
  return {left[0] - right[0], left[1] - right[1], left[2] - right[2]};
}

// values^T values of [n, C, P], right of the diagonal at least.
at::Tensor gram_of(const at::Tensor& values) {
  const std::int64_t count = values.size(0);
  const std::int64_t size = values.size(2);
  if (size < 2 * kGramBlock) return at::bmm(values.transpose(1, 2), values);
  at::Tensor result = at::empty({count, size, size}, values.options());
  const std::int64_t block = std::max(kGramBlock, (size + 4) / 5);
  for (std::int64_t each = 0; each < count; ++each) {
    const at::Tensor one = values.select(0, each);
    for (std::int64_t start = 0; start < size; start += block) {
      const std::int64_t height = std::min(block, size - start);
      at::Tensor rows =
          result.select(0, each).narrow(0, start, height).narrow(1, start, size - start);
      at::mm_out(rows, one.narrow(1, start, height).t(), one.narrow(1, start, size - start));
    }
  }
  return result;
}

bool is_identity(const Grid& grid) {
  return grid.kernel == Triple{1, 1, 1} && grid.stride == Triple{1, 1, 1} &&
         grid.padding == Triple{0, 0, 0};
}

// Patches of [n, I, C, *wide] as [n * groups, C / groups * kernel, I * narrow positions].
at::Tensor patches_of(const at::Tensor& wide, const Grid& grid, std::int64_t groups) {
  if (is_identity(grid)) return as_matrices(wide, groups);
  std::vector<Triple> offsets = taps_of(grid);
  for (Triple& offset : offsets) offset = minus(offset, grid.padding);
  const at::Tensor windows = internal::gather_windows(wide, grid.stride, offsets, grid.narrow);
  return windows.view({wide.size(0) * groups,
                       wide.size(2) / groups * static_cast<std::int64_t>(offsets.size()), -1});
}

struct Ways {
  ConvolutionTerm::Form form = ConvolutionTerm::Form::convolution;
  ConvolutionTerm::Norms norms = ConvolutionTerm::Norms::forget;
};

// What was measured, for the life of the process.
class Measured {
 public:
  static Measured& instance() {
    static Measured measured;
    return measured;
  }
  bool find(const std::string& key, Ways& ways) const {
    const std::lock_guard lock(mutex_);
    const auto found = ways_.find(key);
    if (found == ways_.end()) return false;
    ways = found->second;
    return true;
  }
  void add(const std::string& key, const Ways& ways) {
    const std::lock_guard lock(mutex_);
    ways_.emplace(key, ways);
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Ways> ways_;
};

constexpr ConvolutionTerm::Form kForms[] = {ConvolutionTerm::Form::unfold,
                                            ConvolutionTerm::Form::convolution};
constexpr ConvolutionTerm::Norms kNorms[] = {ConvolutionTerm::Norms::patches,
                                             ConvolutionTerm::Norms::positions,
                                             ConvolutionTerm::Norms::forget};

}  // namespace

ConvolutionTerm::ConvolutionTerm(at::Tensor wide, at::Tensor narrow, Correlation correlation)
    : wide_(std::move(wide)), narrow_(std::move(narrow)), correlation_(std::move(correlation)) {
  const std::size_t dims = correlation_.kernel.size();
  GRADUS_CHECK("persample",
               dims >= 1 && dims <= 3 && wide_.dim() == static_cast<std::int64_t>(dims) + 3 &&
                   narrow_.dim() == wide_.dim() && wide_.size(0) == narrow_.size(0) &&
                   wide_.size(1) == narrow_.size(1),
               "factors [B, I, channels, *extents] with 1 to 3 extents are required; got ",
               wide_.sizes(), " and ", narrow_.sizes());
  const std::int64_t groups = correlation_.groups;
  GRADUS_CHECK("persample", wide_.size(2) % groups == 0 && narrow_.size(2) % groups == 0,
               "channels that divide into ", groups, " groups are required; got ", wide_.size(2),
               " and ", narrow_.size(2));
  for (std::size_t dim = 0; dim < dims; ++dim) {
    const auto at = static_cast<std::int64_t>(dim) + 3;
    const std::int64_t reach = correlation_.dilation[dim] * (correlation_.kernel[dim] - 1) + 1;
    const std::int64_t fits =
        (wide_.size(at) + 2 * correlation_.padding[dim] - reach) / correlation_.stride[dim] + 1;
    GRADUS_CHECK("persample", fits == narrow_.size(at), "a narrow factor of extent ", fits,
                 " in dimension ", dim, " is required; got ", narrow_.size(at));
  }
  weight_sizes_ = {narrow_.size(2), wide_.size(2) / groups};
  weight_sizes_.insert(weight_sizes_.end(), correlation_.kernel.begin(), correlation_.kernel.end());
  sizes_ = weight_sizes_;
  for (const Form way : kForms) {
    if (operations(way) < operations(form_)) form_ = way;
  }
  for (const Norms way : kNorms) {
    if (operations(way) < operations(norms_)) norms_ = way;
  }
}

std::int64_t ConvolutionTerm::bytes() const {
  return static_cast<std::int64_t>(wide_.nbytes() + narrow_.nbytes());
}

double ConvolutionTerm::element_size() const {
  return narrow_.scalar_type() == at::kDouble ? 8 : 4;
}

std::int64_t ConvolutionTerm::chunk(double bytes_of_one, double budget) const {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(budget / std::max(1.0, bytes_of_one)),
                                  1, std::max<std::int64_t>(1, examples()));
}

double ConvolutionTerm::operations(Form way) const {
  const Grid grid = internal::grid_of(correlation_, wide_, narrow_);
  const double count = as_double(examples());
  const double taps = as_double(internal::product_of(grid.kernel));
  const double steps = as_double(narrow_.size(1) * internal::product_of(grid.narrow));
  const double written =
      as_double(narrow_.size(2) * wide_.size(2)) * taps / as_double(correlation_.groups);
  if (way == Form::convolution) {
    return count * (2.2 * steps * written + kCall + kWrittenOnce * written);
  }
  const double patches = as_double(wide_.size(2)) * taps * steps;
  const double copied = is_identity(grid) && narrow_.size(1) == 1 ? 0 : kCopied * patches;
  const double refused = patches * element_size() > kOneExampleBytes ? 100 : 1;
  return refused * count *
         (2.2 * steps * written + copied + kWritten * written +
          kProductCall * as_double(correlation_.groups));
}

double ConvolutionTerm::operations(Norms way) const {
  if (way == Norms::forget) {
    return operations(form_) + as_double(examples()) * form_bytes() / as_double(examples() * 4);
  }
  const Grid grid = internal::grid_of(correlation_, wide_, narrow_);
  const double count = as_double(examples());
  const double taps = as_double(internal::product_of(grid.kernel));
  const double groups = as_double(correlation_.groups);
  const double wide = as_double(wide_.size(2));
  const double narrow = as_double(narrow_.size(2));
  if (way == Norms::patches) {
    const double steps = as_double(narrow_.size(1) * internal::product_of(grid.narrow));
    const double patches = wide * taps * steps;
    const double refused = patches * element_size() > kOneExampleBytes ? 100 : 1;
    return refused * count *
           (2 * steps * steps * (wide * taps + narrow) + kCopied * patches +
            kShifted * steps * steps * groups + 3 * kProductCall * groups);
  }
  const internal::Triple extents = positions_of(grid).extents;
  const double all = as_double(narrow_.size(1) * internal::product_of(extents));
  const auto classes = static_cast<double>(positions_of(grid).shifts.size());
  const bool refused = !wide_.is_cpu() || all * all * element_size() > kOneExampleBytes;
  return (refused ? 1000 : 1) * count *
         ((all < 2.0 * kGramBlock ? 2 : 1.25) * all * all * (wide * classes + narrow) +
          kCopied * all * (wide * classes + narrow) +
          kShifted * (classes + taps / 2) * all * all * groups +
          3 * kProductCall * groups * classes);
}

std::string ConvolutionTerm::describe() const {
  return base::join("convolution ", wide_.sizes(), " x ", narrow_.sizes(), " kernel ",
                    c10::IntArrayRef(correlation_.kernel), " stride ",
                    c10::IntArrayRef(correlation_.stride), " padding ",
                    c10::IntArrayRef(correlation_.padding), " dilation ",
                    c10::IntArrayRef(correlation_.dilation), " groups ", correlation_.groups, " ",
                    narrow_.scalar_type(), " ", wide_.strides());
}

std::unique_ptr<Term> ConvolutionTerm::reshaped(const std::vector<std::int64_t>& sizes) const {
  auto other = std::make_unique<ConvolutionTerm>(*this);
  other->sizes_ = sizes;
  return other;
}

std::unique_ptr<ConvolutionTerm> ConvolutionTerm::joined(const ConvolutionTerm& other) const {
  const bool same = correlation_.kernel == other.correlation_.kernel &&
                    correlation_.stride == other.correlation_.stride &&
                    correlation_.padding == other.correlation_.padding &&
                    correlation_.dilation == other.correlation_.dilation &&
                    correlation_.groups == other.correlation_.groups && sizes_ == other.sizes_ &&
                    wide_.sizes().slice(2) == other.wide_.sizes().slice(2) &&
                    narrow_.sizes().slice(2) == other.narrow_.sizes().slice(2) &&
                    wide_.scalar_type() == other.wide_.scalar_type() &&
                    narrow_.scalar_type() == other.narrow_.scalar_type();
  if (!same) return nullptr;
  auto sum = std::make_unique<ConvolutionTerm>(at::cat({wide_, other.wide_}, 1),
                                               at::cat({narrow_, other.narrow_}, 1), correlation_);
  sum->sizes_ = sizes_;
  return sum;
}

ConvolutionTerm ConvolutionTerm::first_examples(std::int64_t count) const {
  ConvolutionTerm part = *this;
  part.wide_ = wide_.narrow(0, 0, count);
  part.narrow_ = narrow_.narrow(0, 0, count);
  return part;
}

void ConvolutionTerm::choose_by_measurement() {
  const std::string key = describe() + " threads " + std::to_string(at::get_num_threads());
  Ways ways;
  if (!Measured::instance().find(key, ways)) {
    ConvolutionTerm part = first_examples(std::min(kMeasuredExamples, examples()));
    const auto fastest = [](const auto& candidates, const auto& operations, const auto& run) {
      double fewest = operations(candidates[0]);
      for (const auto way : candidates) fewest = std::min(fewest, operations(way));
      auto best = candidates[0];
      double least = -1;
      for (const auto way : candidates) {
        if (operations(way) > kWorthMeasuring * fewest) continue;
        const double taken = milliseconds_of([&] { run(way); }, 3);
        if (least < 0 || taken < least) {
          least = taken;
          best = way;
        }
      }
      return best;
    };
    part.form_ = ways.form = fastest(
        kForms, [&](Form way) { return operations(way); }, [&](Form way) { part.form(way); });
    ways.norms = fastest(
        kNorms, [&](Norms way) { return part.operations(way); },
        [&](Norms way) { part.squared_norms(way); });
    Measured::instance().add(key, ways);
  }
  form_ = ways.form;
  norms_ = ways.norms;
}

at::Tensor ConvolutionTerm::gradient_of(const at::Tensor& wide, const at::Tensor& narrow) const {
  const std::vector<std::int64_t> no_output_padding(correlation_.kernel.size(), 0);
  // Of the weight only the shape is read.
  const at::Tensor weight = at::empty(weight_sizes_, wide.options());
  return std::get<1>(at::convolution_backward(
      narrow, wide, weight, /*bias_sizes=*/std::nullopt, correlation_.stride, correlation_.padding,
      correlation_.dilation, /*transposed=*/false, no_output_padding, correlation_.groups,
      {false, true, false}));
}

at::Tensor ConvolutionTerm::form_range(Form way, std::int64_t first, std::int64_t count) const {
  std::vector<std::int64_t> all = weight_sizes_;
  all.insert(all.begin(), count);
  const bool is_double = narrow_.scalar_type() == at::kDouble;
  at::Tensor result =
      at::empty(all, narrow_.options().dtype(is_double ? at::kDouble : at::ScalarType::Float));
  if (way == Form::convolution) {
    for (std::int64_t i = 0; i < count; ++i) {
      result.select(0, i).copy_(
          gradient_of(widened(wide_.select(0, first + i)), widened(narrow_.select(0, first + i))));
    }
    return result;
  }
  const Grid grid = internal::grid_of(correlation_, wide_, narrow_);
  const std::int64_t groups = correlation_.groups;
  const std::int64_t patch = wide_.size(2) / groups * internal::product_of(grid.kernel);
  const std::int64_t most = chunk(as_double(patch * groups * narrow_.size(1)) *
                                      as_double(internal::product_of(grid.narrow)) * element_size(),
                                  kPatchBytes);
  for (std::int64_t start = 0; start < count; start += most) {
    const std::int64_t length = std::min(most, count - start);
    const at::Tensor patches =
        patches_of(widened(wide_.narrow(0, first + start, length)), grid, groups);
    at::Tensor part =
        result.narrow(0, start, length).view({length * groups, narrow_.size(2) / groups, patch});
    at::bmm_out(part, as_matrices(widened(narrow_.narrow(0, first + start, length)), groups),
                patches.transpose(1, 2));
  }
  return result;
}

at::Tensor ConvolutionTerm::form(Form way) const {
  std::vector<std::int64_t> all = sizes_;
  all.insert(all.begin(), examples());
  return form_range(way, 0, examples()).view(all);
}

at::Tensor ConvolutionTerm::patch_norms(std::int64_t first, std::int64_t count) const {
  const Grid grid = internal::grid_of(correlation_, wide_, narrow_);
  const std::int64_t groups = correlation_.groups;
  const at::Tensor columns = patches_of(widened(wide_.narrow(0, first, count)), grid, groups);
  const at::Tensor rows = as_matrices(widened(narrow_.narrow(0, first, count)), groups);
  const ProductTerm product(rows.transpose(1, 2), columns.transpose(1, 2));
  return product.squared_norms().view({count, groups}).sum(1);
}

at::Tensor ConvolutionTerm::position_norms(std::int64_t first, std::int64_t count) const {
  const Grid grid = internal::grid_of(correlation_, wide_, narrow_);
  const Positions positions = positions_of(grid);
  const std::int64_t groups = correlation_.groups;
  const auto on_grid = [&](const at::Tensor& values, const Triple& stride, const Triple& offset) {
    return internal::gather_windows(widened(values.narrow(0, first, count)), stride, {offset},
                                    positions.extents)
        .view({count * groups, values.size(2) / groups, -1});
  };
  at::Tensor narrow = on_grid(narrow_, {1, 1, 1}, {0, 0, 0});
  const std::int64_t steps = narrow.size(2) - positions.largest_shift;
  narrow = gram_of(narrow.narrow(2, 0, steps));
  at::Tensor total;
  for (const auto& [remainder, shifts] : positions.shifts) {
    const at::Tensor wide = gram_of(on_grid(wide_, grid.stride, minus(remainder, grid.padding)));
    const at::Tensor part = internal::shifted_products(wide, narrow, shifts);
    total = total.defined() ? total + part : part;
  }
  return total.view({count, groups}).sum(1);
}

at::Tensor ConvolutionTerm::squared_norms(Norms way) const {
  const Grid grid = internal::grid_of(correlation_, wide_, narrow_);
  const double images = as_double(narrow_.size(1));
  double bytes_of_one = element_size();
  double budget = kForgottenBytes;
  if (way == Norms::forget) {
    for (const std::int64_t size : sizes_) bytes_of_one *= as_double(size);
  } else if (way == Norms::patches) {
    bytes_of_one *= images * as_double(internal::product_of(grid.narrow)) *
                    as_double(wide_.size(2) * internal::product_of(grid.kernel));
    budget = kPatchBytes;
  } else {
    const double all = images * as_double(internal::product_of(positions_of(grid).extents));
    bytes_of_one *= 2 * all * all * as_double(correlation_.groups);
    budget = kGramBytes;
  }
  const std::int64_t most = chunk(bytes_of_one, budget);
  std::vector<at::Tensor> norms;
  for (std::int64_t first = 0; first < examples(); first += most) {
    const std::int64_t count = std::min(most, examples() - first);
    norms.push_back(way == Norms::forget ? squared_norm_by_example(form_range(form_, first, count))
                    : way == Norms::patches ? patch_norms(first, count)
                                            : position_norms(first, count));
  }
  const at::Tensor squares = at::cat(norms);
  if (way == Norms::patches) return squares;  // guarded by its products
  // A value of the input is in as many patches as the kernel has places, at most.
  const at::Tensor bounds =
      (squared_norm_by_example(widened(wide_)) * squared_norm_by_example(widened(narrow_)) *
       as_double(internal::product_of(grid.kernel)))
          .sqrt();
  if (way == Norms::forget) return squares_of_formed(squares, bounds);
  return guarded_squares(squares, bounds, [&](const at::Tensor& some) {
    const ConvolutionTerm part(wide_.index_select(0, some), narrow_.index_select(0, some),
                               correlation_);
    return squared_norm_by_example(part.form(form_));
  });
}

at::Tensor ConvolutionTerm::weighted_sum(const at::Tensor& weights) const {
  const at::Tensor wide = widened(wide_);
  const at::Tensor narrow = widened(narrow_);
  std::vector<std::int64_t> ones(static_cast<std::size_t>(wide.dim()), 1);
  ones[0] = examples();
  const at::Tensor scale = weights.to(narrow.scalar_type()).view(ones);
  const bool scale_wide = wide.numel() < narrow.numel();
  // In the order of memory, both alike, so that images stay pairs.
  const bool image_major = wide.stride(0) < wide.stride(1) && wide.size(1) > 1;
  const auto images = [&](const at::Tensor& values) {
    return (image_major ? values.transpose(0, 1) : values).flatten(0, 1);
  };
  return gradient_of(images(scale_wide ? wide * scale : wide),
                     images(scale_wide ? narrow : narrow * scale))
      .contiguous()
      .view(sizes_);
}

}  // namespace gradus::persample
