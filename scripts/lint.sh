#!/usr/bin/env bash
# usage: scripts/lint.sh [file.cpp ...]
#
# Runs clang-tidy on the named files, or on those that differ from main (or from the last commit, on main itself);
# then ruff, codespell and shellcheck on the tree. Takes about 20 s a C++ file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for tool in clang-tidy codespell ruff shellcheck; do
  [ -x ".venv/bin/$tool" ] || {
    echo "lint: missing $tool in .venv: run scripts/setup.sh --dev" >&2
    exit 1
  }
done
files=("$@")
if ((!${#files[@]})); then
  command -v git >/dev/null || {
    echo "lint: missing git, which tells the changed files: name the files instead" >&2
    exit 1
  }
  base=$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || echo HEAD)
  mapfile -t files < <({
    git diff --name-only --diff-filter=d "$base" -- '*.cpp'
    git ls-files --others --exclude-standard -- '*.cpp'
  } | sort -u)
fi
status=0
if ((${#files[@]})); then
  # A precompiled header can be read only by the compiler that wrote it, so this build has none.
  scripts/configure.sh lint >build/lint.log 2>&1 || {
    tail -n 20 build/lint.log >&2
    exit 1
  }
  echo "lint: clang-tidy on ${#files[@]} files"
  printf '%s\0' "${files[@]}" |
    xargs -0 -n 1 -P "${JOBS:-$(nproc)}" .venv/bin/clang-tidy --quiet -p build/lint || status=1
fi
.venv/bin/ruff check --quiet scripts tests bench || status=1
.venv/bin/codespell -L caf,bu --skip '*.safetensors,*.model' \
  bench cmake docs examples gradus scripts tests tools ./*.md || status=1
.venv/bin/shellcheck --severity=warning .ci/run scripts/*.sh tests/install/run.sh || status=1
exit "$status"
