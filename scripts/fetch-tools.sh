#!/usr/bin/env bash
# Put the programs that tests run into a folder: prometheus, promtool, alertmanager and
# amtool, from Debian's packages. These are only unpacked, so this needs no root and
# starts no service. What is on PATH already is linked. A browser and the shells have too
# many parts for that: chromium, zsh and fish are installed, for which this has to be
# root, or are there already.
set -euo pipefail

bin=${1:?usage: fetch-tools.sh FOLDER}
mkdir -p "$bin"
bin=$(cd "$bin" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

listed=no
# fetch PACKAGE NAME=PROGRAM ...: each program under the name that tests know.
fetch() {
    local package=$1 pair name found missing=no
    shift
    for pair in "$@"; do
        name=${pair%=*}
        rm -f "$bin/$name"
        if found=$(command -v "$name" || command -v "${pair#*=}"); then
            ln -s "$found" "$bin/$name"
        else
            missing=yes
        fi
    done
    [ "$missing" = yes ] || return 0
    # The package list may be missing or old on a fresh machine; only root can renew it.
    if [ "$(id -u)" = 0 ] && [ "$listed" = no ]; then
        apt-get update -qq
        listed=yes
    fi
    if ! apt-get download -qq "$package"; then
        echo "fetch-tools.sh: cannot get ${*#*=}; install Debian's package '$package'," \
            "or put them on PATH" >&2
        exit 1
    fi
    dpkg -x "$package"_*.deb "$package"
    for pair in "$@"; do
        [ -x "$bin/${pair%=*}" ] ||
            install -m 755 "$package/usr/bin/${pair#*=}" "$bin/${pair%=*}"
    done
}

# Debian's Alertmanager reads its templates from /usr/share, where nothing is unpacked
# to. So it gets a path of the same length that means the folder it is started in.
settle_alertmanager() {
    local share=$bin/../share/alertmanager path=/usr/share/prometheus/alertmanager
    mkdir -p "$share"
    cp prometheus-alertmanager/$path/*.tmpl "$share"
    LC_ALL=C sed "s|$path|./././././././././././././././././|g" \
        "$bin/alertmanager" >"$share/alertmanager"
    chmod 755 "$share/alertmanager"
    cat >"$bin/alertmanager" <<'EOF'
#!/bin/sh
cd "$(dirname "$0")/../share/alertmanager" && exec ./alertmanager "$@"
EOF
}

fetch prometheus prometheus=prometheus promtool=promtool
fetch prometheus-alertmanager alertmanager=prometheus-alertmanager amtool=amtool
if [ -d prometheus-alertmanager ] && [ ! -L "$bin/alertmanager" ]; then
    settle_alertmanager
fi
# These have too many parts to be unpacked.
for name in chromium zsh fish; do
    rm -f "$bin/$name"
    if ! command -v "$name" >/dev/null; then
        if [ "$(id -u)" != 0 ]; then
            echo "fetch-tools.sh: $name is missing, and only root can install it:" \
                "apt-get install --no-install-recommends $name" >&2
            exit 1
        fi
        if [ "$listed" = no ]; then
            apt-get update -qq
            listed=yes
        fi
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            "$name" >/dev/null
    fi
    ln -s "$(command -v "$name")" "$bin/$name"
done
for name in prometheus promtool alertmanager amtool zsh fish; do
    "$bin/$name" --version 2>&1 | head -n 1
done
# Its launcher has complaints about the shell first.
"$bin/chromium" --version 2>/dev/null
touch "$bin/.ready"
