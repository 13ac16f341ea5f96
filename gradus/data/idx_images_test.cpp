#include <gradus/data/idx_images.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <zlib.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <gradus/base/error.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string big_endian(std::uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>((value >> shift) & 0xFF);
  return bytes;
}

std::string images_file(std::uint32_t count, std::uint32_t rows, std::uint32_t columns,
                        const std::string& pixels) {
  return big_endian(0x803) + big_endian(count) + big_endian(rows) + big_endian(columns) + pixels;
}

std::string labels_file(const std::string& labels) {
  return big_endian(0x801) + big_endian(static_cast<std::uint32_t>(labels.size())) + labels;
}

class IdxImagesTest : public testing::Test {
 protected:
  IdxImagesTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-idx-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    folder_ = pattern;
  }
  ~IdxImagesTest() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

  std::string write_gzip(const std::string& name, const std::string& content) const {
    gzFile file = gzopen(path(name).c_str(), "wb");
    gzwrite(file, content.data(), static_cast<unsigned>(content.size()));
    gzclose(file);
    return path(name);
  }

  // Three images of 2 x 2.
  const std::string pixels_ = std::string("\x00\x01\x02\x03\x10\x20\x30\x40\xFF\xFE\xFD\xFC", 12);
  const std::string labels_ = std::string("\x02\x00\x01", 3);
  fs::path folder_;
};

TEST_F(IdxImagesTest, ReadsPlainAndCompressedFilesAlike) {
  const IdxImages plain =
      load_idx_images(write("i", images_file(3, 2, 2, pixels_)), write("l", labels_file(labels_)));
  const IdxImages packed = load_idx_images(write_gzip("i.gz", images_file(3, 2, 2, pixels_)),
                                           write_gzip("l.gz", labels_file(labels_)));
  for (const IdxImages* images : {&plain, &packed}) {
    EXPECT_EQ(images->count(), 3);
    EXPECT_EQ(images->rows, 2);
    EXPECT_EQ(images->columns, 2);
    EXPECT_EQ(images->classes(), 3);
    EXPECT_EQ(std::string(images->pixels.begin(), images->pixels.end()), pixels_);
    EXPECT_EQ(std::string(images->labels.begin(), images->labels.end()), labels_);
  }
}

TEST_F(IdxImagesTest, FindsTheFilesOfADataSetByTheirNames) {
  write("train-images-idx3-ubyte", images_file(3, 2, 2, pixels_));
  write_gzip("train-labels-idx1-ubyte.gz", labels_file(labels_));
  EXPECT_EQ(load_fashion_mnist(ImagePart::train, folder_.string()).count(), 3);
  EXPECT_THAT(([&] { load_fashion_mnist(ImagePart::test, folder_.string()); }),
              ThrowsMessage<UserError>(AllOf(HasSubstr(path("t10k-images-idx3-ubyte")),
                                             testing::Not(HasSubstr("apt-get")))));
}

TEST_F(IdxImagesTest, NamesThePackageOfTheDefaultDirectory) {
  if (fs::exists(kFashionMnistDirectory)) {
    const IdxImages images = load_fashion_mnist(ImagePart::test);
    EXPECT_EQ(images.count(), 10000);
    EXPECT_EQ(images.rows, 28);
    EXPECT_EQ(images.columns, 28);
    EXPECT_EQ(images.classes(), 10);
  } else {
    EXPECT_THAT(([] { load_fashion_mnist(ImagePart::train); }),
                ThrowsMessage<UserError>(HasSubstr("apt-get install dataset-fashion-mnist")));
  }
}

