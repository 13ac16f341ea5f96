#!/usr/bin/env bash
# Every check that CI runs, in order; builds into build/dev. `make test` sets the machine up first. A check that fails
# does not keep those after it from running, unless they need its result. The last line counts them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

jobs=${JOBS:-$(nproc)}
passed=0
failed=0
failures=()

# check NAME COMMAND ...: runs one check and counts it.
check() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@"; then
    passed=$((passed + 1))
    echo "== $name: passed ($((SECONDS - start)) s)"
  else
    failed=$((failed + 1))
    failures+=("$name")
    echo "== $name: FAILED ($((SECONDS - start)) s)" >&2
    return 1
  fi
}

finish() {
  ((!${#failures[@]})) || echo "failed: ${failures[*]}"
  echo "$passed passed, $failed failed"
  ((failed == 0 && passed > 0))
  exit
}

# Runs the tests and counts each of ctest's entries as one.
run_ctest() {
  local results="$PWD/build/dev/test_results.xml" status=0 start=$SECONDS
  rm -f "$results"
  echo "== tests"
  local labels='unit|integration|parity'
  if ! compgen -G '.venv/lib/python3*/site-packages/torch/__init__.py' >/dev/null; then
    echo "== parity tests are left out: they compare with torch in Python, which .venv lacks beside your own LibTorch"
    labels='unit|integration'
  fi
  GTEST_BRIEF=1 ctest --preset dev -L "^($labels)\$" -j "$jobs" --no-tests=error --output-junit "$results" || status=$?
  local counts
  counts=$(.venv/bin/python - "$results" <<'EOF'
import sys
import xml.etree.ElementTree as tree
cases = list(tree.parse(sys.argv[1]).getroot().iter("testcase"))
bad = [case.get("name") for case in cases if case.get("status") not in ("run", "notrun", "disabled")]
ran = sum(case.get("status") == "run" for case in cases)
print(ran, len(bad), *bad)
EOF
  ) || counts="0 1 ctest"
  local ran bad names
  read -r ran bad names <<<"$counts"
  if ((status != 0 && bad == 0)); then # ctest itself failed
    bad=1 names=ctest
  fi
  passed=$((passed + ran))
  failed=$((failed + bad))
  ((bad == 0)) || failures+=("$names")
  echo "== tests: $ran passed, $bad failed ($((SECONDS - start)) s)"
}

check "format" scripts/format.sh --check
check "layers" .venv/bin/python scripts/check_layers.py
check "layers' own test" .venv/bin/python scripts/check_layers_test.py
check "configure" scripts/configure.sh dev || finish
check "build" cmake --build build/dev -j "$jobs" || finish
check "headers compile alone" cmake --build build/dev -j "$jobs" --target all_verify_interface_header_sets
run_ctest
check "install" tests/install/run.sh build/dev
finish
