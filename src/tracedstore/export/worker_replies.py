"""What the workers of this agent reply, over their Unix sockets."""

from collections.abc import Iterable

from tracedstore.diagnosis.ask.agent_workers import Worker
from tracedstore.diagnosis.ask.local_client import LocalReply, ask_processes


def ask_workers(
    workers: Iterable[Worker], kind: str, timeout: float
) -> dict[Worker, LocalReply | None]:
    """Ask workers for a page, all at once.

    The value is None for a worker without a reply. A worker that runs and does not
    listen is omitted: it may not be traced, or not have imported torch yet. One that is
    stopped or gone is not asked, so that the others need not wait for it.
    """
    pids = {worker: worker.pid for worker in workers}
    running = {
        pid for worker, pid in pids.items() if worker.state not in ("stopped", "gone")
    }
    replies = ask_processes(running, kind, timeout) if running else {}
    return {
        worker: replies.get(pid)
        for worker, pid in pids.items()
        if pid in replies or pid not in running
    }
