#include <gradus/optim/adafactor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/loops.h>

namespace gradus::optim {
namespace {

using internal::ComputeOf;

at::ScalarType state_dtype(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

double default_eps1(const at::Tensor& parameter) {
  return state_dtype(parameter) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                               : double{std::numeric_limits<float>::epsilon()};
}

// The tensors of a slot by name; those that the parameter does not have are undefined.
struct State {
  at::Tensor step, rows, columns, variance, mean;
};

// What one update of one parameter computes with, in the notation of Algorithm 4.
struct Rule {
  double weight = 0.0;  // 1 - beta2 of this step
  double floor = 0.0;   // added to the squared gradients
  double mean_at_least = 0.0;
  double limit = 0.0;  // of the reciprocal root
  double rho = 0.0;    // relative step size
  double least_scale = 0.0;
  double clip_threshold = 0.0;
  double beta1 = 0.0;
  double sign = 1.0;
  double lr = 0.0, weight_decay = 0.0;
  bool scale_parameter = false, paper = false;

  bool clips() const { return std::isfinite(clip_threshold); }
  double keep(double alpha) const { return 1.0 - (paper ? alpha : lr) * weight_decay; }
};

Rule rule_of(const AdafactorOptions& options, const ParameterGroup& group, double t, double eps1) {
  const bool paper = options.form == AdafactorForm::paper;
  const double largest = options.warmup_init ? 1e-6 * t : group.lr;
  return {.weight = std::pow(t, options.beta2_decay),
          .floor = paper ? eps1 : 0.0,
          .mean_at_least = paper ? 0.0 : eps1,
          .limit = paper ? std::numeric_limits<double>::infinity() : 1.0 / eps1,
          .rho = options.relative_step ? std::min(largest, 1.0 / std::sqrt(t)) : group.lr,
          .least_scale = options.eps2,
          .clip_threshold = options.clip_threshold,
          .beta1 = options.beta1.value_or(0.0),
          .sign = options.maximize ? -1.0 : 1.0,
          .lr = group.lr,
          .weight_decay = group.weight_decay,
          .scale_parameter = options.scale_parameter,
          .paper = paper};
}

// Pieces are of fixed size, whatever the number of threads, and are added up in order: the result
// does not depend on it.
constexpr std::int64_t kPieceValues = 1 << 15;
constexpr std::int64_t kMostPieces = 64;

struct Pieces {
  std::int64_t items, each, count;

  // At least kPieceValues values a piece.
  Pieces(std::int64_t n, std::int64_t values_an_item, std::int64_t most = kMostPieces)
      : items(n),
        each(std::max(
            (n + most - 1) / most,
            std::max<std::int64_t>(1, kPieceValues / std::max<std::int64_t>(1, values_an_item)))),
        count((n + each - 1) / each) {}

  // work(piece, first item, items) for every piece, in parallel.
  template <typename Work>
  void run(Work work) const {
    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t piece = begin; piece < end; ++piece) {
        work(piece, piece * each, std::min(each, items - piece * each));
      }
    });
  }

  template <typename Work>
  double sum(Work work) const {
    std::vector<double> parts(static_cast<std::size_t>(count));
    run([&](std::int64_t piece, std::int64_t first, std::int64_t n) {
      parts[static_cast<std::size_t>(piece)] = work(first, n);
    });
    double total = 0.0;
    for (const double part : parts) total += part;
    return total;
  }
};

// One parameter on the CPU, without gaps.
template <typename Value>
class Kernel {
  using Real = typename ComputeOf<Value>::type;

 public:
  Kernel(const at::Tensor& parameter, const at::Tensor& gradient, const State& state,
         const Rule& rule)
      : loops_(internal::adafactor_loops<Value>()),
        rule_(rule),
        p_(parameter.mutable_data_ptr<Value>()),
        g_(gradient.const_data_ptr<Value>()),
        values_(parameter.numel()),
        limit_(static_cast<Real>(rule.limit)),
        mean_(state.mean.defined() ? state.mean.mutable_data_ptr<Real>() : nullptr) {
    if (state.variance.defined()) {
      variance_ = state.variance.mutable_data_ptr<Real>();
    } else {
      rows_ = parameter.size(-2);
      columns_ = parameter.size(-1);
      row_ = state.rows.mutable_data_ptr<Real>();
      column_ = state.columns.mutable_data_ptr<Real>();
    }
  }

