#include <gradus/state/safetensors.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>
#include <sstream>
#include <tuple>

#include <sys/stat.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <gradus/base/error.h>
#include <gradus/state/atomic_file.h>
#include <gradus/state/internal/file_descriptor.h>
#include <gradus/state/internal/safetensors_dtype.h>
#include <gradus/state/internal/safetensors_header.h>

namespace gradus::state {
namespace {

static_assert(std::endian::native == std::endian::little, "the format stores little-endian values");

void check_writable(const std::string& path, const NamedTensor& named) {
  const auto& [name, tensor] = named;
  GRADUS_CHECK("safetensors", name != internal::kMetadataName, "'", name,
               "' is a name that the format reserves; '", path, "' was not written");
  GRADUS_CHECK("safetensors", tensor.defined(), "only defined tensors are written; '", name,
               "' is undefined");
  GRADUS_CHECK("safetensors", tensor.layout() == c10::kStrided && !tensor.is_meta(),
               "only strided tensors with data are written; '", name, "' is ", tensor.toString(),
               " on ", tensor.device());
  GRADUS_CHECK("safetensors", internal::dtype_name(tensor.scalar_type()).has_value(),
               "the format has no such dtype: '", name, "' is ", tensor.scalar_type());
}

/// By element size, largest first, and then by name: each value falls on a multiple of its size.
std::vector<const NamedTensor*> data_order(const std::vector<NamedTensor>& tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& named : tensors) order.push_back(&named);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const auto key = [](const NamedTensor* n) {
      return std::tuple<std::int64_t, const std::string&>(-n->second.element_size(), n->first);
    };
    return key(a) < key(b);
  });
  return order;
}

bool readable_in_place(const at::Tensor& target) {
  return target.is_cpu() && target.layout() == c10::kStrided && target.is_contiguous() &&
         !target.is_conj() && !target.is_neg();
}

}  // namespace

void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                      const Metadata& metadata) {
  const at::NoGradGuard no_grad;
  for (const NamedTensor& named : tensors) check_writable(path, named);
  const std::vector<const NamedTensor*> order = data_order(tensors);
  internal::Header header{{}, metadata};
  std::size_t at = 0;
  for (const NamedTensor* named : order) {
    const at::Tensor& tensor = named->second;
    const auto bytes = static_cast<std::size_t>(tensor.numel() * tensor.element_size());
    const bool fresh =
        header.entries
            .try_emplace(named->first, SafetensorsFile::Entry{tensor.scalar_type(),
                                                              tensor.sizes().vec(), at, bytes})
            .second;
    GRADUS_CHECK("safetensors", fresh, "each name is written once; '", named->first,
                 "' comes twice");
    at += bytes;
  }
  const std::string json = internal::write_header(path, header);
  AtomicFile file(path);
  const std::uint64_t length = json.size();
  file.write(&length, sizeof length);
  file.write(json);
  for (const NamedTensor* named : order) {
    // One copy at most, and gone before the next: a lazy conjugate or negative is resolved, a view
    // gathered.
    const at::Tensor plain = named->second.detach().resolve_conj().resolve_neg().cpu().contiguous();
    file.write(plain.const_data_ptr(), static_cast<std::size_t>(plain.nbytes()));
  }
  file.commit();
}

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  internal::FileDescriptor fd = internal::open_for_reading(path_);
  const auto check = [&](bool holds, const auto&... parts) {
    if (!holds) {
      throw UserError(
          base::join("[safetensors] '", path_, "' ", parts...,
                     ". It is truncated, corrupt or no safetensors file: restore it from a copy."));
    }
  };
  struct stat there{};
  if (::fstat(fd.get(), &there) != 0) internal::throw_system_error("read", path_, errno);
  GRADUS_CHECK("safetensors", S_ISREG(there.st_mode), "'", path_, "' must be a regular file");
  const auto file_bytes = static_cast<std::size_t>(there.st_size);
  check(file_bytes >= 8, "holds ", file_bytes, " bytes, fewer than the 8 of a header's length");
  std::uint64_t header_bytes = 0;
  internal::pread_all(fd.get(), &header_bytes, sizeof header_bytes, 0, path_);
  check(header_bytes <= internal::kMaxHeaderBytes, "claims a header of ", header_bytes,
        " bytes; at most ", internal::kMaxHeaderBytes, " are allowed");
  check(header_bytes <= file_bytes - 8, "claims a header of ", header_bytes,
        " bytes but holds only ", file_bytes - 8, " after its length");
  std::string json(header_bytes, '\0');
  internal::pread_all(fd.get(), json.data(), json.size(), 8, path_);
  check(!json.empty() && json.front() == '{', "has a header that does not begin with '{'");
  const std::size_t data_begin = 8 + json.size();
  internal::Header header =
      internal::parse_header(path_, json, data_begin, file_bytes - data_begin);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
  fd_ = fd.release();
}

