"""Measures what tracedstore-run adds to the start of Python processes.

Each command runs bare and as a child of tracedstore-run, alternately. The medians are
printed as a Markdown table.
"""

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import tracedstore
from tracedstore.auto.command import environment

PYTHON = [sys.executable, "-W", "ignore"]
RUN = str(Path(sys.executable).with_name("tracedstore-run"))
COMMANDS = {
    '`python -c "pass"`': [*PYTHON, "-c", "pass"],
    '`python -c "import argparse, json, logging"`': [
        *PYTHON,
        *("-c", "import argparse, json, logging"),
    ],
    '`python -c "import torch.distributed"`': [
        *PYTHON,
        *("-c", "import torch.distributed"),
    ],
}


def seconds(command: list[str], env: dict[str, str]) -> float:
    """Run a command, and return its duration."""
    started = time.perf_counter()
    subprocess.run(command, env=env, check=True)
    return time.perf_counter() - started


def paired(
    one: tuple[list[str], dict[str, str]],
    other: tuple[list[str], dict[str, str]],
    times: int,
) -> tuple[float, float, float]:
    """Run two commands alternately.

    Returns:
        The medians of both durations, and the median of their differences.
    """
    seconds(*one), seconds(*other)
    pairs = []
    for turn in range(times):
        # The second of a pair profits from the first, so their order alternates.
        if turn % 2:
            second, first = seconds(*other), seconds(*one)
        else:
            first, second = seconds(*one), seconds(*other)
        pairs.append((first, second))
    return (
        statistics.median(first for first, _ in pairs),
        statistics.median(second for _, second in pairs),
        statistics.median(second - first for first, second in pairs),
    )


def main() -> None:
    """Run the benchmark, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--times", type=int, default=200, help="pairs of runs without torch"
    )
    parser.add_argument(
        "--slow-times", type=int, default=20, help="pairs of runs with torch"
    )
    options = parser.parse_args()
    # pip compiles the package when it installs it.
    compileall.compile_dir(Path(tracedstore.__file__).parent, quiet=1)
    bare = dict(os.environ)
    rows = [
        (
            name,
            *paired(
                (command, bare),
                (command, environment(bare)),
                options.slow_times if "torch" in name else options.times,
            ),
        )
        for name, command in COMMANDS.items()
    ]
    rows.append(
        (
            "`true`, and `tracedstore-run true`",
            *paired((["true"], bare), ([RUN, "true"], bare), options.times),
        )
    )
    print("| command | bare | under tracedstore-run | added |")
    print("| --- | --- | --- | --- |")
    for name, first, second, difference in rows:
        times = (first, second, difference)
        print(f"| {name} | {' | '.join(f'{1e3 * t:.1f} ms' for t in times)} |")


if __name__ == "__main__":
    main()
