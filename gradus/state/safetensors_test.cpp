#include <gradus/state/safetensors.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include <unistd.h>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/state/atomic_file.h>

#include <tests/support/message_of.h>

namespace gradus::state {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;
using tests::message_of;

bool bit_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

class SafetensorsTest : public testing::Test {
 protected:
  SafetensorsTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-safetensors-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/x.safetensors";
  }
  ~SafetensorsTest() override { fs::remove_all(directory_); }

  /// Without the flush of an atomic write, which a thousand trials have no use for.
  void write_quickly(const std::string& content) {
    std::ofstream(path_, std::ios::binary) << content;
  }

  /// Writes a file of this header and this many bytes of data, without regard to the format's
  /// rules.
  void write_raw(const std::string& header, std::size_t data_bytes) {
    const std::uint64_t length = header.size();
    std::string content(reinterpret_cast<const char*>(&length), sizeof length);
    write_quickly(content + header + std::string(data_bytes, '\1'));
  }
  std::string refusal() {
    return message_of([&] { load_safetensors(path_); });
  }

  std::string directory_;
  std::string path_;
};

TEST_F(SafetensorsTest, EveryDtypeAndShapeComesBackBitEqual) {
  std::mt19937 random(7);
  std::vector<NamedTensor> tensors;
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e4m3fnuz,
        at::kFloat8_e5m2, at::kFloat8_e5m2fnuz, at::kFloat8_e8m0fnu, at::kComplexFloat, at::kLong,
        at::kInt, at::kShort, at::kChar, at::kUInt64, at::kUInt32, at::kUInt16, at::kByte,
        at::kBool}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{}, {0}, {3, 0, 2}, {5}, {2, 3, 4}}) {
      at::Tensor tensor = at::empty(shape, dtype);
      auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
      // Any bit pattern, NaNs included, must survive; only bool has values that are none.
      for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
        bytes[i] = static_cast<unsigned char>(dtype == at::kBool ? random() & 1 : random());
      }
      std::string name = base::join("layer.", dtype, ".", at::IntArrayRef(shape));
      tensors.emplace_back(std::move(name), tensor);
    }
  }
  const Metadata metadata{{"format", "pt"}, {"quote", "\"\\\n\xc3\xa9"}, {"", ""}};
  save_safetensors(path_, tensors, metadata);
  const SafetensorsContent content = load_safetensors(path_);
  EXPECT_EQ(content.metadata, metadata);
  ASSERT_EQ(content.tensors.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(content.tensors.contains(name)) << name;
    EXPECT_TRUE(bit_equal(content.tensors.at(name), tensor)) << name;
  }
}

TEST_F(SafetensorsTest, DataIsAlignedToItsElementAndTheHeaderToEightBytes) {
  save_safetensors(path_, {{"a", at::zeros({3}, at::kByte)},
                           {"b", at::zeros({3}, at::kDouble)},
                           {"c", at::zeros({1}, at::kHalf)}});
  const SafetensorsFile file(path_);
  for (const auto& [name, entry] : file.entries())
    EXPECT_EQ(entry.begin % c10::elementSize(entry.dtype), 0u) << name;
  EXPECT_EQ(file.entries().at("b").begin % 8, 0u);
}

TEST_F(SafetensorsTest, WritingIsTheSameWhateverTheOrderOfTheTensors) {
  const NamedTensor a{"a", at::arange(4)}, b{"b", at::arange(3, at::kFloat)};
  save_safetensors(path_, {a, b});
  const std::string first = read_file(path_);
  save_safetensors(path_, {b, a});
  EXPECT_EQ(read_file(path_), first);
}

TEST_F(SafetensorsTest, ViewsAreWrittenByValue) {
  const at::Tensor base = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor complex = at::complex(base, base + 1);
  save_safetensors(path_, {{"transposed", base.t()},
                           {"strided", base.slice(1, 0, 6, 2)},
                           {"expanded", base.select(0, 1).unsqueeze(0).expand({3, 6})},
                           {"conjugate", complex.conj()},
                           {"negative", at::imag(complex.conj())}});
  const auto tensors = load_safetensors(path_).tensors;
  EXPECT_TRUE(at::equal(tensors.at("transposed"), base.t()));
  EXPECT_TRUE(at::equal(tensors.at("strided"), base.slice(1, 0, 6, 2)));
  EXPECT_TRUE(at::equal(tensors.at("expanded"), base.select(0, 1).expand({3, 6})));
  EXPECT_TRUE(at::equal(tensors.at("conjugate"), complex.conj()));
  EXPECT_TRUE(at::equal(tensors.at("negative"), -(base + 1)));
}

TEST_F(SafetensorsTest, FileWithoutTensorsIsAFile) {
  save_safetensors(path_, {});
  EXPECT_TRUE(load_safetensors(path_).tensors.empty());
  save_safetensors(path_, {}, {{"k", "v"}});
  EXPECT_EQ(load_safetensors(path_).metadata.at("k"), "v");
}