SafetensorsFile::~SafetensorsFile() { internal::FileDescriptor closing(fd_); }

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      entries_(std::move(other.entries_)),
      metadata_(std::move(other.metadata_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  path_ = std::move(other.path_);
  std::swap(fd_, other.fd_);
  entries_ = std::move(other.entries_);
  metadata_ = std::move(other.metadata_);
  return *this;
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  GRADUS_CHECK("safetensors", found != entries_.end(), "'", path_, "' holds no tensor '", name,
               "'");
  return found->second;
}

at::Tensor SafetensorsFile::load(const std::string& name) const {
  const Entry& found = entry(name);
  at::Tensor tensor = at::empty(found.shape, at::TensorOptions().dtype(found.dtype));
  load_into(name, tensor);
  return tensor;
}

void SafetensorsFile::load_into(const std::string& name, const at::Tensor& target) const {
  const Entry& found = entry(name);
  GRADUS_CHECK(
      "safetensors",
      target.defined() && target.scalar_type() == found.dtype && target.sizes() == found.shape,
      "the target of '", name, "' must have the file's dtype and shape, ", found.dtype, " ",
      at::IntArrayRef(found.shape), "; see '", path_, "'");
  const at::NoGradGuard no_grad;
  if (!readable_in_place(target)) {
    at::Tensor staged = at::empty(found.shape, at::TensorOptions().dtype(found.dtype));
    load_into(name, staged);
    target.copy_(staged);
    return;
  }
  internal::pread_all(fd_, target.mutable_data_ptr(), found.bytes, found.begin, path_);
  if (found.dtype == at::ScalarType::Bool) {
    // A C++ bool that is neither 0 nor 1 is undefined behaviour in every kernel that reads it.
    auto* bytes = static_cast<unsigned char*>(target.mutable_data_ptr());
    const bool valid =
        std::all_of(bytes, bytes + found.bytes, [](unsigned char byte) { return byte <= 1; });
    if (!valid) std::memset(bytes, 0, found.bytes);
    GRADUS_CHECK("safetensors", valid, "'", path_, "' gives the bool tensor '", name,
                 "' values other than 0 and 1");
  }
  // Autograd must see that a value it saved is gone; a raw read does not tell it.
  if (!target.is_inference()) target.unsafeGetTensorImpl()->bump_version();
}

SafetensorsContent load_safetensors(const std::string& path) {
  const SafetensorsFile file(path);
  SafetensorsContent content{{}, file.metadata()};
  for (const auto& [name, unused] : file.entries()) content.tensors.emplace(name, file.load(name));
  return content;
}

void load_into(const std::string& path, const std::vector<NamedTensor>& targets) {
  const SafetensorsFile file(path);
  std::ostringstream missing, unexpected, different;
  std::set<std::string> wanted;
  for (const auto& [name, target] : targets) {
    GRADUS_CHECK("safetensors", target.defined(), "every target must be a tensor; '", name,
                 "' is undefined");
    GRADUS_CHECK("safetensors", wanted.insert(name).second, "each target has its own name; '", name,
                 "' comes twice");
    const auto found = file.entries().find(name);
    if (found == file.entries().end()) {
      missing << "\n  missing: '" << name << "' " << target.scalar_type() << " " << target.sizes();
    } else if (found->second.dtype != target.scalar_type() ||
               target.sizes() != found->second.shape) {
      different << "\n  different: '" << name << "' is " << found->second.dtype << " "
                << at::IntArrayRef(found->second.shape) << " in the file and "
                << target.scalar_type() << " " << target.sizes() << " here";
    }
  }
  for (const auto& [name, found] : file.entries()) {
    if (!wanted.contains(name)) {
      unexpected << "\n  unexpected: '" << name << "' " << found.dtype << " "
                 << at::IntArrayRef(found.shape);
    }
  }
  const std::string differences = missing.str() + different.str() + unexpected.str();
  if (!differences.empty()) {
    throw UserError(
        base::join("[safetensors] '", path,
                   "' must hold exactly the tensors to load; nothing was changed:", differences));
  }
  for (const auto& [name, target] : targets) file.load_into(name, target);
}

}  // namespace gradus::state
