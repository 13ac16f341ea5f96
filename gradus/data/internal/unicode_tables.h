#pragma once

// Words separated by spaces, numbers in hexadecimal; scripts/unicode_tables.py says how they are
// made. unicode.cpp reads them.
namespace gradus::data::internal {

/// FIRST[-LAST[/2]]+DELTA moves a run of characters, all or every second of them; CODE=TARGET,...
/// replaces one.
extern const char* const kFolds;

/// FIRST[-LAST] each.
extern const char* const kNonSpacingMarks;
extern const char* const kPunctuation;
extern const char* const kControls;

}  // namespace gradus::data::internal
