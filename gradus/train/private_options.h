#pragma once

#include <cstdint>
#include <string>

#include <gradus/privacy/training/make_private.h>
#include <gradus/train/config.h>

namespace gradus::train {

/// The privacy table as options of make_private; sigma is left to the caller.
privacy::PrivacyOptions privacy_options(const TrainConfig& config);

/// All that the noise is chosen for: a resumed run must have the same, or its budget would mean
/// nothing. @param examples  Trained on. @param steps  Of the whole run.
std::string privacy_inputs(const TrainConfig& config, std::int64_t examples, std::int64_t steps);

/// "2.31": three digits, rounded up, so that no figure for people is below the epsilon it stands
/// for.
std::string epsilon_text(double epsilon);

}  // namespace gradus::train