  void run() {
    if (values_ == 0) return;
    double alpha = rule_.rho;
    if (rule_.scale_parameter) {
      const double square = Pieces(values_, 1).sum([&](std::int64_t first, std::int64_t n) {
        return loops_.square_sum(p_ + first, n);
      });
      alpha *= std::max(rule_.least_scale, root_mean(square));
    }
    if (variance_ != nullptr) {
      vector(alpha);
    } else if (rows_ * columns_ >= kPieceValues || rows_ * columns_ == values_) {
      large_matrices(alpha);
    } else {
      small_matrices(alpha);
    }
  }

 private:
  // Of a matrix: what each of its elements is multiplied by.
  struct Factors {
    std::vector<Real> rows, columns;
  };

  double root_mean(double square) const { return std::sqrt(square / static_cast<double>(values_)); }

  Real keep(double alpha) const { return static_cast<Real>(rule_.keep(alpha)); }

  Real scale(double alpha, double update_square) const {
    const double clip =
        rule_.clips() ? std::max(1.0, root_mean(update_square) / rule_.clip_threshold) : 1.0;
    return static_cast<Real>(rule_.sign * alpha / clip);
  }

  void vector(double alpha) {
    const Pieces pieces(values_, 1);
    const double square = pieces.sum([&](std::int64_t first, std::int64_t n) {
      return loops_.vector_measure(g_ + first, variance_ + first, n,
                                   static_cast<Real>(rule_.weight), static_cast<Real>(rule_.floor),
                                   limit_);
    });
    const Real by = scale(alpha, square);
    pieces.run([&](std::int64_t, std::int64_t first, std::int64_t n) {
      loops_.vector_apply(p_ + first, g_ + first, mean_at(first), variance_ + first, n, limit_,
                          keep(alpha), by, static_cast<Real>(rule_.beta1),
                          static_cast<Real>(1.0 - rule_.beta1));
    });
  }

  // Each matrix by itself, its rows in parallel.
  void large_matrices(double alpha) {
    const std::int64_t matrices = values_ / (rows_ * columns_);
    // Column sums are kept a piece, so that there are few pieces.
    const Pieces squares(rows_, columns_, /*most=*/16);
    const Pieces pieces(rows_, columns_);
    std::vector<double> row_sums(static_cast<std::size_t>(rows_));
    std::vector<double> column_sums(static_cast<std::size_t>(squares.count * columns_));
    std::vector<Factors> factors(static_cast<std::size_t>(matrices));
    double square = 0.0;
    for (std::int64_t b = 0; b < matrices; ++b) {
      const Value* const g = g_ + b * rows_ * columns_;
      std::fill(column_sums.begin(), column_sums.end(), 0.0);
      squares.run([&](std::int64_t piece, std::int64_t first, std::int64_t n) {
        loops_.matrix_squares(g + first * columns_, n, columns_, row_sums.data() + first,
                              column_sums.data() + piece * columns_);
      });
      for (std::int64_t piece = 1; piece < squares.count; ++piece) {
        for (std::int64_t j = 0; j < columns_; ++j) {
          column_sums[static_cast<std::size_t>(j)] +=
              column_sums[static_cast<std::size_t>(piece * columns_ + j)];
        }
      }
      auto& own = factors[static_cast<std::size_t>(b)];
      update_moments(b, row_sums.data(), column_sums.data());
      fill_factors(b, own);
      if (!rule_.clips()) continue;
      square += pieces.sum([&](std::int64_t first, std::int64_t n) {
        return loops_.matrix_update_square(g + first * columns_, n, columns_,
                                           own.rows.data() + first, own.columns.data(), limit_);
      });
    }
    const Real by = scale(alpha, square);
    for (std::int64_t b = 0; b < matrices; ++b) {
      const auto& own = factors[static_cast<std::size_t>(b)];
      pieces.run([&](std::int64_t, std::int64_t first, std::int64_t n) {
        apply(b, first, n, own, alpha, by);
      });
    }
  }

