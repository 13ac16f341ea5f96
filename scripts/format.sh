#!/usr/bin/env bash
# usage: scripts/format.sh [--check]
#
# Formats every C++ file with the pinned clang-format; --check only names the places and fails if there is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clang_format=.venv/bin/clang-format
[ -x "$clang_format" ] || {
  echo "format: missing clang-format in .venv: run scripts/setup.sh" >&2
  exit 1
}
folders=()
for folder in bench examples gradus tests tools; do
  [ ! -d "$folder" ] || folders+=("$folder")
done
run_clang_format() {
  find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cpp' \) -print0 |
    xargs -0 -r "$clang_format" --style=file "$@"
}
if [ "${1:-}" = --check ]; then
  run_clang_format --dry-run --Werror --ferror-limit=1 || {
    echo "format: run 'make format'" >&2
    exit 1
  }
else
  # Twice: now and then its own output is not yet what it would make of it.
  run_clang_format -i
  run_clang_format -i
fi
