#!/usr/bin/env bash
# Puts the Python peers of bench/compare.py into a virtual environment of their own, .venv-peers, with the same torch
# that gradus links, and Opacus. Does nothing if they are there already.
#
#   scripts/setup_peers.sh [--python PYTHON]    PYTHON makes the environment (default: python3)
set -euo pipefail

cd "$(dirname "$0")/.."
readonly torch_version=2.13.0
readonly opacus_version=1.6.0
readonly environment=.venv-peers
python=python3
while [[ $# -gt 0 ]]; do
  case "$1" in
    --python)
      python=${2:?--python needs an interpreter}
      shift 2
      ;;
    *)
      echo "setup_peers.sh: the only option is --python PYTHON; got '$1'" >&2
      exit 2
      ;;
  esac
done

installed() {
  "$environment/bin/python" -c "import sys; from importlib.metadata import version
sys.exit(version('torch').partition('+')[0] != '$torch_version' or version('opacus') != '$opacus_version')" 2>/dev/null
}

if installed; then
  echo "peers: torch $torch_version and opacus $opacus_version are in $environment"
  exit 0
fi
if ! command -v "$python" >/dev/null; then
  echo "setup_peers.sh: no $python; install python3 and python3-venv (apt-get install python3-venv)" >&2
  exit 1
fi
# --clear: an interrupted attempt leaves an environment without pip.
if ! "$python" -m venv --clear "$environment"; then
  echo "setup_peers.sh: $python cannot make a virtual environment; apt-get install python3-venv" >&2
  exit 1
fi
pip_install() {
  "$environment/bin/pip" install --quiet --disable-pip-version-check "torch==$torch_version+cpu" "opacus==$opacus_version" "$@"
}
# PyTorch's own index serves machines whose own has no CPU wheel. Not named at first: where it cannot be reached, pip
# retries it for every dependency.
pip_install 2>/dev/null || pip_install --extra-index-url https://download.pytorch.org/whl/cpu
if ! installed; then
  echo "setup_peers.sh: torch $torch_version and opacus $opacus_version did not arrive in $environment; see pip's messages above" >&2
  exit 1
fi
echo "peers: torch $torch_version and opacus $opacus_version put into $environment"
