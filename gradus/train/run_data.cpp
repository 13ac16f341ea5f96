#include <gradus/train/run_data.h>

#include <utility>

namespace gradus::train {

RunData make_data(const TrainConfig& config) {
  data::PreparedTokens prepared = data::prepare_tokens(
      config.data.corpus,
      {.kind = config.data.tokenizer, .vocabulary_size = config.data.vocabulary},
      config.data.cache);
  const auto split = data::split_tokens(prepared.tokens->size(),
                                        {.validation_ratio = config.data.validation_ratio});
  data::BatchStream training(prepared.tokens, split.train,
                             {.batch_size = config.train.batch,
                              .sequence_length = config.model.context,
                              .seed = static_cast<std::uint64_t>(config.train.seed)});
  std::optional<data::BatchStream> validation;
  if (!split.validation.empty()) {
    validation.emplace(prepared.tokens, split.validation,
                       data::BatchOptions{.batch_size = config.train.batch,
                                          .sequence_length = config.model.context,
                                          .shuffle = false});
  }
  return {std::move(prepared), split.train, std::move(training), std::move(validation)};
}

}  // namespace gradus::train
