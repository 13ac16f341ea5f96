#include <gradus/amp/autocast/operator_lists.h>

#include <algorithm>
#include <mutex>
#include <ostream>
#include <sstream>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>

#include <gradus/amp/autocast/internal/operator_table.h>
#include <gradus/amp/autocast/internal/torch_lists.h>
#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

constexpr std::pair<Policy, std::string_view> kNames[] = {
    {Policy::lower_precision, "lower_precision"},
    {Policy::fp32, "fp32"},
    {Policy::fp32_result, "fp32_result"},
    {Policy::widest, "widest"},
    {Policy::banned, "banned"},
    {Policy::none, "none"},
};

using Index = std::map<std::string, std::vector<std::string>, std::less<>>;

Index index_of_operators() {
  Index index;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    // A name alone may be declared before, or without, its schema.
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (op && op->hasSchema()) index[name.name].push_back(name.overload_name);
  }
  return index;
}

// Operators may be registered at any time (custom ones, when a library is loaded): looks again
// when a name is unknown.
class OperatorIndex {
 public:
  std::vector<std::string> overloads(const std::string& name) {
    const std::lock_guard lock(mutex_);
    auto found = index_.find(name);
    if (found == index_.end()) {
      index_ = index_of_operators();
      found = index_.find(name);
    }
    return found == index_.end() ? std::vector<std::string>{} : found->second;
  }

  std::vector<std::string> near(std::string_view name) {
    constexpr std::size_t kMost = 3;
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<std::size_t, std::string>> ranked;
    for (const auto& [known, overloads] : index_) ranked.emplace_back(distance(known, name), known);
    std::sort(ranked.begin(), ranked.end());
    std::vector<std::string> result;
    for (const auto& [edits, known] : ranked) {
      if (result.size() == kMost || edits > std::max<std::size_t>(2, name.size() / 3)) break;
      result.push_back(known);
    }
    return result;
  }

  static OperatorIndex& instance() {
    static OperatorIndex index;
    return index;
  }

 private:
  // Levenshtein's.
  static std::size_t distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i);
      for (std::size_t j = 1; j <= b.size(); ++j) {
        const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
      }
    }
    return row[b.size()];
  }

  std::mutex mutex_;
  Index index_;
};

// The full name of a known operator or overload.
std::string resolve(std::string_view name) {
  std::string full(name);
  if (full.find("::") == std::string::npos) full = "aten::" + full;
  const auto dot = full.find('.');
  const std::string base = full.substr(0, dot);
  const auto overloads = OperatorIndex::instance().overloads(base);
  if (overloads.empty()) {
    std::ostringstream near;
    for (const std::string& other : OperatorIndex::instance().near(base))
      near << (near.tellp() > 0 ? ", " : "; near it: ") << other;
    throw UserError(base::join("[autocast] the name of a registered operator is required; got '",
                               name, "'", near.str(),
                               ". Operators of a library are known once it is loaded."));
  }
  if (dot == std::string::npos) return base;
  const std::string overload = full.substr(dot + 1);
  if (std::find(overloads.begin(), overloads.end(), overload) == overloads.end()) {
    std::ostringstream known;
    for (const std::string& other : overloads)
      if (!other.empty()) known << (known.tellp() > 0 ? ", " : "") << base << "." << other;
    throw UserError(base::join("[autocast] the name of a registered overload is required; got '",
                               name, "'; ", base, " has: ", known.str()));
  }
  return full;
}

// Of one overload, "" if there is none.
int dtype_argument(const c10::FunctionSchema& schema) {
  const auto index = schema.argumentIndexWithName("dtype");
  return index ? *index : -1;
}

bool is_functional(const c10::FunctionSchema& schema) {
  return std::none_of(schema.arguments().begin(), schema.arguments().end(),
                      [](const c10::Argument& argument) {
                        return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
                      });
}

// The running statistics of a normalisation are written, though its schema does not say so: in a
// cast they would be lost. Kernels that take them in float32 beside a lower input want the weights
// of their type.
std::uint32_t kept_arguments(const c10::FunctionSchema& schema, Policy policy) {
  if (!schema.argumentIndexWithName("running_mean")) return 0;
  std::uint32_t kept = 0;
  for (const char* const name : {"running_mean", "running_var", "weight", "bias"}) {
    if (policy == Policy::fp32 && !std::string_view(name).starts_with("running")) continue;
    if (const auto index = schema.argumentIndexWithName(name)) kept |= 1u << *index;
  }
  return kept;
}

// Operators that throw, or make an infinity, of a number outside float16's range.
struct Saturated {
  const char* name;
  const char* overload;
  std::vector<const char*> numbers;
};

