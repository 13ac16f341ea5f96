#include <gradus/data/idx_images.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <utility>

#include <zlib.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/upsample_bilinear2d.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/shuffle.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPackage = "dataset-fashion-mnist";

/// A file that may be gzip; zlib gives a plain one as it is.
class PackedFile {
 public:
  explicit PackedFile(const std::string& path) : path_(path) {
    GRADUS_CHECK("data", fs::is_regular_file(path), "an IDX file is required; there is none at '",
                 path, "'");
    file_ = gzopen(path.c_str(), "rb");
    GRADUS_CHECK("data", file_ != nullptr, "the IDX file '", path, "' cannot be opened");
    gzbuffer(file_, 1 << 17);
  }
  ~PackedFile() {
    if (file_ != nullptr) gzclose_r(file_);
  }
  PackedFile(const PackedFile&) = delete;
  PackedFile& operator=(const PackedFile&) = delete;

  /// Fills @p bytes, whose @p purpose a message names.
  void read(std::uint8_t* bytes, std::size_t count, const char* purpose) {
    std::size_t got = 0;
    while (got < count) {
      const auto part = static_cast<unsigned>(std::min<std::size_t>(count - got, 1U << 30));
      const int taken = gzread(file_, bytes + got, part);
      if (taken <= 0) break;
      got += static_cast<std::size_t>(taken);
    }
    // A cut gzip stream gives its last bytes first and its error after.
    check_stream();
    GRADUS_CHECK("data", got == count, "the IDX file '", path_, "' must hold ", count, " bytes of ",
                 purpose, "; it ends after ", got, ". Install it afresh");
  }

  /// Reads a big-endian number of four bytes.
  std::uint32_t number(const char* purpose) {
    std::array<std::uint8_t, 4> bytes{};
    read(bytes.data(), bytes.size(), purpose);
    return static_cast<std::uint32_t>(bytes[0]) << 24 | static_cast<std::uint32_t>(bytes[1]) << 16 |
           static_cast<std::uint32_t>(bytes[2]) << 8 | static_cast<std::uint32_t>(bytes[3]);
  }

  void expect_end() {
    std::uint8_t extra = 0;
    const int taken = gzread(file_, &extra, 1);
    check_stream();
    GRADUS_CHECK("data", taken == 0, "the IDX file '", path_,
                 "' must end where its header says; it goes on");
  }

 private:
  void check_stream() {
    int code = Z_OK;
    const char* message = gzerror(file_, &code);
    // At the end of a plain file zlib may report Z_BUF_ERROR too: what was read says how much.
    GRADUS_CHECK("data", code == Z_OK || (code == Z_BUF_ERROR && gzdirect(file_) == 1),
                 "the IDX file '", path_, "' must be whole; zlib says: ", message,
                 ". Install it afresh");
  }

  std::string path_;
  gzFile file_ = nullptr;
};

/// Reads the header of unsigned bytes in @p dimensions dimensions and returns the sizes.
std::vector<std::int64_t> read_header(PackedFile& file, const std::string& path,
                                      std::uint32_t dimensions) {
  const std::uint32_t magic = file.number("magic");
  GRADUS_CHECK("data", magic == (0x800U | dimensions), "an IDX file of bytes in ", dimensions,
               " dimensions must begin with ", 0x800U | dimensions, "; '", path, "' begins with ",
               magic, ". Are images and labels interchanged?");
  std::vector<std::int64_t> sizes;
  for (std::uint32_t i = 0; i < dimensions; ++i) sizes.push_back(file.number("sizes"));
  return sizes;
}

/// The file as it is named, or with ".gz".
std::string find_file(const std::string& directory, const std::string& name) {
  const std::string plain = (fs::path(directory) / name).string();
  for (const std::string& path : {plain, plain + ".gz"})
    if (fs::exists(path)) return path;
  throw UserError(base::join(
      "[data] images must be in '", plain, "' or '", name, ".gz' beside it; there is neither",
      directory == kFashionMnistDirectory ? base::join(". Install them: apt-get install ", kPackage)
                                          : std::string()));
}

}  // namespace

std::int64_t IdxImages::classes() const {
  return labels.empty() ? 0 : 1 + *std::max_element(labels.begin(), labels.end());
}

