#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/data/batches.h>

namespace gradus::data {

/// Labelled grey images of one size, 8 bits a pixel. Held outside tensors, so that no memory limit
/// counts them.
struct IdxImages {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<std::uint8_t> pixels;  ///< count() x rows x columns, row by row.
  std::vector<std::uint8_t> labels;  ///< One an image.

  std::int64_t count() const { return static_cast<std::int64_t>(labels.size()); }
  /// 1 + the highest label.
  std::int64_t classes() const;
};

/// Reads images and labels in the IDX format of MNIST (LeCun et al. 1998): big-endian numbers, "0 0
/// 8 3" with three sizes before the pixels, "0 0 8 1" with one before the labels. Files may be
/// compressed by gzip.
/// @throws UserError that names the file: missing, cut, longer than its header says, damaged gzip,
///   another type or number of dimensions, counts that differ, no images.
IdxImages load_idx_images(const std::string& images_path, const std::string& labels_path);

/// Where the Debian package dataset-fashion-mnist puts its files.
inline constexpr const char* kFashionMnistDirectory = "/usr/share/datasets/fashion-mnist";

enum class ImagePart : std::uint8_t {
  train,  ///< 60,000 images.
  test,   ///< 10,000 images.
};

/// Fashion-MNIST (Xiao, Rasul and Vollgraf 2017), 28 x 28 pixels of 10 kinds of clothes, or any
/// data set with MNIST's file names: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-...,
/// with or without ".gz".
/// @throws UserError as load_idx_images; for a missing file of the default directory it names the
///   package to install.
IdxImages load_fashion_mnist(ImagePart part, const std::string& directory = kFashionMnistDirectory);

/// Images to classify.
struct ImageBatch {
  at::Tensor images;  ///< float32 [B, 1, N, N], CPU.
  at::Tensor labels;  ///< int64 [B], CPU.
  std::int64_t size() const { return labels.size(0); }
};

struct ImageBatchOptions {
  std::int64_t batch_size = 64;  ///< Images, >= 1.
  std::int64_t image_size = 0;   ///< Height and width N of a batch, >= 1; 0: as stored.
  std::uint64_t seed = 0;        ///< Of the order.
  bool shuffle = true;           ///< A new order each epoch; else the order of the file.
  double mean = 0.0;             ///< Subtracted from pixels, which are scaled to [0, 1] first.
  double deviation = 1.0;        ///< Divides what is left. Finite, > 0.
};

/// Gives the images of a data set, each once an epoch, in an order that depends on seed and epoch
/// only (as BatchStream's), enlarged or reduced to N x N by bilinear interpolation between pixel
/// centres (align_corners off). One thread at a time.
class ImageBatches {
 public:
  /// @throws UserError for options outside their range or an empty data set.
  ImageBatches(std::shared_ptr<const IdxImages> images, const ImageBatchOptions& options);

  /// The next batch. The last one of an epoch holds what is left; the next epoch then begins.
  ImageBatch next();

  /// Position of the image that next() gives first.
  DataPosition position() const { return position_; }
  /// Continues from @p position. @throws UserError if it cannot exist.
  void seek(DataPosition position);

  std::int64_t images_per_epoch() const { return images_->count(); }
  const ImageBatchOptions& options() const { return options_; }

 private:
  std::shared_ptr<const IdxImages> images_;
  ImageBatchOptions options_;
  std::vector<std::uint32_t> order_;
  std::int64_t ordered_epoch_ = -1;
  DataPosition position_;
};

}  // namespace gradus::data
