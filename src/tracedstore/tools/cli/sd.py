"""List the endpoints of a job for Prometheus, as a file_sd file.

With TRACEDSTORE_HTTP_PORT, torchrun's agent serves the metrics of its node, or
each rank serves its own. Ranks register the addresses in the job's store. The
/sd page of any endpoint has the same list over HTTP; use this command where
Prometheus cannot reach it.

Examples:
  tracedstore sd --store tcp://node1:29400
  tracedstore sd --store tcp://node1:29400 --output targets.json --watch

Exit codes: 0 written; 1 the store cannot be reached or read, or the file cannot
be written, which also ends --watch and keeps the file as it was; 64 invalid
command line; 130 Ctrl-C
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracedstore.common.errors import CommandError
from tracedstore.export.settings import PREFIX
from tracedstore.tools.attach.address import interruptible_import
from tracedstore.tools.cli.options import (
    add_store_argument,
    add_watch_arguments,
    store_address,
)

if TYPE_CHECKING:
    from tracedstore.coordination.rank_registry import RankInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_store_argument(parser, found=False)
    parser.add_argument(
        "--run-id", metavar="ID", help="only ranks of this job, and its run_id label"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write to this file"
    )
    add_watch_arguments(parser, "repeat, and write whenever the list changes", 15.0)


def run(arguments: argparse.Namespace) -> int:
    """Write the list, once or at intervals."""
    address = store_address(arguments)
    address.probe()
    # Only for a store that answers, because torch takes seconds.
    with interruptible_import():
        from tracedstore.export.discovery import (  # noqa: PLC0415
            invalid_entries,
            listed,
        )
        from tracedstore.tools.attach.job_reading import registered_ranks  # noqa: PLC0415

    written = None
    invalid_count = 0
    while True:
        found, invalid = registered_ranks(address)
        infos = _of_job(found, arguments.run_id)
        targets = listed(infos)
        text = json.dumps(targets, indent=2) + "\n"
        if text != written:
            _write(text, arguments.output)
            written = text
        # With --watch, once for each change.
        if invalid not in (0, invalid_count):
            skipped = invalid_entries(invalid)
            sys.stderr.write(f"tracedstore: {skipped}, and left out of the list\n")
        invalid_count = invalid
        if not targets and not arguments.watch:
            sys.stderr.write(f"tracedstore: {_explain_no_targets(len(infos))}\n")
        if not arguments.watch:
            return 0
        time.sleep(arguments.interval)


def _of_job(infos: "list[RankInfo]", run_id: str | None) -> "list[RankInfo]":
    if run_id is None:
        return infos
    # A rank without a run id gets the requested one.
    ours = [info for info in infos if info.run_id in (None, run_id)]
    return [replace(info, run_id=run_id) for info in ours]


def _explain_no_targets(ranks: int) -> str:
    if not ranks:
        return "no rank has registered in the store"
    return (
        f"none of the {ranks} registered ranks serves its metrics; set"
        f" {PREFIX}HTTP_PORT for the job"
    )


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _replace_file(output, text)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}") from None


def _replace_file(output: Path, text: str) -> None:
    # Atomically, because Prometheus reads the file whenever it changes.
    with tempfile.NamedTemporaryFile(
        "w", dir=output.parent, prefix=f".{output.name}.", delete=False
    ) as file:
        temporary = Path(file.name)
        try:
            file.write(text)
            file.flush()
            temporary.chmod(0o644)
            temporary.replace(output)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
