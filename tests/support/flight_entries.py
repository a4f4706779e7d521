"""Entries and dumps of Flight Recorder, made by hand after the format of torch."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def entry(number: int, name: str = "nccl:all_reduce", **fields: Any) -> dict[str, Any]:
    """Return an entry in the form of torch's recorder."""
    sizes = fields.pop("sizes", [[10]])
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"] * len(sizes),
        "input_sizes": sizes,
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"] * len(sizes),
        "output_sizes": sizes,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "record_id": number,
        "retired": True,
        "state": "completed",
        "thread_id": "140308167977856",
        "thread_name": "python",
        "time_created_ns": 1795062327377632469,
        "timeout_ms": 1800000,
        **fields,
    }


def frames(line: int) -> list[dict[str, Any]]:
    """Return the stack of a call in a line of a program, innermost first."""
    torch = "/opt/venv/lib/python3.11/site-packages/torch"
    return [
        {
            "filename": f"{torch}/distributed/distributed_c10d.py",
            "line": 3245,
            "name": "all_reduce",
        },
        {
            "filename": f"{torch}/distributed/c10d_logger.py",
            "line": 83,
            "name": "wrapper",
        },
        {"filename": "/job/src/train.py", "line": line, "name": "step"},
        {"filename": "/job/src/train.py", "line": 99, "name": "<module>"},
    ]


def dump_of(
    entries: Iterable[dict[str, Any]], groups: dict[str, list[int]] | None = None
) -> bytes:
    """Return a dump as torch writes it: a pickle with tuples for groups.

    Args:
        entries: The entries.
        groups: The ranks of each group, as NCCL's dumps have them; gloo's have none.
    """
    config = {
        name: {"name": name, "desc": "", "ranks": str(ranks)}
        for name, ranks in (groups or {"": []}).items()
    }
    whole = {
        "version": "2.10",
        "pg_config": config,
        "pg_status": {},
        "comm_lib_version": "",
        "entries": [
            {**one, "process_group": tuple(one["process_group"])} for one in entries
        ],
    }
    return pickle.dumps(whole, protocol=2)


def write_dumps(
    prefix: Path,
    by_rank: dict[int, list[dict[str, Any]]],
    groups: dict[str, list[int]] | None = None,
) -> list[str]:
    """Write the dump of each rank, and return the names of the files."""
    paths = []
    for rank, entries in by_rank.items():
        path = prefix.parent / f"{prefix.name}{rank}"
        path.write_bytes(dump_of(entries, groups))
        paths.append(str(path))
    return paths
