#!/usr/bin/env bash
# usage: tests/install/run.sh BUILD_DIR
#
# Installs the build into a temporary prefix, moves that prefix, builds the consumer against it with find_package and
# runs the consumer and the installed command: headers, package files and library paths must all be right.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(cd "${1:?usage: tests/install/run.sh BUILD_DIR}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

cmake --install "$build" --prefix "$work/first" >"$work/install.log" 2>&1 || {
  cat "$work/install.log" >&2
  exit 1
}
# A package that holds paths into its first prefix, or into the build, fails from here on.
mv "$work/first" "$work/prefix"

# LD_LIBRARY_PATH would hide a library path that is missing.
unset LD_LIBRARY_PATH
# No CMAKE_PREFIX_PATH for LibTorch: the package knows the one it was built with.
cmake -S "$here" -B "$work/build" -G Ninja -Dgradus_ROOT="$work/prefix" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER="$(cached CMAKE_CXX_COMPILER)" >"$work/configure.log" 2>&1 || {
  cat "$work/configure.log" >&2
  exit 1
}
cmake --build "$work/build" >"$work/build.log" 2>&1 || {
  cat "$work/build.log" >&2
  exit 1
}
"$work/build/consumer"
if [ "$(cached GRADUS_BUILD_TOOLS)" != OFF ]; then
  "$work/prefix/bin/gradus" --version
fi
