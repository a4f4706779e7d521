#!/bin/bash
# Keeps a file with the targets of a job for Prometheus' file_sd, until it is ended.
#
#   watch-targets.sh tcp://node01:29400 /shared/prometheus/targets/4711.json
#
# The store does not exist before the job has started, and is gone when it has ended:
# the command is then started again. At the end the file is removed, so that Prometheus
# does not scrape what has ended.
set -u
store=$1 file=$2 watcher=

end() {
    [ -n "$watcher" ] && kill "$watcher" 2>/dev/null && wait "$watcher"
    rm -f "$file"
    exit 0
}
trap end TERM INT

mkdir -p "$(dirname "$file")"
while true; do
    # It replaces the file atomically, whenever the list changes.
    tracedstore sd --store "$store" --output "$file" --watch \
        --interval "${INTERVAL:-15}" 2>/dev/null &
    watcher=$!
    wait "$watcher"
    watcher=
    # In the background, because the trap would have to wait for it otherwise.
    sleep 5 &
    wait $!
done
