#!/usr/bin/env bash
# Runs a command, `make test` if none is given, in a bare Debian root made by debootstrap: the proof that the
# repository's own files install all that it needs. Needs root, debootstrap and 6 GB of disk; takes half an hour and
# is no part of `make test`.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/bare_root_test.sh [--root DIR] [--keep] [--suite NAME] [command ...]

  --root DIR    where to make the root (default: a new folder below TMPDIR); an existing bare root there is used again
  --keep        leave the root in place at the end
  --suite NAME  Debian release (default: bookworm)

The root gets a copy of the working tree, this machine's apt settings (where it runs the same release), its resolver,
certificates, proxy and PIP_* variables, and each folder that PIP_FIND_LINKS names.
EOF
}

fail() {
  echo "bare_root_test: $*" >&2
  exit 1
}

root="" keep="" suite=bookworm
while (($#)); do
  case $1 in
    --root) root=$2 && keep=1 && shift ;;
    --keep) keep=1 ;;
    --suite) suite=$2 && shift ;;
    -h | --help) usage && exit 0 ;;
    -*) usage >&2 && fail "unknown option '$1'" ;;
    *) break ;;
  esac
  shift
done
command=("$@")
((${#command[@]})) || command=(make test)

[ "$(id -u)" = 0 ] || fail "needs root, for debootstrap and chroot"
for tool in debootstrap unshare chroot tar; do
  command -v "$tool" >/dev/null || fail "needs $tool"
done
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -n "$root" ] || root=$(mktemp -d -t gradus-bare-XXXXXX)
# Every mount is made in a mount namespace of its own and gone with it, so that this removes only the root.
remove_root() { [ -n "$keep" ] || rm -rf --one-file-system "$root"; }
trap remove_root EXIT

step_start=$SECONDS
step_done() {
  echo "bare_root_test: $1: $((SECONDS - step_start)) s"
  step_start=$SECONDS
}

if [ ! -x "$root/bin/bash" ]; then
  mkdir -p "$root"
  host_suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
    grep -v '^ *#' | grep -oE 'https?://[^ ]+' | grep -E '/debian/?$' | head -n 1 || true)
  debootstrap --variant=minbase "$suite" "$root" "${mirror:-http://deb.debian.org/debian}" >"$root/debootstrap.log" 2>&1 ||
    { tail -n 20 "$root/debootstrap.log" >&2; fail "debootstrap failed: see $root/debootstrap.log"; }
  if [ "$host_suite" = "$suite" ]; then
    rm -f "$root/etc/apt/sources.list"
    cp -a /etc/apt/. "$root/etc/apt/"
  fi
fi
step_done "debootstrap"

cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp -L /etc/hosts "$root/etc/hosts"
environment=(HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
for name in CI http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
  [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done
for name in $(compgen -e PIP_); do
  environment+=("$name=${!name}")
done
# Installing ca-certificates rewrites the root's bundle, so this machine's own one goes under another name.
for name in PIP_CERT SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE; do
  if [ -f "${!name:-}" ]; then
    mkdir -p "$root/etc/ssl"
    cp -L "${!name}" "$root/etc/ssl/host-ca.crt"
    environment+=("$name=/etc/ssl/host-ca.crt")
  fi
done

rm -rf "$root/src/gradus"
mkdir -p "$root/src/gradus"
if git -C "$repository" rev-parse >/dev/null 2>&1; then
  (cd "$repository" && git ls-files -z --cached --others --exclude-standard |
    tar --null --ignore-failed-read --warning=no-failed-read -cf - -T -)
else
  tar -C "$repository" --exclude=./build --exclude='./.venv*' --exclude=./runs -cf - .
fi | tar -C "$root/src/gradus" -xf -

export root
find_links=()
for folder in ${PIP_FIND_LINKS:-}; do
  [ ! -d "$folder" ] || find_links+=("$folder")
done
in_root() {
  # shellcheck disable=SC2016
  unshare --mount --propagation private bash -c '
    set -e
    folders=$1
    shift
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    for folder in $folders; do
      mkdir -p "$root$folder"
      mount --bind "$folder" "$root$folder"
    done
    exec chroot "$root" /usr/bin/env -i -C /src/gradus "$@"' in_root "${find_links[*]:-}" "${environment[@]}" "$@"
}

# make is what README.md asks a newcomer to have.
in_root bash -c 'apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends make' \
  >"$root/make.log" 2>&1 || { tail -n 20 "$root/make.log" >&2; fail "apt does not work in the root"; }
step_done "apt-get install make"

status=0
in_root "${command[@]}" || status=$?
step_done "${command[*]} (exit code $status)"
exit "$status"