  // Such as the windows of a convolution: matrices in parallel. Their factors are worked out twice
  // rather than kept.
  void small_matrices(double alpha) {
    const Pieces pieces(values_ / (rows_ * columns_), rows_ * columns_);
    const double square = pieces.sum([&](std::int64_t first, std::int64_t n) {
      std::vector<double> row_sums(static_cast<std::size_t>(rows_));
      std::vector<double> column_sums(static_cast<std::size_t>(columns_));
      Factors own;
      double sum = 0.0;
      for (std::int64_t b = first; b < first + n; ++b) {
        const Value* const g = g_ + b * rows_ * columns_;
        std::fill(column_sums.begin(), column_sums.end(), 0.0);
        loops_.matrix_squares(g, rows_, columns_, row_sums.data(), column_sums.data());
        update_moments(b, row_sums.data(), column_sums.data());
        if (!rule_.clips()) continue;
        fill_factors(b, own);
        sum += loops_.matrix_update_square(g, rows_, columns_, own.rows.data(), own.columns.data(),
                                           limit_);
      }
      return sum;
    });
    const Real by = scale(alpha, square);
    pieces.run([&](std::int64_t, std::int64_t first, std::int64_t n) {
      Factors own;
      for (std::int64_t b = first; b < first + n; ++b) {
        fill_factors(b, own);
        apply(b, 0, rows_, own, alpha, by);
      }
    });
  }

  void apply(std::int64_t b, std::int64_t first_row, std::int64_t n, const Factors& own,
             double alpha, Real by) const {
    const std::int64_t first = (b * rows_ + first_row) * columns_;
    loops_.matrix_apply(p_ + first, g_ + first, mean_at(first), n, columns_,
                        own.rows.data() + first_row, own.columns.data(), limit_, keep(alpha), by,
                        static_cast<Real>(rule_.beta1), static_cast<Real>(1.0 - rule_.beta1));
  }

  Real* mean_at(std::int64_t first) const { return mean_ == nullptr ? nullptr : mean_ + first; }

  // Lines 5 and 6 of the algorithm, with means in place of sums, as torch has it.
  void update_moments(std::int64_t b, const double* row_sums, const double* column_sums) {
    const auto blend = [this](Real& moment, double mean) {
      const double old = static_cast<double>(moment);
      moment = static_cast<Real>(old + rule_.weight * (mean + rule_.floor - old));
    };
    for (std::int64_t i = 0; i < rows_; ++i) {
      blend(row_[b * rows_ + i], row_sums[i] / static_cast<double>(columns_));
    }
    for (std::int64_t j = 0; j < columns_; ++j) {
      blend(column_[b * columns_ + j], column_sums[j] / static_cast<double>(rows_));
    }
  }

  // 1 / sqrt(row * column / mean of rows) as a product. Worked out in float64: a factor of tiny
  // moments is large, and only its product need fit.
  void fill_factors(std::int64_t b, Factors& own) const {
    own.rows.resize(static_cast<std::size_t>(rows_));
    own.columns.resize(static_cast<std::size_t>(columns_));
    const Real* const row = row_ + b * rows_;
    const Real* const column = column_ + b * columns_;
    double mean = 0.0;
    for (std::int64_t i = 0; i < rows_; ++i) mean += static_cast<double>(row[i]);
    mean /= static_cast<double>(rows_);
    const double at_least = rule_.mean_at_least > mean ? rule_.mean_at_least : mean;
    for (std::int64_t i = 0; i < rows_; ++i) {
      own.rows[static_cast<std::size_t>(i)] =
          static_cast<Real>(std::sqrt(at_least / static_cast<double>(row[i])));
    }
    for (std::int64_t j = 0; j < columns_; ++j) {
      own.columns[static_cast<std::size_t>(j)] =
          static_cast<Real>(1.0 / std::sqrt(static_cast<double>(column[j])));
    }
  }