const std::vector<Saturated>& saturated_operators() {
  static const std::vector<Saturated> operators{
      {"aten::masked_fill_", "Scalar", {"value"}},
      {"aten::masked_fill_", "Tensor", {"value"}},
      {"aten::index_fill_", "int_Scalar", {"value"}},
      {"aten::index_fill_", "int_Tensor", {"value"}},
      {"aten::fill", "Scalar", {"value"}},
      {"aten::fill_", "Scalar", {"value"}},
      {"aten::fill_diagonal_", "", {"fill_value"}},
      {"aten::full_like", "", {"fill_value"}},
      {"aten::new_full", "", {"fill_value"}},
      {"aten::scatter", "value", {"value"}},
      {"aten::scatter_", "value", {"value"}},
      {"aten::constant_pad_nd", "", {"value"}},
      {"aten::clamp", "", {"min", "max"}},
      {"aten::clamp_", "", {"min", "max"}},
      {"aten::clamp_min", "", {"min"}},
      {"aten::clamp_min_", "", {"min"}},
      {"aten::clamp_max", "", {"max"}},
      {"aten::clamp_max_", "", {"max"}},
      {"aten::hardtanh", "", {"min_val", "max_val"}},
      {"aten::hardtanh_", "", {"min_val", "max_val"}},
      {"aten::threshold", "", {"threshold", "value"}},
      {"aten::threshold_", "", {"threshold", "value"}},
      {"aten::where", "ScalarSelf", {"self"}},
      {"aten::where", "ScalarOther", {"other"}},
  };
  return operators;
}

struct Defaults {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, OperatorLists> lists;
};

Defaults& changed_defaults() {
  static Defaults defaults;
  return defaults;
}

OperatorLists original_defaults(c10::DeviceType device, c10::ScalarType dtype) {
  using namespace internal;
  OperatorLists lists = OperatorLists::of_torch(device);
  if (device == c10::DeviceType::CPU) {
    // What both lists know stays as torch's CPU list has it.
    const auto add = [&](const std::vector<std::string>& names, Policy policy) {
      for (const std::string& name : names)
        if (lists.policy(name) == Policy::none) lists.set(name, policy);
    };
    add(torch_cuda_fp32(), Policy::fp32);
    add(torch_cuda_fp32_result(), Policy::fp32_result);
    add(torch_cuda_widest(), Policy::widest);
    add(further_cpu_lower_precision(), Policy::lower_precision);
  }
  lists.set_all(sensitive_fp32(), Policy::fp32)
      .set_all(sensitive_fp32_result(), Policy::fp32_result);
  if (dtype == c10::ScalarType::Half) {
    lists.set_all({"aten::masked_fill", "aten::index_fill"}, Policy::fp32);
    lists.set_all(torch_cuda_banned(), Policy::banned);
  }
  return lists;
}

}  // namespace

std::string_view policy_name(Policy policy) {
  for (const auto& [known, name] : kNames)
    if (known == policy) return name;
  return "";
}

OperatorLists::OperatorLists() {
  static const auto empty = std::make_shared<const Policies>();
  policies_ = empty;
}

OperatorLists OperatorLists::of_torch(c10::DeviceType device) {
  using namespace internal;
  static const OperatorLists cpu = [] {
    OperatorLists lists;
    lists.set_all(torch_cpu_lower_precision(), Policy::lower_precision);
    lists.set_all(torch_cpu_fp32(), Policy::fp32).set_all(torch_cpu_widest(), Policy::widest);
    return lists;
  }();
  static const OperatorLists cuda = [] {
    OperatorLists lists;
    lists.set_all(torch_cuda_lower_precision(), Policy::lower_precision);
    lists.set_all(torch_cuda_fp32(), Policy::fp32);
    lists.set_all(torch_cuda_fp32_result(), Policy::fp32_result);
    lists.set_all(torch_cuda_widest(), Policy::widest).set_all(torch_cuda_banned(), Policy::banned);
    return lists;
  }();
  return device == c10::DeviceType::CPU ? cpu : cuda;
}

OperatorLists OperatorLists::defaults(c10::DeviceType device, c10::ScalarType dtype) {
  GRADUS_CHECK("autocast", dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16,
               "lists are for float16 and bfloat16; got ", dtype);
  Defaults& changed = changed_defaults();
  const std::lock_guard lock(changed.mutex);
  const auto key = std::pair(device, dtype);
  auto found = changed.lists.find(key);
  if (found == changed.lists.end()) {
    found = changed.lists.emplace(key, original_defaults(device, dtype)).first;
  }
  // Made here, under the lock, and shared by all guards.
  internal::OperatorTable::of(found->second);
  return found->second;
}

void OperatorLists::set_defaults(c10::DeviceType device, c10::ScalarType dtype,
                                 OperatorLists lists) {
  GRADUS_CHECK("autocast", dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16,
               "lists are for float16 and bfloat16; got ", dtype);
  Defaults& changed = changed_defaults();
  const std::lock_guard lock(changed.mutex);
  changed.lists.insert_or_assign(std::pair(device, dtype), std::move(lists));
}

