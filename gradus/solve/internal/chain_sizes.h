#pragma once

#include <gradus/solve/chain.h>

namespace gradus::solve::internal {

/// @throws UserError on a chain that ChainStage's and Chain's comments forbid.
void check_chain(const Chain& chain);

}  // namespace gradus::solve::internal
