#pragma once

#include <optional>
#include <vector>

#include <gradus/data/batches.h>
#include <gradus/data/token_file.h>
#include <gradus/train/config.h>

namespace gradus::train {

/// The data of a run: tokens divided, and a stream over each part.
struct RunData {
  data::PreparedTokens prepared;
  std::vector<data::TokenRange> training_ranges;  ///< Of the tokens.
  data::BatchStream training;
  std::optional<data::BatchStream> validation;  ///< Nothing if no text is kept for it.
};

/// Reads or makes the tokens of a configuration's corpus.
/// @throws UserError if the corpus or the cache cannot be read, or is too short.
RunData make_data(const TrainConfig& config);

}  // namespace gradus::train