void OperatorLists::reset_defaults() {
  Defaults& changed = changed_defaults();
  const std::lock_guard lock(changed.mutex);
  changed.lists.clear();
}

OperatorLists& OperatorLists::set(std::string_view name, Policy policy) {
  return set_all({std::string(name)}, policy);
}

OperatorLists& OperatorLists::set_all(const std::vector<std::string>& names, Policy policy) {
  auto changed = std::make_shared<Policies>(*policies_);
  for (const std::string& name : names) {
    const std::string full = resolve(name);
    if (policy == Policy::fp32_result) {
      const auto dot = full.find('.');
      const std::string base = full.substr(0, dot);
      const auto overloads = dot == std::string::npos
                                 ? internal::overloads_of(base)
                                 : std::vector<std::string>{full.substr(dot + 1)};
      const bool any = std::any_of(overloads.begin(), overloads.end(), [&](const auto& overload) {
        const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
        return op && is_functional(op->schema()) && dtype_argument(op->schema()) >= 0;
      });
      GRADUS_CHECK("autocast", any, "fp32_result sets an operator's dtype argument; ", full,
                   " has none. Use fp32");
    }
    (*changed)[full] = policy;
  }
  policies_ = std::move(changed);
  table_ = nullptr;
  return *this;
}

Policy OperatorLists::policy(std::string_view name) const {
  const std::string full = resolve(name);
  if (const auto found = policies_->find(full); found != policies_->end()) return found->second;
  const auto found = policies_->find(full.substr(0, full.find('.')));
  return found == policies_->end() ? Policy::none : found->second;
}

std::vector<std::string> OperatorLists::operators(Policy policy) const {
  std::vector<std::string> names;
  for (const auto& [name, known] : *policies_)
    if (known == policy) names.push_back(name);
  return names;
}

std::string OperatorLists::text() const {
  std::ostringstream out;
  for (const auto& [policy, title] : kNames) {
    const auto names = operators(policy);
    if (names.empty()) continue;
    out << title << ":";
    for (std::size_t i = 0; i < names.size(); ++i) out << (i > 0 ? ", " : " ") << names[i];
    out << "\n";
  }
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const OperatorLists& lists) {
  return out << lists.text();
}

namespace internal {

std::vector<std::string> overloads_of(const std::string& name) {
  return OperatorIndex::instance().overloads(name);
}

std::shared_ptr<const OperatorTable> OperatorTable::of(const OperatorLists& lists) {
  static std::mutex mutex;  // lists may be given to guards of several threads
  const std::lock_guard lock(mutex);
  if (lists.table_ == nullptr) lists.table_ = std::make_shared<const OperatorTable>(lists);
  return lists.table_;
}

OperatorTable::OperatorTable(const OperatorLists& lists) {
  std::vector<std::pair<c10::OperatorHandle, OperatorRule>> rules;
  const auto& policies = *lists.policies_;
  const auto add = [&](const std::string& base, const std::string& overload, Policy policy) {
    const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
    if (!op || !is_functional(op->schema())) return;
    OperatorRule rule{policy};
    rule.kept_arguments = kept_arguments(op->schema(), policy);
    if (policy == Policy::fp32_result) {
      rule.dtype_argument = static_cast<std::int16_t>(dtype_argument(op->schema()));
      // An overload without the argument gets cast arguments instead.
      if (rule.dtype_argument < 0) rule.policy = Policy::fp32;
    }
    rules.emplace_back(*op, rule);
  };
  for (const auto& [name, policy] : policies) {
    const auto dot = name.find('.');
    if (dot != std::string::npos) {
      add(name.substr(0, dot), name.substr(dot + 1), policy);
      continue;
    }
    for (const std::string& overload : overloads_of(name)) {
      if (overload.empty() || !policies.contains(name + "." + overload))
        add(name, overload, policy);
    }
  }
  // A number must fit the tensor where that does not become float32. A listed operator's rule,
  // which stands before, hides these.
  for (const Saturated& saturated : saturated_operators()) {
    const auto op = c10::Dispatcher::singleton().findSchema({saturated.name, saturated.overload});
    if (!op) continue;
    OperatorRule rule;
    for (const char* const number : saturated.numbers) {
      const auto index = op->schema().argumentIndexWithName(number);
      if (index) rule.saturated_arguments |= 1u << *index;
    }
    rules.emplace_back(*op, rule);
  }
  std::size_t size = 64;
  while (size < 3 * rules.size()) size *= 2;
  slots_.resize(size);
  mask_ = size - 1;
  for (const auto& [op, rule] : rules) insert(op, rule);
}

void OperatorTable::insert(const c10::OperatorHandle& op, OperatorRule rule) {
  std::size_t at = slot(&op.schema());
  while (slots_[at].schema != nullptr) at = (at + 1) & mask_;
  slots_[at] = {&op.schema(), rule};
}

}  // namespace internal
}  // namespace gradus::amp