TEST_F(IdxImagesTest, RefusesDamagedFilesByName) {
  const std::string images = write("images", images_file(3, 2, 2, pixels_));
  const std::string labels = write("labels", labels_file(labels_));
  const auto refused = [&](const std::string& i, const std::string& l, const std::string& name,
                           const std::string& text) {
    SCOPED_TRACE(text);
    EXPECT_THAT(([&] { load_idx_images(i, l); }),
                ThrowsMessage<UserError>(AllOf(HasSubstr(path(name)), HasSubstr(text))));
  };
  refused(path("absent"), labels, "absent", "there is none");
  refused(path("."), labels, ".", "there is none");
  refused(write("cut", images_file(3, 2, 2, pixels_.substr(0, 11))), labels, "cut",
          "must hold 4 bytes of an image; it ends after 3");
  refused(write("header", images_file(3, 2, 2, "").substr(0, 9)), labels, "header",
          "bytes of sizes; it ends after 1");
  refused(write("long", images_file(3, 2, 2, pixels_ + "x")), labels, "long", "it goes on");
  refused(write("none", images_file(0, 2, 2, "")), labels, "none", "0 of 2 x 2");
  refused(write("huge", images_file(0xFFFFFFFF, 0xFFFF, 0xFFFF, "")), labels, "huge",
          "its header says");
  refused(write("much", images_file(100000000, 28, 28, pixels_)), labels, "much",
          "it ends after 12");
  refused(labels, images, "labels", "interchanged");
  refused(images, write("few", labels_file(labels_.substr(0, 2))), "few", "must be as many");
  refused(images, write("short", labels_file(labels_).substr(0, 10)), "short",
          "bytes of labels; it ends after 2");
  write_gzip("whole.gz", images_file(3, 2, 2, pixels_));
  std::ifstream in(path("whole.gz"), std::ios::binary);
  std::string packed{std::istreambuf_iterator<char>(in), {}};
  refused(write("half.gz", packed.substr(0, packed.size() / 2)), labels, "half.gz", "Install it");
  packed[packed.size() - 6] = static_cast<char>(packed[packed.size() - 6] ^ 0x55);  // its CRC
  refused(write("bad.gz", packed), labels, "bad.gz", "zlib says");
}

std::shared_ptr<const IdxImages> numbered_images(std::int64_t count, std::int64_t rows,
                                                 std::int64_t columns) {
  auto images = std::make_shared<IdxImages>();
  images->rows = rows;
  images->columns = columns;
  for (std::int64_t i = 0; i < count; ++i) {
    images->labels.push_back(static_cast<std::uint8_t>(i));
    for (std::int64_t p = 0; p < rows * columns; ++p)
      images->pixels.push_back(static_cast<std::uint8_t>(i * 37 + p * 11));
  }
  return images;
}

TEST(ImageBatchesTest, GivesEveryImageOnceAnEpochAndScalesItsPixels) {
  const auto images = numbered_images(10, 2, 3);
  ImageBatches batches(images, {.batch_size = 4, .seed = 3, .mean = 0.25, .deviation = 0.5});
  std::multiset<std::int64_t> seen;
  for (const std::int64_t size : {4, 4, 2}) {
    const ImageBatch batch = batches.next();
    ASSERT_EQ(batch.size(), size);
    ASSERT_EQ(batch.images.sizes(), (std::vector<std::int64_t>{size, 1, 2, 3}));
    for (std::int64_t row = 0; row < size; ++row) {
      const auto label = batch.labels[row].item<std::int64_t>();
      seen.insert(label);
      for (std::int64_t p = 0; p < 6; ++p) {
        const auto pixel = images->pixels[static_cast<std::size_t>(label * 6 + p)];
        EXPECT_FLOAT_EQ(batch.images[row].view(-1)[p].item<float>(),
                        (static_cast<float>(pixel) / 255.0F - 0.25F) / 0.5F);
      }
    }
  }
  EXPECT_EQ(seen.size(), 10U);
  EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), 10U);
  EXPECT_EQ(batches.position(), (DataPosition{1, 0}));
}

