#!/bin/sh
# Run the contract and thread tests on a native base that is built with a sanitizer.
#
#   scripts/sanitize.sh PYTHON DIRECTORY address|thread
#
# torch and Python are not instrumented, so only the native base is checked. Reports go
# to files in the directory; one is enough to fail.
set -eu

python=$1 directory=$(mkdir -p "$2" && cd "$2" && pwd) sanitizer=$3
root=$(cd "$(dirname "$0")/.." && pwd)
reports=$directory/$sanitizer-report
rm -f "$reports".*

library() { g++ -print-file-name="$1"; }

case $sanitizer in
address)
	# libstdc++ as well: Python loads it later than the sanitizer looks for it.
	preload="$(library libasan.so) $(library libstdc++.so.6)"
	# Python and torch do not free all of their memory at exit.
	export ASAN_OPTIONS="detect_leaks=0,log_path=$reports"
	;;
thread)
	preload=$(library libtsan.so)
	# The tests fork, and children of a process with threads go on.
	export TSAN_OPTIONS="die_after_fork=0,log_path=$reports,suppressions=$root/scripts/tsan-suppressions.txt"
	;;
*)
	echo "sanitize.sh: no such sanitizer: $sanitizer" >&2
	exit 64
	;;
esac

# The compiler itself runs without the sanitizer.
export CXX="env -u LD_PRELOAD g++ -g1 -fno-omit-frame-pointer -fsanitize=$sanitizer"
export TRACEDSTORE_NATIVE_DIR="$directory/$sanitizer"
# A sanitizer needs its own places in memory, which random addresses may take.
run() { setarch -R env LD_PRELOAD="$preload" "$@"; }

cd "$root"
run "$python" -m tracedstore.tools.cli.main build-native --dir "$TRACEDSTORE_NATIVE_DIR"
status=0
run "$python" -m pytest --timeout 600 -k native \
	tests/contract tests/integration/test_threads.py || status=$?
for report in "$reports".*; do
	if [ -e "$report" ]; then
		cat "$report"
		status=1
	fi
done
exit $status
