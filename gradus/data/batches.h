#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/data/token_file.h>

namespace gradus::data {

/// Tokens [begin, end) of a token file.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const TokenRange&) const = default;
};

struct SplitOptions {
  double validation_ratio = 0.05;  ///< Share of the tokens kept for validation, in [0, 1).
  std::int64_t blocks = 20;  ///< Contiguous blocks that each give their end to validation, >= 1.
};

struct TokenSplit {
  std::vector<TokenRange> train;
  std::vector<TokenRange> validation;  ///< Empty for a ratio of 0.
};

/// Divides a text of @p count tokens into equal contiguous blocks and gives the last part of each
/// to validation.
///
/// Contiguous, because sequences drawn at random from one text would put neighbours of validation
/// sentences into training; several blocks, because the end of a book is not like the rest of it.
/// blocks = 1 takes the end of the text.
/// @throws UserError for options outside their range, or if @p count is smaller than the number of
/// blocks.
TokenSplit split_tokens(std::int64_t count, const SplitOptions& options = {});

/// How far a stream of batches has come. Saved and restored, it continues exactly.
struct DataPosition {
  std::int64_t epoch = 0;  ///< Epochs completed.
  std::int64_t index =
      0;  ///< Sequences of the current epoch already given, below sequences_per_epoch().
  bool operator==(const DataPosition&) const = default;
};

/// Sequences for a language model: targets are the inputs one token later.
struct Batch {
  at::Tensor inputs;   ///< int64 [B, T], CPU.
  at::Tensor targets;  ///< int64 [B, T], CPU.
  std::int64_t size() const { return inputs.size(0); }
};

struct BatchOptions {
  std::int64_t batch_size = 32;        ///< Sequences, >= 1.
  std::int64_t sequence_length = 256;  ///< Tokens T, >= 1.
  std::uint64_t seed = 0;              ///< Of the order.
  bool shuffle = true;                 ///< A new order each epoch; else the order of the text.
};

/// Gives the sequences of some token ranges, each once an epoch, in an order that depends on seed
/// and epoch only.
///
/// A range of n tokens holds floor((n - 1) / T) sequences side by side, of T inputs and one more
/// target; none crosses the end of its range. The order is a Fisher-Yates permutation by a
/// counter-based generator (SplitMix64), equal on every platform; LibTorch's generators are neither
/// read nor advanced. Memory: 4 bytes a sequence. One thread at a time.
class BatchStream {
 public:
  /// @throws UserError for options outside their range, a range outside the file, or if no sequence
  /// fits.
  BatchStream(std::shared_ptr<const TokenFile> tokens, const std::vector<TokenRange>& ranges,
              BatchOptions options);

  /// The next batch. The last one of an epoch holds what is left (see Batch::size); the next epoch
  /// then begins.
  Batch next();

  /// Position of the sequence that next() gives first.
  DataPosition position() const { return position_; }
  /// Continues from @p position; the order of its epoch is computed, nothing is replayed. The batch
  /// size may differ from the one that the position was saved under. @throws UserError if it cannot
  /// exist.
  void seek(DataPosition position);

  std::int64_t sequences_per_epoch() const { return static_cast<std::int64_t>(order_.size()); }
  /// With the last partial batch.
  std::int64_t batches_per_epoch() const;
  const BatchOptions& options() const { return options_; }

 private:
  std::int64_t begin_of(std::int64_t sequence) const;
  void order_epoch();

  std::shared_ptr<const TokenFile> tokens_;
  BatchOptions options_;
  std::vector<std::int64_t> range_begins_;     // first token of each range that holds a sequence
  std::vector<std::int64_t> first_sequences_;  // number of each range's first sequence
  std::vector<std::uint32_t> order_;
  std::int64_t ordered_epoch_ = -1;
  DataPosition position_;
};

}  // namespace gradus::data
