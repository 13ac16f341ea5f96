#pragma once

namespace gradus::tools {

/// Takes SIGINT and SIGTERM from now on: the first one is remembered for stop_signal(), a second
/// one ends the process at once.
void catch_stop_signals();

/// The signal that asked this process to stop, or 0.
int stop_signal();

}  // namespace gradus::tools
