"""List the ranks of a job for Prometheus, as a file_sd file.

Ranks that serve their metrics (TRACEDSTORE_HTTP_PORT) are in the job's store,
with their addresses. Any rank's /sd says the same over HTTP; this is for
clusters where Prometheus cannot reach the ranks' /sd.

Examples:
  tracedstore sd --store tcp://node1:29400
  tracedstore sd --store tcp://node1:29400 --output targets.json --watch

Exit codes: 0 written; 1 the store cannot be reached or read, or the file cannot
be written, which also ends --watch, and what was written last stays; 64 the
command line makes no sense; 130 Ctrl-C
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracedstore.attach.address import Address
from tracedstore.attach.torch_import import loading
from tracedstore.cli.options import add_store_argument, add_watch_arguments
from tracedstore.core.errors import CommandError

if TYPE_CHECKING:
    from tracedstore.coordination.rank_registry import RankInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it takes."""
    add_store_argument(parser)
    parser.add_argument(
        "--run-id", metavar="ID", help="only ranks of this job, and its run_id label"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write here, not to the terminal"
    )
    add_watch_arguments(parser, "go on, and write when something changes", 15.0)


def run(arguments: argparse.Namespace) -> int:
    """Write the list, once or again and again."""
    address = Address(arguments.store)
    address.probe()
    # Only where there is something to look at: torch takes seconds.
    with loading():
        from tracedstore.attach.job_discovery import registered  # noqa: PLC0415
        from tracedstore.export.discovery import listed  # noqa: PLC0415

    written = None
    while True:
        infos = _of_job(registered(address), arguments.run_id)
        targets = listed(infos)
        found = json.dumps(targets, indent=2) + "\n"
        if found != written:
            _write(found, arguments.output)
            written = found
        if not targets and not arguments.watch:
            sys.stderr.write(
                f"tracedstore: of {len(infos)} ranks that have registered there none"
                " serves its metrics; TRACEDSTORE_HTTP_PORT makes them\n"
            )
        if not arguments.watch:
            return 0
        time.sleep(arguments.interval)


def _of_job(infos: "list[RankInfo]", run_id: str | None) -> "list[RankInfo]":
    if run_id is None:
        return infos
    # Where nobody named the job, who asks does.
    ours = [info for info in infos if info.run_id in (None, run_id)]
    return [replace(info, run_id=run_id) for info in ours]


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _put(text, output)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None


def _put(text: str, output: Path) -> None:
    # Prometheus reads the file whenever it changes, so it is never half written.
    with tempfile.NamedTemporaryFile(
        "w", dir=output.parent, prefix=f".{output.name}.", delete=False
    ) as file:
        made = Path(file.name)
        try:
            file.write(text)
            file.flush()
            made.chmod(0o644)
            made.replace(output)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
