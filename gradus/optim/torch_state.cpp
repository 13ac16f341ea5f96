#include <gradus/optim/torch_state.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <type_traits>
#include <variant>

#include <nlohmann/json.hpp>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kComponent = "torch_state";
constexpr std::string_view kPrefix = "state.";

Json to_json(const OptionValue& value) {
  return std::visit(
      [](const auto& v) -> Json {
        if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::monostate>) {
          return nullptr;
        } else {
          return v;
        }
      },
      value);
}

// torch keeps betas (and Adafactor's two eps) as one value; here each has its own name: beta1, ...
std::vector<std::string> names_of_parts(const std::string& name, const Json& value) {
  std::vector<std::string> result;
  if (!value.is_array() || (name != "betas" && name != "eps")) return result;
  for (std::size_t i = 0; i < value.size(); ++i) {
    result.push_back((name == "betas" ? "beta" : "eps") + std::to_string(i + 1));
  }
  return result;
}

// Names that torch gives differently.
std::string own_name(const std::string& name) { return name == "d" ? "clip_threshold" : name; }

struct Change {
  std::size_t group;
  std::string name;
  double value;
};

// The hyperparameters of one group that the file gives another value, or an error.
class GroupReader {
 public:
  GroupReader(const Optimizer& optimizer, std::size_t group, const Json& json)
      : names_(optimizer.option_names()),
        options_(optimizer.hyperparameters(group)),
        group_(group),
        json_(json) {}

  std::vector<Change> changes() {
    for (const auto& option : options_) {
      const auto found = json_.find(option.name);
      if (found == json_.end()) continue;
      const auto mine = to_json(option.value);
      const auto parts = names_of_parts(option.name, mine);
      if (parts.empty()) {
        read(own_name(option.name), *found, mine);
        continue;
      }
      GRADUS_CHECK(kComponent, found->is_array() && found->size() == mine.size(), "'", option.name,
                   "' of group ", group_, " must be ", mine.size(), " numbers; got ",
                   found->dump());
      for (std::size_t i = 0; i < mine.size(); ++i) read(parts[i], (*found)[i], mine[i]);
    }
    return std::move(changes_);
  }

 private:
  void read(const std::string& name, const Json& theirs, const Json& mine) {
    if (theirs == mine) return;
    // torch's None means its default: an absent key too, and "original" for Muon's rate.
    if (theirs.is_null() && (!mine.is_string() || mine == "original")) return;
    const bool settable = std::find(names_.begin(), names_.end(), name) != names_.end();
    GRADUS_CHECK(kComponent, settable, "'", name, "' of group ", group_,
                 " must be that of this optimizer, which cannot change it after construction; got ",
                 theirs.dump(), " and not ", mine.dump());
    GRADUS_CHECK(kComponent, theirs.is_number(), "'", name, "' of group ", group_,
                 " must be a number; got ", theirs.dump());
    changes_.push_back({group_, name, theirs.get<double>()});
  }

  std::vector<std::string> names_;
  std::vector<NamedOption> options_;
  std::size_t group_;
  const Json& json_;
  std::vector<Change> changes_;
};

Json parse_groups(const std::string& text) {
  auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  GRADUS_CHECK(kComponent, json.is_array(),
               "param_groups must be a JSON list, as json.dumps(state_dict['param_groups']) gives; "
               "got ",
               text.substr(0, 80));
  for (const auto& group : json) {
    GRADUS_CHECK(
        kComponent, group.is_object() && group.contains("params") && group["params"].is_array(),
        "each of param_groups must have a list 'params'; got ", group.dump().substr(0, 80));
  }
  return json;
}

