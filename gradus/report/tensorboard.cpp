#include <gradus/report/tensorboard.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <system_error>

#include <gradus/base/error.h>
#include <gradus/report/internal/append_file.h>
#include <gradus/report/internal/crc32c.h>
#include <gradus/report/internal/text.h>

namespace gradus::report {
namespace {

/// Encodes one protobuf message (protobuf.dev/programming-guides/encoding).
class Message {
 public:
  void varint(int field, std::uint64_t value) {
    key(field, 0);
    raw_varint(value);
  }
  void fixed64(int field, double value) {
    key(field, 1);
    little_endian(std::bit_cast<std::uint64_t>(value), 8);
  }
  void fixed32(int field, float value) {
    key(field, 5);
    little_endian(std::bit_cast<std::uint32_t>(value), 4);
  }
  void bytes(int field, std::string_view value) {
    key(field, 2);
    raw_varint(value.size());
    data_ += value;
  }
  void message(int field, const Message& value) { bytes(field, value.data_); }
  const std::string& data() const { return data_; }

 private:
  void key(int field, unsigned wire_type) {
    raw_varint(static_cast<std::uint64_t>(field) << 3 | wire_type);
  }
  void raw_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) data_ += static_cast<char>(value | 0x80);
    data_ += static_cast<char>(value);
  }
  void little_endian(std::uint64_t value, int byte_count) {
    for (int i = 0; i < byte_count; ++i) data_ += static_cast<char>(value >> (8 * i));
  }
  std::string data_;
};

std::string little_endian(std::uint64_t value, int byte_count) {
  std::string text;
  for (int i = 0; i < byte_count; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

/// One TFRecord frame (tensorflow/core/lib/io/record_writer.h).
std::string frame(const std::string& data) {
  const std::string length = little_endian(data.size(), 8);
  return length + little_endian(internal::masked_crc32c(length), 4) + data +
         little_endian(internal::masked_crc32c(data), 4);
}

// Field numbers below are those of event.proto, summary.proto, tensor.proto and tensor_shape.proto
// of TensorBoard.
Message event(double wall_time_s, std::int64_t step) {
  Message result;
  result.fixed64(1, wall_time_s);
  if (step != 0) result.varint(2, static_cast<std::uint64_t>(step));
  return result;
}

std::string checked_tag(std::string_view tag) {
  GRADUS_CHECK("tensorboard", !tag.empty(), "a tag must not be empty; got ''");
  return internal::valid_utf8(tag);
}

Message scalar_value(std::string_view tag, double value) {
  Message result;
  result.bytes(1, checked_tag(tag));
  result.fixed32(2, static_cast<float>(value));
  return result;
}

Message text_value(std::string_view tag, std::string_view text) {
  constexpr int kStringType = 7;   // DT_STRING
  constexpr int kTensorClass = 2;  // DATA_CLASS_TENSOR
  Message plugin;
  plugin.bytes(1, "text");
  Message metadata;
  metadata.message(1, plugin);
  metadata.varint(4, kTensorClass);
  Message dimension;
  dimension.varint(1, 1);
  Message shape;
  shape.message(2, dimension);
  Message tensor;
  tensor.varint(1, kStringType);
  tensor.message(2, shape);
  tensor.bytes(8, internal::valid_utf8(text));
  Message result;
  result.bytes(1, checked_tag(tag));
  result.message(8, tensor);
  result.message(9, metadata);
  return result;
}

internal::AppendFile new_file(const std::filesystem::path& folder, double wall_time_s) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  GRADUS_CHECK("tensorboard", std::filesystem::is_directory(folder), "cannot make folder '",
               folder.string(), "': ", error.message());
  // TensorBoard takes files whose name holds "tfevents", in the order of their names.
  for (int number = 0; number < 10000; ++number) {
    std::array<char, 64> name{};
    std::snprintf(name.data(), name.size(), "events.out.tfevents.%010lld.gradus.%04d",
                  static_cast<long long>(wall_time_s), number);
    if (std::filesystem::exists(folder / name.data())) continue;
    return {folder / name.data(), "tensorboard", internal::AppendFile::Mode::create_new};
  }
  throw UserError(base::join("[tensorboard] folder '", folder.string(),
                             "' holds 10000 event files of this second; name another folder"));
}

}  // namespace

base::Clock unix_clock() {
  return [] {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
}

struct TensorBoardWriter::State {
  base::Clock wall_clock;
  internal::AppendFile file;

  void write_summary(const std::vector<Message>& values, std::int64_t step) {
    GRADUS_CHECK("tensorboard", step >= 0, "step must be >= 0; got ", step);
    Message summary;
    for (const auto& value : values) summary.message(1, value);
    Message message = event(wall_clock(), step);
    message.message(5, summary);
    file.append(frame(message.data()));
  }
};

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder,
                                     TensorBoardOptions options) {
  GRADUS_CHECK("tensorboard", options.wall_clock != nullptr,
               "a clock is required; got an empty function");
  GRADUS_CHECK("tensorboard", options.first_step >= 0, "first_step must be >= 0; got ",
               options.first_step);
  const double now_s = options.wall_clock();
  state_.reset(new State{std::move(options.wall_clock), new_file(folder, now_s)});
  Message version = event(now_s, 0);
  version.bytes(3, "brain.Event:2");
  state_->file.append(frame(version.data()));
  if (options.first_step == 0) return;
  constexpr int kStart = 1;  // SessionLog.START: readers purge later steps of earlier files
  Message session;
  session.varint(1, kStart);
  Message start = event(now_s, options.first_step);
  start.message(7, session);
  state_->file.append(frame(start.data()));
}

TensorBoardWriter::TensorBoardWriter(TensorBoardWriter&&) noexcept = default;
TensorBoardWriter& TensorBoardWriter::operator=(TensorBoardWriter&&) noexcept = default;
TensorBoardWriter::~TensorBoardWriter() = default;

void TensorBoardWriter::scalar(std::string_view tag, double value, std::int64_t step) {
  state_->write_summary({scalar_value(tag, value)}, step);
}

void TensorBoardWriter::scalars(const std::vector<std::pair<std::string, double>>& values,
                                std::int64_t step) {
  std::vector<Message> messages;
  for (const auto& [tag, value] : values) messages.push_back(scalar_value(tag, value));
  state_->write_summary(messages, step);
}

void TensorBoardWriter::text(std::string_view tag, std::string_view markdown, std::int64_t step) {
  state_->write_summary({text_value(tag, markdown)}, step);
}

const std::filesystem::path& TensorBoardWriter::path() const { return state_->file.path(); }

}  // namespace gradus::report