  const internal::AdafactorLoops<Value>& loops_;
  const Rule& rule_;
  Value* p_;
  const Value* g_;
  std::int64_t values_, rows_ = 0, columns_ = 0;
  Real limit_;
  Real *mean_, *variance_ = nullptr, *row_ = nullptr, *column_ = nullptr;
};

// The same by tensor operations, for other devices and for parameters with gaps. Norms stay on the
// device.
void update_by_operations(const at::Tensor& parameter, const State& state, const Rule& rule) {
  if (parameter.numel() == 0) return;
  const auto dtype = state_dtype(parameter);
  const auto gradient = parameter.grad().to(dtype);
  const double root_values = std::sqrt(static_cast<double>(parameter.numel()));
  auto alpha = gradient.new_full({}, rule.rho);
  if (rule.scale_parameter) {
    alpha.mul_(parameter.to(dtype).norm().div_(root_values).clamp_min_(rule.least_scale));
  }
  if (rule.weight_decay != 0.0) {
    if (rule.paper) {
      parameter.mul_(alpha.mul(-rule.weight_decay).add_(1.0));
    } else {
      parameter.mul_(rule.keep(0.0));
    }
  }
  at::Tensor update;
  if (state.variance.defined()) {
    state.variance.lerp_(gradient.square().add_(rule.floor), rule.weight);
    update = state.variance.rsqrt();
  } else {
    state.rows.lerp_(gradient.square().mean(-1, true).add_(rule.floor), rule.weight);
    state.columns.lerp_(gradient.square().mean(-2, true).add_(rule.floor), rule.weight);
    const auto mean = state.rows.mean(-2, true).clamp_min_(rule.mean_at_least);
    update = mean.div(state.rows).sqrt_().mul(state.columns.rsqrt());
  }
  // A scalar beyond the dtype's range is an error to LibTorch; it limits nothing.
  const double largest = dtype == at::kDouble ? std::numeric_limits<double>::max()
                                              : double{std::numeric_limits<float>::max()};
  if (rule.limit <= largest) update.clamp_max_(rule.limit);
  update.mul_(gradient);
  if (rule.clips()) {
    alpha.div_(update.norm().div_(root_values * rule.clip_threshold).clamp_min_(1.0));
  }
  update.mul_(alpha.mul_(rule.sign));
  if (state.mean.defined()) update = state.mean.mul_(rule.beta1).add_(update, 1.0 - rule.beta1);
  parameter.sub_(update);
}

bool kernel_takes(const at::Tensor& parameter) {
  return fused_kernel_takes(parameter) && parameter.is_cpu() && parameter.is_contiguous();
}

void update_on_cpu(const at::Tensor& parameter, const State& state, const Rule& rule) {
  const auto gradient = parameter.grad().contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, parameter.scalar_type(), "adafactor",
      [&] { Kernel<scalar_t>(parameter, gradient, state, rule).run(); });
}

AdafactorOptions with_group(const AdafactorOptions& options, const ParameterGroup& group,
                            double (*option_of)(const ParameterGroup&, const std::string&,
                                                double)) {
  auto result = options;
  result.beta2_decay = option_of(group, "beta2_decay", options.beta2_decay);
  result.eps2 = option_of(group, "eps2", options.eps2);
  result.clip_threshold = option_of(group, "clip_threshold", options.clip_threshold);
  const auto eps1 = group.options.find("eps1");
  if (eps1 != group.options.end()) result.eps1 = eps1->second;
  return result;
}

