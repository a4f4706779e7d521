"""Finds the jobs of this host: their processes listen on sockets of this user.

A person who logs in to a node of a job that hangs needs neither its store's address nor
its run id. Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tracedstore.common import ranges
from tracedstore.common.errors import CommandError
from tracedstore.common.procfs import is_absent
from tracedstore.local.facts import LocalIdentity
from tracedstore.local.host_ranks import Replies
from tracedstore.local.sockets import local_processes
from tracedstore.tools.attach.address import ACCEPTED

# Seconds for all processes of this host to answer.
_TIMEOUT = 2.0
_MAX_JOBS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """A job with processes on this host.

    Attributes:
        url: The address of its store, "" if that is in the memory of a process.
        run_id: Its run id, None without one.
        ranks: Its ranks on this host that answer.
    """

    url: str
    run_id: str | None
    ranks: tuple[int, ...]

    def describe(self) -> str:
        """Return ``run 'job-7' at tcp://node1:29400, ranks 0-7 of this host``."""
        where = f" at {self.url}" if self.url else ""
        ranks = ranges.ranks_text(self.ranks)
        return f"{self.describe_run()}{where}, {ranks} of this host"

    def describe_run(self) -> str:
        """Return ``run 'job-7'``."""
        return (
            "a job without a run id" if self.run_id is None else f"run {self.run_id!r}"
        )


def find_job(pid: int | None = None, run_id: str | None = None) -> LocalJob:
    """Return the only job of this user on this host.

    Args:
        pid: The job of this process.
        run_id: The job with this run id.

    Raises:
        CommandError: There is none, or there are several; the text lists them.
    """
    replies = local_processes(_TIMEOUT)
    jobs = jobs_of(replies, pid=pid, run_id=run_id)
    reachable = [job for job in jobs if job.url]
    if len(reachable) == 1:
        return reachable[0]
    if not reachable:
        raise CommandError(_nothing(replies, jobs, pid, run_id))
    shown = [
        f"  --store {job.url}: {job.describe_run()}, {ranges.ranks_text(job.ranks)}"
        for job in reachable[:_MAX_JOBS_SHOWN]
    ]
    if more := len(reachable) - len(shown):
        shown.append(f"  and {more} more")
    listed = "\n".join(shown)
    raise CommandError(
        f"this host has {len(reachable)} jobs; choose one by --store, --run-id or"
        f" --pid:\n{listed}"
    )


def jobs_of(
    replies: Replies, *, pid: int | None = None, run_id: str | None = None
) -> list[LocalJob]:
    """Return the jobs of processes that answered, in order of their addresses."""
    ranks: dict[tuple[str, str | None], set[int]] = {}
    for identity in _identities(replies):
        if pid not in (None, identity.pid) or run_id not in (None, identity.run_id):
            continue
        # A job that connects has no store yet; torch makes it of these variables.
        urls = identity.urls or (f"tcp://{identity.master}" if identity.master else "",)
        for url in urls:
            found = ranks.setdefault((url, identity.run_id), set())
            if identity.rank is not None:
                found.add(identity.rank)
    return [
        LocalJob(url=url, run_id=run, ranks=tuple(sorted(found)))
        for (url, run), found in sorted(
            _by_server(ranks).items(), key=lambda job: job[0][0]
        )
    ]


def _identities(replies: Replies) -> Iterator[LocalIdentity]:
    for pid, reply in replies.items():
        # A process that is stopped does not answer, and its environment is readable.
        found = LocalIdentity.of_process(pid) if reply is None else reply.identity
        if found is not None and found.rank is not None:
            yield found


def _by_server(
    ranks: Mapping[tuple[str, str | None], set[int]],
) -> dict[tuple[str, str | None], set[int]]:
    """Join the names of one server: ranks may use a host name, or an address."""
    joined: dict[tuple[str, str | None], set[int]] = {}
    names: dict[tuple[str, str | None], str] = {}
    # The address that most ranks use comes first.
    for (url, run_id), found in sorted(ranks.items(), key=lambda job: -len(job[1])):
        scheme, _, rest = url.partition("://")
        port_and_path = rest.rpartition(":")[2] if scheme != "file" else rest
        name = names.setdefault((f"{scheme}:{port_and_path}", run_id), url)
        joined.setdefault((name, run_id), set()).update(found)
    return joined


def _nothing(
    replies: Replies, jobs: list[LocalJob], pid: int | None, run_id: str | None
) -> str:
    wanted = ""
    if pid is not None:
        if is_absent(pid):
            return f"--pid is {pid}, and this host has no process with this id"
        wanted = f" with pid {pid}"
    elif run_id is not None:
        wanted = f" of run {run_id!r}"
    if jobs:
        return (
            f"no other process can read the store of {jobs[0].describe()}: it is in the"
            " memory of its process"
        )
    others = f"; {len(replies)} others do" if replies and wanted else ""
    return (
        f"no traced rank{wanted} of this user answers on this host{others}. If the job"
        " has ended, tracedstore report LOG says why. If it runs, run this on a node of"
        f" it, as its user, or give --store: {ACCEPTED}"
    )
