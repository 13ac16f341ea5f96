#pragma once

#include <string>
#include <vector>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

/// An optimizer's state in the structure of torch.optim's state_dict(), made flat so that a
/// safetensors file holds it: tensors "state.<index>.<name>" and the param_groups as JSON text (for
/// the file's metadata).
///
/// @code{.py}
/// d = optimizer.state_dict()
/// tensors = {f"state.{i}.{k}": v for i, s in d["state"].items() for k, v in s.items()
///            if torch.is_tensor(v)}
/// save_file(tensors, path, metadata={"param_groups": json.dumps(d["param_groups"])})
/// @endcode
struct TorchState {
  std::vector<NamedState> tensors = {};
  std::string param_groups = "[]";  ///< [{"lr": 0.001, ..., "params": [0, 1]}, ...]
};

/// The state and the groups of @p optimizer. <index> is the parameter's place in the groups, as in
/// torch. The tensors are the live ones. torch.optim's optimizer of the same kind (AdamW, Adam,
/// SGD, Muon, Adafactor) loads it; others have the same structure.
TorchState to_torch_state(const Optimizer& optimizer);

/// Replaces the state of @p optimizer by copies, and takes over lr, weight_decay and every
/// hyperparameter that a group may have. Keys that this optimizer has not (foreach, fused,
/// capturable, ...) do not count.
/// @throws UserError, with nothing changed, if the JSON is no list of groups, the numbers of groups
/// or parameters differ, param_names differ from the names given here, a hyperparameter that is
/// fixed here (amsgrad, nesterov, ...) differs, or load_state refuses the tensors.
void load_torch_state(Optimizer& optimizer, const TorchState& state);

}  // namespace gradus::optim
