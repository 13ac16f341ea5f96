#pragma once

#include <optional>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace gradus::state::internal {

/// The format's name of a dtype; nothing if it has none that Python's reader knows.
std::optional<std::string_view> dtype_name(at::ScalarType dtype);

/// The dtype of a name; nothing if LibTorch has none.
std::optional<at::ScalarType> dtype_of(std::string_view name);

}  // namespace gradus::state::internal