// The parameter that each of torch's indices stands for.
std::map<std::string, std::string> names_by_index(const Optimizer& optimizer, const Json& groups) {
  GRADUS_CHECK(kComponent, groups.size() == optimizer.groups().size(), "param_groups must have ",
               optimizer.groups().size(), " groups, as this optimizer; got ", groups.size());
  const auto names = optimizer.parameter_names();
  std::map<std::string, std::string> result;
  std::size_t next = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& params = groups[g]["params"];
    const auto& mine = optimizer.groups()[g];
    GRADUS_CHECK(kComponent, params.size() == mine.parameters.size(), "group ", g, " must have ",
                 mine.parameters.size(), " parameters; got ", params.size());
    const auto theirs = groups[g].find("param_names");
    for (std::size_t i = 0; i < params.size(); ++i, ++next) {
      const bool named = theirs != groups[g].end() && theirs->is_array() && i < theirs->size() &&
                         !mine.names.empty();
      GRADUS_CHECK(kComponent, !named || (*theirs)[i] == mine.names[i], "parameter ", i,
                   " of group ", g, " must have the name '", named ? mine.names[i] : "", "'; got ",
                   named ? (*theirs)[i].dump() : "",
                   ". The groups list their parameters in another order");
      GRADUS_CHECK(kComponent, params[i].is_number_integer(), "the params of group ", g,
                   " must be indices; got ", params[i].dump());
      GRADUS_CHECK(kComponent, result.emplace(params[i].dump(), names[next]).second,
                   "the params of all groups must differ; got ", params[i].dump(), " twice");
    }
  }
  return result;
}

std::vector<NamedState> renamed(const std::vector<NamedState>& tensors,
                                const std::map<std::string, std::string>& names) {
  std::vector<NamedState> result;
  for (const auto& [name, tensor] : tensors) {
    const auto dot = name.find('.', kPrefix.size());
    GRADUS_CHECK(kComponent, name.starts_with(kPrefix) && dot != std::string::npos,
                 "tensors must be named state.<index>.<name>; got '", name, "'");
    const auto index = name.substr(kPrefix.size(), dot - kPrefix.size());
    const auto found = names.find(index);
    GRADUS_CHECK(kComponent, found != names.end(), "tensor '", name,
                 "' must belong to a parameter of param_groups; there is no index ", index);
    result.push_back({found->second + name.substr(dot), tensor});
  }
  return result;
}

double current_value(const Optimizer& optimizer, const Change& change) {
  const auto& group = optimizer.groups()[change.group];
  if (change.name == "lr") return group.lr;
  if (change.name == "weight_decay") return group.weight_decay;
  for (const auto& option : optimizer.hyperparameters(change.group)) {
    const auto json = to_json(option.value);
    if (own_name(option.name) == change.name) return json.get<double>();
    const auto parts = names_of_parts(option.name, json);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] == change.name) return json[i].get<double>();
    }
  }
  GRADUS_INTERNAL_CHECK(kComponent, false, "no option '", change.name, "'");
  return 0.0;
}

}  // namespace

TorchState to_torch_state(const Optimizer& optimizer) {
  TorchState result;
  std::map<std::string, std::size_t> index_of;
  for (const auto& name : optimizer.parameter_names()) index_of.emplace(name, index_of.size());
  for (const auto& [name, tensor] : optimizer.state()) {
    // State names have no dot, parameter names may.
    const auto dot = name.rfind('.');
    result.tensors.push_back(
        {std::string(kPrefix) + std::to_string(index_of.at(name.substr(0, dot))) + name.substr(dot),
         tensor});
  }
  auto groups = Json::array();
  std::size_t next = 0;
  for (std::size_t g = 0; g < optimizer.groups().size(); ++g) {
    Json group = Json::object();
    for (const auto& option : optimizer.hyperparameters(g)) {
      group[option.name] = to_json(option.value);
    }
    auto params = Json::array();
    for (std::size_t i = 0; i < optimizer.groups()[g].parameters.size(); ++i) {
      params.push_back(next++);
    }
    group["params"] = std::move(params);
    if (!optimizer.groups()[g].names.empty()) group["param_names"] = optimizer.groups()[g].names;
    groups.push_back(std::move(group));
  }
  result.param_groups = groups.dump();
  return result;
}

void load_torch_state(Optimizer& optimizer, const TorchState& state) {
  const auto groups = parse_groups(state.param_groups);
  const auto entries = renamed(state.tensors, names_by_index(optimizer, groups));
  std::vector<Change> changes;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (auto& change : GroupReader(optimizer, g, groups[g]).changes()) {
      changes.push_back(std::move(change));
    }
  }
  std::vector<Change> undo;
  try {
    for (const auto& change : changes) {
      const double old = current_value(optimizer, change);
      optimizer.set_option(change.group, change.name, change.value);
      undo.push_back({change.group, change.name, old});
    }
    optimizer.load_state(entries);
  } catch (...) {
    for (auto it = undo.rbegin(); it != undo.rend(); ++it) {
      optimizer.set_option(it->group, it->name, it->value);
    }
    throw;
  }
}

}  // namespace gradus::optim
