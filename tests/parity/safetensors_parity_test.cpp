// Files of gradus in Python's safetensors and the reverse; the tensors are described in
// safetensors_parity.py.
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <safetensors_parity_paths.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/state/safetensors.h>

namespace gradus::state {
namespace {

namespace fs = std::filesystem;

const Metadata kMetadata{{"format", "pt"}, {"note", "quotes \" and \xc3\xa9\n"}};

at::Tensor reference(at::ScalarType dtype, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, dtype);
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  const auto size = static_cast<std::size_t>(tensor.element_size());
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::uint64_t number = static_cast<std::uint64_t>(i + 1) * 0x9E3779B97F4A7C15ULL;
    if (dtype == at::kBool) number &= 1;
    std::memcpy(bytes + static_cast<std::size_t>(i) * size, &number, size);
  }
  return tensor;
}

std::vector<NamedTensor> references() {
  const std::vector<std::pair<std::string, at::ScalarType>> dtypes{{"f64", at::kDouble},
                                                                   {"f32", at::kFloat},
                                                                   {"f16", at::kHalf},
                                                                   {"bf16", at::kBFloat16},
                                                                   {"f8_e4m3", at::kFloat8_e4m3fn},
                                                                   {"f8_e5m2", at::kFloat8_e5m2},
                                                                   {"c64", at::kComplexFloat},
                                                                   {"i64", at::kLong},
                                                                   {"i32", at::kInt},
                                                                   {"i16", at::kShort},
                                                                   {"i8", at::kChar},
                                                                   {"u64", at::kUInt64},
                                                                   {"u32", at::kUInt32},
                                                                   {"u16", at::kUInt16},
                                                                   {"u8", at::kByte},
                                                                   {"bool", at::kBool}};
  const std::vector<std::pair<std::string, std::vector<std::int64_t>>> shapes{
      {"scalar", {}}, {"empty", {0}}, {"empty3", {2, 0, 3}}, {"vector", {5}}, {"cube", {2, 3, 4}}};
  std::vector<NamedTensor> result;
  for (const auto& [dtype_name, dtype] : dtypes) {
    for (const auto& [shape_name, shape] : shapes) {
      result.emplace_back(dtype_name + "." + shape_name, reference(dtype, shape));
    }
  }
  return result;
}

class SafetensorsParityTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kPython)) {
      GTEST_SKIP() << "no Python at " << kPython
                   << ": run scripts/setup.sh, or configure with -DGRADUS_PYTHON=<python>";
    }
    std::string pattern = (fs::temp_directory_path() / "gradus-parity-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/x.safetensors";
  }
  void TearDown() override {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  int run_script(const std::string& command) const {
    return std::system(
        base::join("'", kPython, "' '", kScript, "' ", command, " '", path_, "'").c_str());
  }

  std::string directory_;
  std::string path_;
};

TEST_F(SafetensorsParityTest, PythonReadsOurFileBitForBit) {
  save_safetensors(path_, references(), kMetadata);
  EXPECT_EQ(run_script("check"), 0);
}

TEST_F(SafetensorsParityTest, WeReadPythonsFileBitForBit) {
  ASSERT_EQ(run_script("write"), 0);
  const SafetensorsContent content = load_safetensors(path_);
  EXPECT_EQ(content.metadata, kMetadata);
  const std::vector<NamedTensor> expected = references();
  ASSERT_EQ(content.tensors.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(content.tensors.contains(name)) << name;
    const at::Tensor& got = content.tensors.at(name);
    EXPECT_EQ(got.scalar_type(), tensor.scalar_type()) << name;
    ASSERT_EQ(got.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(tensor.nbytes() == 0 ||
                std::memcmp(got.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()) == 0)
        << name;
  }
}

TEST_F(SafetensorsParityTest, TheCheckOfTheScriptFindsASingleChangedBit) {
  std::vector<NamedTensor> tensors = references();
  static_cast<unsigned char*>(tensors.back().second.mutable_data_ptr())[0] ^= 1;
  save_safetensors(path_, tensors, kMetadata);
  EXPECT_NE(run_script("check"), 0);
}

}  // namespace
}  // namespace gradus::state
