#pragma once

#include <functional>

namespace gradus::base {

/// Seconds since any fixed moment; injected wherever time is read, so that tests own it.
using Clock = std::function<double()>;

/// A clock that never goes back.
Clock monotonic_clock();

}  // namespace gradus::base