void check_ranges(const std::string& component, const AdafactorOptions& options) {
  GRADUS_CHECK(component, std::isfinite(options.beta2_decay) && options.beta2_decay <= 0.0,
               "beta2_decay must be finite and <= 0; got ", options.beta2_decay);
  const double eps1 = options.eps1.value_or(0.0);
  GRADUS_CHECK(component, std::isfinite(eps1) && eps1 >= 0.0, "eps1 must be finite and >= 0; got ",
               eps1);
  GRADUS_CHECK(component, std::isfinite(options.eps2) && options.eps2 >= 0.0,
               "eps2 must be finite and >= 0; got ", options.eps2);
  GRADUS_CHECK(component, options.clip_threshold > 0.0, "clip_threshold must be > 0; got ",
               options.clip_threshold);
  const double beta1 = options.beta1.value_or(0.0);
  GRADUS_CHECK(component, beta1 >= 0.0 && beta1 < 1.0, "beta1 must be in [0, 1); got ", beta1);
  GRADUS_CHECK(component, !options.warmup_init || options.relative_step,
               "warmup_init needs relative_step: without it the step size is lr. Warm lr up "
               "instead; got relative_step off");
}

}  // namespace

Adafactor::Adafactor(std::vector<at::Tensor> parameters, const AdafactorOptions& options)
    : Adafactor(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                             .lr = options.lr,
                                             .weight_decay = options.weight_decay}},
                options) {}

Adafactor::Adafactor(std::vector<ParameterGroup> groups, const AdafactorOptions& options)
    : Optimizer("adafactor", std::move(groups), {"beta2_decay", "eps1", "eps2", "clip_threshold"}),
      options_(options) {
  check_ranges(component(), options_);
  check_groups();
}

void Adafactor::check_group(const ParameterGroup& group) const {
  check_ranges(component(), with_group(options_, group, option_of));
}

std::vector<NamedOption> Adafactor::options_of(const ParameterGroup& group) const {
  const auto own = with_group(options_, group, option_of);
  const double eps1 =
      own.eps1.value_or(group.parameters.empty() ? double{std::numeric_limits<float>::epsilon()}
                                                 : default_eps1(group.parameters.front()));
  return {{"lr", group.lr},
          {"beta2_decay", own.beta2_decay},
          {"eps", std::vector<double>{eps1, own.eps2}},
          {"d", own.clip_threshold},
          {"weight_decay", group.weight_decay},
          {"maximize", own.maximize}};
}

std::vector<Optimizer::StateSpec> Adafactor::state_specs(const at::Tensor& parameter) const {
  const auto dtype = state_dtype(parameter);
  std::vector<StateSpec> specs{{"step", {}, at::kFloat}};
  if (parameter.dim() > 1) {
    auto rows = parameter.sizes().vec();
    auto columns = rows;
    rows.back() = 1;
    columns[columns.size() - 2] = 1;
    specs.push_back({"row_var", std::move(rows), dtype});
    specs.push_back({"col_var", std::move(columns), dtype});
  } else {
    specs.push_back({"variance", parameter.sizes().vec(), dtype});
  }
  if (options_.beta1) specs.push_back({"exp_avg", parameter.sizes().vec(), dtype});
  return specs;
}

void Adafactor::check_slot(const Slot& slot) const {
  GRADUS_CHECK(component(), !options_.fused.value_or(false) || kernel_takes(slot.parameter),
               "parameter '", slot.name,
               "' must suit the kernel (CPU; float32, float64, float16 or bfloat16; contiguous); "
               "got ",
               slot.parameter.scalar_type(), " on ", slot.parameter.device(), " with strides ",
               slot.parameter.strides(), ". Leave 'fused' unset to use tensor operations there");
}

void Adafactor::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto own = with_group(options_, group, option_of);
  for (const Slot* slot : slots) {
    const auto& parameter = slot->parameter;
    const bool factored = parameter.dim() > 1;
    State state;
    state.step = slot->state[0];
    (factored ? state.rows : state.variance) = slot->state[1];
    if (factored) state.columns = slot->state[2];
    if (own.beta1) state.mean = slot->state.back();
    state.step.add_(1);
    const auto rule =
        rule_of(own, group, state.step.item<double>(), own.eps1.value_or(default_eps1(parameter)));
    if (own.fused.value_or(true) && kernel_takes(parameter)) {
      update_on_cpu(parameter, state, rule);
    } else {
      update_by_operations(parameter, state, rule);
    }
  }
}

}  // namespace gradus::optim
