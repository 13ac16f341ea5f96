#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gradus/base/clock.h>

namespace gradus::report {

/// Seconds since the Unix epoch: what TensorBoard's time axis shows.
base::Clock unix_clock();

struct TensorBoardOptions {
  base::Clock wall_clock = unix_clock();  ///< Seconds since the Unix epoch.
  /// First step this process will write, on resume: TensorBoard then forgets what earlier files of
  /// the folder hold from this step on. 0: a new run.
  std::int64_t first_step = 0;
};

/// Writes a TensorBoard event file: TFRecord frames (length, masked CRC-32C of it, data, masked
/// CRC-32C of that) around Event messages, encoded here by hand because LibTorch exports the
/// symbols of its own protobuf. Each call hands its event to the kernel before it returns. View
/// with `tensorboard --logdir FOLDER`.
///
/// Tags group by their part before '/': "train/loss", "memory/peak_bytes". They and texts are
/// UTF-8; invalid bytes are replaced.
class TensorBoardWriter {
 public:
  /// Makes @p folder if need be and opens a new file in it, named after the time: earlier files
  /// stay.
  /// @throws UserError if it cannot.
  explicit TensorBoardWriter(const std::filesystem::path& folder, TensorBoardOptions options = {});
  TensorBoardWriter(TensorBoardWriter&&) noexcept;
  TensorBoardWriter& operator=(TensorBoardWriter&&) noexcept;
  ~TensorBoardWriter();

  /// Writes one value. TensorBoard stores 32-bit floats. @throws UserError on an empty tag or a
  /// full disk.
  void scalar(std::string_view tag, double value, std::int64_t step);

  /// Writes several values of one step as one event.
  void scalars(const std::vector<std::pair<std::string, double>>& values, std::int64_t step);

  /// Writes a text, shown as Markdown: a sample, the configuration.
  void text(std::string_view tag, std::string_view markdown, std::int64_t step);

  const std::filesystem::path& path() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::report
