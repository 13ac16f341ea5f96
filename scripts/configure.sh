#!/usr/bin/env bash
# usage: scripts/configure.sh PRESET [cmake option ...]
#
# Configures build/PRESET if need be. Starts it afresh where compiler, LibTorch, place or options are not those it was
# configured with: CMake keeps their old values in its cache and would fail obscurely.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=${1:?usage: scripts/configure.sh PRESET [cmake option ...]}
shift
build="build/$preset"
compiler=${CXX:-}
if [ -z "$compiler" ]; then
  compiler=g++
  if command -v clang++-19 >/dev/null && command -v ld.lld-19 >/dev/null; then
    compiler=clang++-19
  fi
fi
command -v "${compiler%% *}" >/dev/null || {
  echo "configure: missing a compiler, '$compiler': run scripts/setup.sh or set CXX" >&2
  exit 1
}

torch=$(compgen -G '.venv/lib/python3*/site-packages/torch-*.dist-info' || echo none)
signature=$(printf '%s\n' "$PWD" "$compiler" "$("${compiler%% *}" --version | head -n 1)" "$(cmake --version | head -n 1)" \
  "${CMAKE_PREFIX_PATH:-}" "${Torch_DIR:-}" "$torch" "$*")
record="$build/configured_for.txt"
fresh=()
if [ -e "$build/CMakeCache.txt" ]; then
  if [ -e "$build/build.ninja" ] && [ "$(cat "$record" 2>/dev/null)" = "$signature" ]; then
    exit 0 # ninja runs CMake again by itself where a CMake file changed.
  fi
  echo "configure: $build was made for another compiler, LibTorch or place, or not finished: starting afresh"
  fresh=(--fresh)
fi
rm -f "$record"
# An environment's Torch_DIR is not read by CMake itself.
[ -z "${Torch_DIR:-}" ] || set -- "-DTorch_DIR=$Torch_DIR" "$@"
CXX="$compiler" cmake --preset "$preset" "${fresh[@]}" -B "$build" "$@"
printf '%s\n' "$signature" >"$record"
