#!/usr/bin/env bash
# Put the programs that tests run into a folder: promtool, from Debian's package.
# The package is only unpacked, so this needs no root and starts no service.
set -euo pipefail

bin=${1:?usage: fetch-tools.sh FOLDER}
mkdir -p "$bin"
bin=$(cd "$bin" && pwd)

if found=$(command -v promtool); then
    ln -sf "$found" "$bin/promtool"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# The package list may be missing or old on a fresh machine; only root can renew it.
if [ "$(id -u)" = 0 ]; then
    apt-get update -qq
fi
if ! apt-get download -qq prometheus; then
    echo "fetch-tools.sh: cannot get promtool; install Debian's package 'prometheus'," \
        "or put promtool on PATH" >&2
    exit 1
fi
dpkg -x prometheus_*.deb unpacked
install -m 755 unpacked/usr/bin/promtool "$bin/promtool"
"$bin/promtool" --version