TEST_F(SafetensorsTest, WriterRefusesWhatTheFormatCannotHoldAndKeepsTheOldFile) {
  save_safetensors(path_, {{"old", at::ones({2})}});
  const std::string before = read_file(path_);
  const at::Tensor one = at::ones({2});
  const std::vector<std::pair<std::vector<NamedTensor>, std::string>> cases{
      {{{"__metadata__", one}}, "is a name that the format reserves"},
      {{{"x", at::Tensor()}}, "'x' is undefined"},
      {{{"x", one}, {"x", one}}, "'x' comes twice"},
      {{{"x", one.to_sparse()}}, "only strided tensors"},
      {{{"x", at::empty({2}, at::TensorOptions().device(at::kMeta))}},
       "only strided tensors with data"},
      {{{"x", at::ones({2}, at::kComplexDouble)}}, "no such dtype: 'x' is ComplexDouble"},
      {{{"\xff", one}}, "must be UTF-8"}};
  for (const auto& [tensors, expected] : cases) {
    SCOPED_TRACE(expected);
    EXPECT_THAT(message_of([&] { save_safetensors(path_, tensors); }), HasSubstr(expected));
    EXPECT_EQ(read_file(path_), before);
  }
  EXPECT_THAT(message_of([&] { save_safetensors(path_, {}, {{"k", "\xff"}}); }),
              HasSubstr("must be UTF-8"));
}

TEST_F(SafetensorsTest, LoadIntoFillsParametersInPlaceAndBumpsTheirVersion) {
  const at::Tensor weight = at::arange(6, at::kFloat).view({2, 3});
  save_safetensors(path_, {{"w", weight}, {"v", weight}, {"n", at::scalar_tensor(5, at::kLong)}});
  at::Tensor parameter = at::zeros({2, 3}).requires_grad_();
  at::Tensor strided = at::zeros({3, 2}).t();
  at::Tensor scalar = at::zeros({}, at::kLong);
  const at::Tensor squares = parameter * parameter;
  const void* address = parameter.const_data_ptr();
  load_into(path_, {{"w", parameter}, {"v", strided}, {"n", scalar}});
  EXPECT_TRUE(at::equal(parameter, weight));
  EXPECT_TRUE(at::equal(strided, weight));
  EXPECT_EQ(scalar.item<int64_t>(), 5);
  EXPECT_EQ(parameter.const_data_ptr(), address);
  EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
  // Autograd saved the old value: a backward must refuse rather than use the new one.
  EXPECT_THROW(squares.sum().backward(), c10::Error);
}

TEST_F(SafetensorsTest, LoadIntoListsEveryDifferenceInOneErrorAndChangesNothing) {
  save_safetensors(path_, {{"same", at::ones({2})},
                           {"shape", at::ones({2})},
                           {"dtype", at::ones({2})},
                           {"extra", at::ones({4})}});
  const at::Tensor same = at::zeros({2});
  const std::vector<NamedTensor> targets{{"same", same},
                                         {"shape", at::zeros({3})},
                                         {"dtype", at::zeros({2}, at::kBFloat16)},
                                         {"absent", at::zeros({1, 2})}};
  EXPECT_EQ(message_of([&] { load_into(path_, targets); }),
            "[safetensors] '" + path_ +
                "' must hold exactly the tensors to load; nothing was changed:"
                "\n  missing: 'absent' Float [1, 2]"
                "\n  different: 'shape' is Float [2] in the file and Float [3] here"
                "\n  different: 'dtype' is Float [2] in the file and BFloat16 [2] here"
                "\n  unexpected: 'extra' Float [4]");
  EXPECT_TRUE(at::equal(same, at::zeros({2})));
}

