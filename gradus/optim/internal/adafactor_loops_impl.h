// Adafactor's loops of loops.h, included once for each instruction set: no #pragma once, no
// includes. Plain C++ in the form that compilers vectorise: sums in small arrays of lanes, selects
// for branches. Multiplications and additions are not contracted, so every instruction set gives
// the same bits.

constexpr int kLanes = 16;

template <typename Real>
inline double lane_sum(const Real* lanes) {
  double sum = 0.0;
  for (int l = 0; l < kLanes; ++l) sum += static_cast<double>(lanes[l]);
  return sum;
}

// Sums at most this many values in lanes before it goes on in float64, so that a float32 sum of
// many values stays as good as one of few.
constexpr std::int64_t kLaneValues = 4096;

// Sum of square(i) over [0, n), where square gives a Real that is not negative.
template <typename Real, typename Square>
inline double sum_of(std::int64_t n, Square square) {
  double sum = 0.0;
  for (std::int64_t first = 0; first < n; first += kLaneValues) {
    const std::int64_t end = std::min(first + kLaneValues, n);
    Real lanes[kLanes] = {};
    std::int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      for (int l = 0; l < kLanes; ++l) lanes[l] += square(i + l);
    }
    for (; i < end; ++i) lanes[0] += square(i);
    sum += lane_sum(lanes);
  }
  return sum;
}

// NaN stays NaN: the comparison is false.
template <typename Real>
inline Real at_most(Real x, Real limit) {
  return limit < x ? limit : x;
}

template <typename Value>
double square_sum(const Value* x, std::int64_t n) {
  using Real = typename ComputeOf<Value>::type;
  return sum_of<Real>(n, [x](std::int64_t i) {
    const auto v = static_cast<Real>(x[i]);
    return v * v;
  });
}

template <typename Value>
void matrix_squares(const Value* g, std::int64_t rows, std::int64_t columns, double* row_sums,
                    double* column_sums) {
  using Real = typename ComputeOf<Value>::type;
  constexpr std::int64_t kRows = 64;  // column sums of so many rows are taken in Real
  Real sums[kLaneValues];
  for (std::int64_t i = 0; i < rows; ++i) row_sums[i] = 0.0;
  for (std::int64_t left = 0; left < columns; left += kLaneValues) {
    const std::int64_t width = std::min(kLaneValues, columns - left);
    for (std::int64_t top = 0; top < rows; top += kRows) {
      const std::int64_t bottom = std::min(top + kRows, rows);
      for (std::int64_t j = 0; j < width; ++j) sums[j] = Real{0};
      for (std::int64_t i = top; i < bottom; ++i) {
        const Value* const row = g + i * columns + left;
        Real lanes[kLanes] = {};
        std::int64_t j = 0;
        for (; j + kLanes <= width; j += kLanes) {
          for (int l = 0; l < kLanes; ++l) {
            const auto v = static_cast<Real>(row[j + l]);
            const Real square = v * v;
            lanes[l] += square;
            sums[j + l] += square;
          }
        }
        for (; j < width; ++j) {
          const auto v = static_cast<Real>(row[j]);
          const Real square = v * v;
          lanes[0] += square;
          sums[j] += square;
        }
        row_sums[i] += lane_sum(lanes);
      }
      for (std::int64_t j = 0; j < width; ++j)
        column_sums[left + j] += static_cast<double>(sums[j]);
    }
  }
}

template <typename Value, typename Real>
double matrix_update_square(const Value* g, std::int64_t rows, std::int64_t columns,
                            const Real* row_factors, const Real* column_factors, Real limit) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const Value* const row = g + i * columns;
    const Real factor = row_factors[i];
    sum += sum_of<Real>(columns, [=](std::int64_t j) {
      const Real update = static_cast<Real>(row[j]) * at_most(factor * column_factors[j], limit);
      return update * update;
    });
  }
  return sum;
}

// p = keep * p - scale * update(i), with or without a mean of the updates between.
template <typename Value, typename Real, typename Update>
inline void apply(Value* p, Real* mean, std::int64_t n, Real keep, Real scale, Real beta1,
                  Real rest, Update update) {
  if (mean == nullptr) {
    for (std::int64_t i = 0; i < n; ++i) {
      p[i] = static_cast<Value>(static_cast<Real>(p[i]) * keep - scale * update(i));
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      mean[i] = mean[i] * beta1 + rest * (scale * update(i));
      p[i] = static_cast<Value>(static_cast<Real>(p[i]) * keep - mean[i]);
    }
  }
}

template <typename Value, typename Real>
void matrix_apply(Value* p, const Value* g, Real* mean, std::int64_t rows, std::int64_t columns,
                  const Real* row_factors, const Real* column_factors, Real limit, Real keep,
                  Real scale, Real beta1, Real rest) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t first = i * columns;
    const Value* const row = g + first;
    const Real factor = row_factors[i];
    apply(p + first, mean == nullptr ? nullptr : mean + first, columns, keep, scale, beta1, rest,
          [=](std::int64_t j) {
            return static_cast<Real>(row[j]) * at_most(factor * column_factors[j], limit);
          });
  }
}

template <typename Value, typename Real>
double vector_measure(const Value* g, Real* variance, std::int64_t n, Real weight, Real floor,
                      Real limit) {
  for (std::int64_t i = 0; i < n; ++i) {
    const auto v = static_cast<Real>(g[i]);
    variance[i] += weight * (v * v + floor - variance[i]);
  }
  return sum_of<Real>(n, [=](std::int64_t i) {
    const Real update = static_cast<Real>(g[i]) * at_most(Real{1} / std::sqrt(variance[i]), limit);
    return update * update;
  });
}

template <typename Value, typename Real>
void vector_apply(Value* p, const Value* g, Real* mean, const Real* variance, std::int64_t n,
                  Real limit, Real keep, Real scale, Real beta1, Real rest) {
  apply(p, mean, n, keep, scale, beta1, rest, [=](std::int64_t i) {
    return static_cast<Real>(g[i]) * at_most(Real{1} / std::sqrt(variance[i]), limit);
  });
}

template <typename Value>
constexpr AdafactorLoops<Value> kAdafactorLoops{
    square_sum<Value>,
    matrix_squares<Value>,
    matrix_update_square<Value, typename ComputeOf<Value>::type>,
    matrix_apply<Value, typename ComputeOf<Value>::type>,
    vector_measure<Value, typename ComputeOf<Value>::type>,
    vector_apply<Value, typename ComputeOf<Value>::type>};
