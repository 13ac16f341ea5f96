#include <gradus/data/batches.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include <ATen/ops/empty.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/shuffle.h>

namespace gradus::data {

TokenSplit split_tokens(std::int64_t count, const SplitOptions& options) {
  GRADUS_CHECK("batches", options.validation_ratio >= 0.0 && options.validation_ratio < 1.0,
               "validation_ratio must be in [0, 1); got ", options.validation_ratio);
  GRADUS_CHECK("batches", options.blocks >= 1 && count >= options.blocks, "a text of ", count,
               " tokens must be split into 1 to as many blocks; got ", options.blocks);
  TokenSplit split;
  // Equal to one token: the first (count mod blocks) blocks have one more.
  const std::int64_t small = count / options.blocks;
  const std::int64_t larger = count % options.blocks;
  std::int64_t begin = 0;
  for (std::int64_t block = 0; block < options.blocks; ++block) {
    const std::int64_t end = begin + small + (block < larger ? 1 : 0);
    const auto held_out =
        static_cast<std::int64_t>(static_cast<double>(end - begin) * options.validation_ratio);
    split.train.push_back({begin, end - held_out});
    if (held_out > 0) split.validation.push_back({end - held_out, end});
    begin = end;
  }
  return split;
}

BatchStream::BatchStream(std::shared_ptr<const TokenFile> tokens,
                         const std::vector<TokenRange>& ranges, BatchOptions options)
    : tokens_(std::move(tokens)), options_(options) {
  GRADUS_CHECK("batches", tokens_ != nullptr, "a stream of batches needs a token file");
  GRADUS_CHECK("batches", options_.batch_size >= 1, "batch_size must be >= 1; got ",
               options_.batch_size);
  GRADUS_CHECK("batches", options_.sequence_length >= 1, "sequence_length must be >= 1; got ",
               options_.sequence_length);
  std::int64_t sequences = 0;
  for (const TokenRange& range : ranges) {
    GRADUS_CHECK("batches",
                 range.begin >= 0 && range.begin <= range.end && range.end <= tokens_->size(),
                 "the range ", range.begin, " to ", range.end, " must lie in a file of ",
                 tokens_->size(), " tokens");
    const std::int64_t held = (range.end - range.begin - 1) / options_.sequence_length;
    if (held < 1) continue;
    range_begins_.push_back(range.begin);
    first_sequences_.push_back(sequences);
    sequences += held;
  }
  GRADUS_CHECK("batches", sequences >= 1,
               "a range must hold sequence_length + 1 = ", options_.sequence_length + 1,
               " tokens; none of ", ranges.size(),
               " does. Shorten the sequences or split into fewer blocks");
  GRADUS_CHECK("batches", sequences <= std::numeric_limits<std::uint32_t>::max(),
               "an epoch holds at most 2^32 - 1 sequences; got ", sequences);
  order_.resize(static_cast<std::size_t>(sequences));
}

std::int64_t BatchStream::batches_per_epoch() const {
  return (sequences_per_epoch() + options_.batch_size - 1) / options_.batch_size;
}

std::int64_t BatchStream::begin_of(std::int64_t sequence) const {
  const auto after = std::upper_bound(first_sequences_.begin(), first_sequences_.end(), sequence);
  const auto range = static_cast<std::size_t>(after - first_sequences_.begin()) - 1;
  return range_begins_[range] + (sequence - first_sequences_[range]) * options_.sequence_length;
}

void BatchStream::order_epoch() {
  if (ordered_epoch_ == position_.epoch) return;
  internal::order_of_epoch(order_, options_.seed, position_.epoch, options_.shuffle);
  ordered_epoch_ = position_.epoch;
}

Batch BatchStream::next() {
  order_epoch();
  const std::int64_t size = std::min(options_.batch_size, sequences_per_epoch() - position_.index);
  const std::int64_t length = options_.sequence_length;
  Batch batch{at::empty({size, length}, at::kLong), at::empty({size, length}, at::kLong)};
  auto* inputs = batch.inputs.mutable_data_ptr<std::int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < size; ++row) {
    const std::int64_t begin = begin_of(order_[static_cast<std::size_t>(position_.index + row)]);
    tokens_->copy(begin, {inputs + row * length, static_cast<std::size_t>(length)});
    tokens_->copy(begin + 1, {targets + row * length, static_cast<std::size_t>(length)});
  }
  position_.index += size;
  if (position_.index == sequences_per_epoch()) position_ = {position_.epoch + 1, 0};
  return batch;
}

void BatchStream::seek(DataPosition position) {
  GRADUS_CHECK("batches",
               position.epoch >= 0 && position.index >= 0 && position.index < sequences_per_epoch(),
               "a position needs an epoch >= 0 and an index below the ", sequences_per_epoch(),
               " sequences of an epoch; got epoch ", position.epoch, ", index ", position.index,
               ". Was it saved with another corpus, split or sequence length?");
  position_ = position;
}

}  // namespace gradus::data