TEST_F(SafetensorsTest, HostileHeadersAreRefusedByFileAndFault) {
  const auto tensor = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const struct {
    std::string header;
    std::size_t data_bytes;
    std::string fault;
  } cases[] = {
      {"", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{", 0, "not valid JSON"},
      {"{\"a\":\"\xff\"}", 0, "not valid JSON"},
      {"{}{}", 0, "not valid JSON"},
      {"{\"a\":3}", 0, "'a' by no object"},
      {"{\"a\":" + std::string(100'000, '['), 0, "nested more than 3 deep"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"z":{"z":{"z":{}}})"), 4,
       "nested more than 3 deep"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":1)"), 4,
       "unknown field 'extra'"},
      {tensor(R"("shape":[1],"data_offsets":[0,4])"), 4, "no dtype"},
      {tensor(R"("dtype":7,"shape":[1],"data_offsets":[0,4])"), 4, "no dtype"},
      {tensor(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"), 4, "the dtype 'F33'"},
      {tensor(R"("dtype":"F4","shape":[2],"data_offsets":[0,1])"), 1, "the dtype 'F4'"},
      {tensor(R"("dtype":"F32","data_offsets":[0,4])"), 4, "no shape"},
      {tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4, "no integer from 0"},
      {tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), 4, "no integer from 0"},
      {tensor(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4])"), 4,
       "no integer from 0"},
      {tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4])"), 4,
       "pass 2^63 - 1"},
      {tensor(R"("dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0])"), 0,
       "pass 2^63 - 1"},
      {tensor(R"("dtype":"F32","shape":[1)" +
              [] {
                std::string s;
                for (int i = 0; i < 64; ++i) s += ",1";
                return s;
              }() +
              R"(],"data_offsets":[0,4])"),
       4, "65 dimensions"},
      {tensor(R"("dtype":"F32","shape":[1])"), 4, "no data_offsets"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), 4, "no data_offsets"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"), 4, "no data_offsets"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4, "at bytes 4 to 0 of 4"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 4, "at bytes 0 to 8 of 4"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615])"), 4,
       "of 4 bytes"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4,
       "4 bytes where its shape and dtype take 8"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 5, "holds 5 bytes of data"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[1,5])"), 5,
       "leaves a gap before tensor 'a'"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "tensor 'b' overlap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "names 'a' twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1,
       "names 'shape' twice"},
      {R"({"__metadata__":3})", 0, "__metadata__ that is no object"},
      {R"({"__metadata__":{"k":3}})", 0, "no string, at 'k'"},
  };
  for (const auto& [header, data_bytes, fault] : cases) {
    SCOPED_TRACE(header.substr(0, 200));
    write_raw(header, data_bytes);
    const std::string message = refusal();
    EXPECT_THAT(message, StartsWith("[safetensors] '" + path_ + "' "));
    EXPECT_THAT(message, HasSubstr(fault));
    EXPECT_LT(message.size(), 600u);
  }
}

TEST_F(SafetensorsTest, BoolValuesOtherThanZeroAndOneAreRefused) {
  write_raw(R"({"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", 2);
  std::string content = read_file(path_);
  EXPECT_EQ(refusal(), "no UserError");
  content.back() = '\x02';
  write_file_atomically(path_, content);
  EXPECT_THAT(refusal(), HasSubstr("values other than 0 and 1"));
}

TEST_F(SafetensorsTest, HeaderLengthIsCheckedBeforeAnythingIsAllocated) {
  for (const std::uint64_t length :
       {std::uint64_t{100}, std::uint64_t{99'999'999}, std::uint64_t{1} << 40,
        std::numeric_limits<std::uint64_t>::max()}) {
    std::string content(reinterpret_cast<const char*>(&length), sizeof length);
    write_file_atomically(path_, content + "{}");
    EXPECT_THAT(refusal(), HasSubstr("claims a header of")) << length;
  }
  EXPECT_THAT(message_of([&] { load_safetensors(directory_); }),
              HasSubstr("must be a regular file"));
  EXPECT_THAT(message_of([&] { load_safetensors(directory_ + "/absent"); }),
              HasSubstr("No such file or directory"));
}

TEST_F(SafetensorsTest, EveryTruncationIsRefused) {
  save_safetensors(path_, {{"a", at::ones({2})}, {"b", at::ones({3}, at::kByte)}}, {{"k", "v"}});
  const std::string whole = read_file(path_);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    write_quickly(whole.substr(0, bytes));
    EXPECT_THAT(refusal(), StartsWith("[safetensors] '" + path_ + "' ")) << bytes;
  }
}

TEST_F(SafetensorsTest, DamagedBytesAreRefusedOrReadButNeverCrash) {
  save_safetensors(path_, {{"a", at::ones({2})}, {"b", at::ones({3}, at::kBool)}}, {{"k", "v"}});
  const std::string whole = read_file(path_);
  std::mt19937 random(3);
  int refused = 0;
  for (int trial = 0; trial < 400; ++trial) {
    std::string damaged = whole;
    for (int i = 0; i < 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    write_quickly(damaged);
    try {
      const SafetensorsContent content = load_safetensors(path_);
      for (const auto& [name, tensor] : content.tensors) ASSERT_LE(tensor.nbytes(), whole.size());
    } catch (const UserError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 250);
}

TEST_F(SafetensorsTest, FileCutShortAfterOpeningIsAnErrorAndNotACrash) {
  save_safetensors(path_, {{"a", at::ones({1000})}});
  const SafetensorsFile file(path_);
  fs::resize_file(path_, 1000);
  EXPECT_THAT(message_of([&] { file.load("a"); }), HasSubstr("was cut short while being read"));
  EXPECT_THAT(message_of([&] { file.load("z"); }), HasSubstr("holds no tensor 'z'"));
}

}  // namespace
}  // namespace gradus::state