TEST(ImageBatchesTest, OrderDependsOnSeedAndEpochAndContinuesFromAPosition) {
  const auto images = numbered_images(50, 1, 1);
  const auto order = [&](std::uint64_t seed, DataPosition from, std::int64_t count) {
    ImageBatches batches(images, {.batch_size = 5, .seed = seed});
    batches.seek(from);
    std::vector<at::Tensor> labels;
    for (std::int64_t i = 0; i < count; ++i) labels.push_back(batches.next().labels);
    return torch::cat(labels);
  };
  const at::Tensor two_epochs = order(1, {}, 20);
  EXPECT_TRUE(torch::equal(two_epochs, order(1, {}, 20)));
  EXPECT_FALSE(torch::equal(two_epochs, order(2, {}, 20)));
  EXPECT_FALSE(torch::equal(two_epochs.slice(0, 0, 50), two_epochs.slice(0, 50, 100)));
  EXPECT_TRUE(torch::equal(two_epochs.slice(0, 65), order(1, {1, 15}, 7)));

  ImageBatches unshuffled(images, {.batch_size = 50, .shuffle = false});
  EXPECT_TRUE(torch::equal(unshuffled.next().labels, torch::arange(50)));
}

// Bilinear interpolation between pixel centres, written out.
double interpolated(const at::Tensor& image, std::int64_t side, std::int64_t y, std::int64_t x) {
  const auto place = [side](std::int64_t out, std::int64_t in_size) {
    const double scale = static_cast<double>(in_size) / static_cast<double>(side);
    const double at = std::max(0.0, (static_cast<double>(out) + 0.5) * scale - 0.5);
    const auto low = std::min<std::int64_t>(static_cast<std::int64_t>(at), in_size - 1);
    return std::tuple(low, std::min(low + 1, in_size - 1), at - static_cast<double>(low));
  };
  const auto [y0, y1, fy] = place(y, image.size(0));
  const auto [x0, x1, fx] = place(x, image.size(1));
  const auto value = [&](std::int64_t row, std::int64_t column) {
    return static_cast<double>(image[row][column].item<float>());
  };
  return (1 - fy) * ((1 - fx) * value(y0, x0) + fx * value(y0, x1)) +
         fy * ((1 - fx) * value(y1, x0) + fx * value(y1, x1));
}

TEST(ImageBatchesTest, ResizesByBilinearInterpolation) {
  const auto images = numbered_images(2, 4, 5);
  ImageBatches stored(images, {.batch_size = 2, .shuffle = false});
  const at::Tensor small = stored.next().images;
  for (const std::int64_t side : {9, 3}) {
    ImageBatches resized(images, {.batch_size = 2, .image_size = side, .shuffle = false});
    const at::Tensor large = resized.next().images;
    ASSERT_EQ(large.sizes(), (std::vector<std::int64_t>{2, 1, side, side}));
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t y = 0; y < side; ++y) {
        for (std::int64_t x = 0; x < side; ++x) {
          EXPECT_NEAR(large[i][0][y][x].item<float>(), interpolated(small[i][0], side, y, x), 1e-6);
        }
      }
    }
  }
}

TEST(ImageBatchesTest, RefusesOptionsOutOfTheirRange) {
  const auto images = numbered_images(3, 2, 2);
  const auto refused = [](const std::shared_ptr<const IdxImages>& data,
                          const ImageBatchOptions& options, const char* text) {
    EXPECT_THAT(([&] { ImageBatches batches(data, options); }),
                ThrowsMessage<UserError>(HasSubstr(text)));
  };
  refused(nullptr, {}, "got none");
  refused(std::make_shared<IdxImages>(), {}, "got none");
  refused(images, {.batch_size = 0}, "batch_size must be >= 1; got 0");
  refused(images, {.image_size = -1}, "image_size must be >= 0; got -1");
  refused(images, {.deviation = 0.0}, "deviation must be finite and > 0; got 0");
  refused(images, {.mean = INFINITY}, "mean must be finite");
  ImageBatches batches(images, {});
  EXPECT_THAT(([&] { batches.seek({0, 3}); }), ThrowsMessage<UserError>(HasSubstr("index 3")));
}

}  // namespace
}  // namespace gradus::data
