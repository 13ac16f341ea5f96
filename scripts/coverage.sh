#!/usr/bin/env bash
# Builds with coverage counters, runs the unit tests and prints line coverage by file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -x .venv/bin/gcovr ] || {
  echo "coverage: missing gcovr in .venv: run scripts/setup.sh --dev" >&2
  exit 1
}
export CXX=${CXX:-g++}
tool=gcov
case $CXX in
  *clang*) tool="llvm-cov${CXX##*clang++} gcov" ;;
esac
scripts/configure.sh coverage
cmake --build build/coverage -j "${JOBS:-$(nproc)}"
ctest --preset coverage
.venv/bin/gcovr --root . --gcov-executable "$tool" --filter gradus/ --exclude '.*_test\.cpp' --print-summary build/coverage
