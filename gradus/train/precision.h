#pragma once

#include <string>
#include <vector>

#include <gradus/amp/levels/properties.h>
#include <gradus/train/config.h>

namespace gradus::train {

/// What train.precision may be, in this order:
///
/// | name | weights | operators | loss scale |
/// |---|---|---|---|
/// | fp32 | float32 | float32 | none |
/// | bf16 | float32 | autocast to bfloat16 | none |
/// | fp16, O1 | float32 | autocast to float16 | dynamic |
/// | O0 | float32 | float32 | 1 |
/// | O2 | float16, float32 masters | float16 | dynamic |
/// | O3 | float16 | float16 | 1 |
/// | bf16-weights | bfloat16, float32 masters | bfloat16 | 1 |
/// | bf16-stochastic | bfloat16, rounded at random | bfloat16 | 1 |
const std::vector<std::string>& precision_names();

/// What amp::initialize makes of train.precision and train.loss_scale; not enabled for fp32.
/// @throws UserError on an unknown name, or a loss scale that the precision does not take.
amp::LevelOptions precision_options(const TrainConfig& config);

}  // namespace gradus::train
