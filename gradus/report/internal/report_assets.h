#pragma once

namespace gradus::report::internal {

/// The report's style sheet and script, both without references to other files.
extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace gradus::report::internal
