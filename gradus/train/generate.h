#pragma once

#include <cstdint>
#include <string>

#include <gradus/data/tokenizer.h>
#include <gradus/models/gpt.h>

namespace gradus::train {

struct GenerateOptions {
  std::string prompt;        ///< Not empty.
  std::int64_t tokens = 80;  ///< Tokens to add, >= 0.
  double temperature = 0.8;  ///< >= 0; 0 takes the likeliest token.
  std::int64_t top_k = 40;   ///< Choose among the k likeliest; 0 is all.
  std::uint64_t seed = 1;    ///< Of the choice.
};

/// Continues a prompt, token by token, and returns the prompt with its continuation. The model sees
/// its last `context` tokens. Leaves mode and random state as they were.
/// @throws UserError for an empty prompt or options out of range.
std::string generate(models::GptImpl& gpt, const data::Tokenizer& tokenizer,
                     const GenerateOptions& options);

}  // namespace gradus::train