IdxImages load_idx_images(const std::string& images_path, const std::string& labels_path) {
  IdxImages images;
  PackedFile pixels(images_path);
  const std::vector<std::int64_t> sizes = read_header(pixels, images_path, 3);
  GRADUS_CHECK("data",
               sizes[0] >= 1 && sizes[1] >= 1 && sizes[2] >= 1 && sizes[0] <= (1LL << 31) &&
                   sizes[1] * sizes[2] <= (1 << 24),
               "the IDX file '", images_path, "' must hold images; its header says ", sizes[0],
               " of ", sizes[1], " x ", sizes[2]);
  images.rows = sizes[1];
  images.columns = sizes[2];
  const std::int64_t image_bytes = images.rows * images.columns;
  // Image by image: a header that promises too much ends at the end of the file, not in bad_alloc.
  for (std::int64_t i = 0; i < sizes[0]; ++i) {
    const std::size_t begin = images.pixels.size();
    images.pixels.resize(begin + static_cast<std::size_t>(image_bytes));
    pixels.read(images.pixels.data() + begin, static_cast<std::size_t>(image_bytes), "an image");
  }
  pixels.expect_end();

  PackedFile labels(labels_path);
  const std::int64_t count = read_header(labels, labels_path, 1)[0];
  GRADUS_CHECK("data", count == sizes[0], "images and labels must be as many; '", images_path,
               "' has ", sizes[0], " and '", labels_path, "' has ", count);
  images.labels.resize(static_cast<std::size_t>(count));
  labels.read(images.labels.data(), images.labels.size(), "labels");
  labels.expect_end();
  return images;
}

IdxImages load_fashion_mnist(ImagePart part, const std::string& directory) {
  const std::string prefix = part == ImagePart::train ? "train" : "t10k";
  return load_idx_images(find_file(directory, prefix + "-images-idx3-ubyte"),
                         find_file(directory, prefix + "-labels-idx1-ubyte"));
}

ImageBatches::ImageBatches(std::shared_ptr<const IdxImages> images,
                           const ImageBatchOptions& options)
    : images_(std::move(images)), options_(options) {
  GRADUS_CHECK("images", images_ != nullptr && images_->count() >= 1,
               "batches need a data set with images; got none");
  GRADUS_CHECK("images", images_->count() <= std::numeric_limits<std::uint32_t>::max(),
               "a data set holds at most 2^32 - 1 images; got ", images_->count());
  GRADUS_CHECK("images", options_.batch_size >= 1, "batch_size must be >= 1; got ",
               options_.batch_size);
  GRADUS_CHECK("images", options_.image_size >= 0, "image_size must be >= 0; got ",
               options_.image_size);
  GRADUS_CHECK("images", std::isfinite(options_.mean), "mean must be finite; got ", options_.mean);
  GRADUS_CHECK("images", std::isfinite(options_.deviation) && options_.deviation > 0.0,
               "deviation must be finite and > 0; got ", options_.deviation);
  order_.resize(static_cast<std::size_t>(images_->count()));
}

ImageBatch ImageBatches::next() {
  if (ordered_epoch_ != position_.epoch) {
    internal::order_of_epoch(order_, options_.seed, position_.epoch, options_.shuffle);
    ordered_epoch_ = position_.epoch;
  }
  const std::int64_t size = std::min(options_.batch_size, images_per_epoch() - position_.index);
  const std::int64_t image_bytes = images_->rows * images_->columns;
  ImageBatch batch{at::empty({size, 1, images_->rows, images_->columns}, at::kFloat),
                   at::empty({size}, at::kLong)};
  auto* values = batch.images.mutable_data_ptr<float>();
  auto* labels = batch.labels.mutable_data_ptr<std::int64_t>();
  const auto mean = static_cast<float>(options_.mean);
  const auto deviation = static_cast<float>(options_.deviation);
  for (std::int64_t row = 0; row < size; ++row) {
    const std::size_t image = order_[static_cast<std::size_t>(position_.index + row)];
    const std::uint8_t* pixels =
        images_->pixels.data() + image * static_cast<std::size_t>(image_bytes);
    labels[row] = images_->labels[image];
    for (std::int64_t i = 0; i < image_bytes; ++i)
      *values++ = (static_cast<float>(pixels[i]) / 255.0F - mean) / deviation;
  }
  const std::int64_t side = options_.image_size;
  if (side > 0 && (side != images_->rows || side != images_->columns))
    batch.images = at::upsample_bilinear2d(batch.images, {side, side}, /*align_corners=*/false);
  position_.index += size;
  if (position_.index == images_per_epoch()) position_ = {position_.epoch + 1, 0};
  return batch;
}

void ImageBatches::seek(DataPosition position) {
  GRADUS_CHECK("images",
               position.epoch >= 0 && position.index >= 0 && position.index < images_per_epoch(),
               "a position needs an epoch >= 0 and an index below the ", images_per_epoch(),
               " images of an epoch; got epoch ", position.epoch, ", index ", position.index);
  position_ = position;
}

}  // namespace gradus::data
