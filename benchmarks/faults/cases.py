"""A case: one barrier or rendezvous, and the faults that are injected into it."""

from dataclasses import asdict, dataclass
from typing import Any

# The steps of a barrier call that a fault can be injected at, in order. `stores`
# announces them.
BARRIER_STEPS = (
    "start",  # connected, nothing written
    "registered",  # wrote its registry entry
    "recorded",  # wrote its arrival, not counted
    "counted",  # added itself to the count
    "waiting",  # waits for the last rank
    "timed_out",  # its wait has timed out
    "confirmed",  # confirmed that it was counted
    "publishing",  # about to write its report
    "published",  # wrote its report
    "completing",  # the last rank, about to complete the barrier
    "completed",  # the last rank, has completed the barrier
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        rank: The rank at whose step it happens.
        step: The step, one of `BARRIER_STEPS`, or ``method:n`` in a rendezvous.
        action: What happens; see `actions` and `director`.
        release: When a stopped or late rank, server or connection goes on: ``in_time``,
            when all others wait; ``after``, when all others have ended; a number of
            seconds; "" for never.
        value: The size of the fault: seconds of a clock, megabytes of memory, ...
    """

    rank: int
    step: str
    action: str
    release: str = ""
    value: float = 0.0

    def __str__(self) -> str:
        value = f" {self.value:g}" if self.value else ""
        until = f", goes on {self.release}" if self.release else ""
        return f"{self.action}{value} at rank {self.rank} {self.step}{until}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case.

    Attributes:
        seed: The seed of the run.
        number: The number of the case in the run.
        fault_class: The row of the result table.
        protocol: ``barrier`` or ``rendezvous``.
        store: ``tcp``, ``file`` or ``etcd``.
        world_size: The number of ranks.
        timeout: The timeout of the barrier or rendezvous, in seconds.
        trace_timeout: The barrier's parameter of this name.
        warn_after: The barrier's parameter of this name.
        flavours: For each rank: ``traced``, ``bare`` (tracedstore's barrier on a store
            that is not wrapped) or ``torch`` (torch's barrier).
        absent: Ranks that are never started.
        order: The order in which ranks are released.
        ordered: Release each rank when the one before it waits, instead of all at once.
        faults: What is injected.
        proxied: Ranks that connect through the proxy.
        log: Standard error: ``file``, ``full_pipe``, ``broken_pipe``, ``dev_full``,
            ``too_large`` or ``none``.
        exporter: The OTLP endpoint: ``refused``, ``silent`` or ``slow``; "" for none.
        spans: Record spans in memory.
        http_clients: Hung clients of each rank's metrics endpoint; -1 for no endpoint.
        exits: Ranks that finalize the interpreter. The others run the exit hooks and
            then end, which takes a fraction of the processor time.
        min_nodes: The minimum number of nodes of a rendezvous.
    """

    seed: int
    number: int
    fault_class: str
    protocol: str = "barrier"
    store: str = "tcp"
    world_size: int
    timeout: float
    trace_timeout: float = 3.0
    warn_after: float = 0.0
    flavours: tuple[str, ...]
    absent: tuple[int, ...] = ()
    order: tuple[int, ...]
    ordered: bool = True
    faults: tuple[Fault, ...] = ()
    proxied: tuple[int, ...] = ()
    log: str = "file"
    exporter: str = ""
    spans: bool = False
    http_clients: int = -1
    exits: tuple[int, ...] = ()
    min_nodes: int = 0

    @property
    def prefix(self) -> str:
        """The key prefix of the barrier, or the run id of the rendezvous."""
        return f"case/{self.number}"

    def faults_of(self, rank: int) -> dict[str, Fault]:
        """Return the faults at one rank's steps, by step."""
        return {fault.step: fault for fault in self.faults if fault.rank == rank}

    def describe(self) -> str:
        """Describe the case in one line."""
        parts = [f"{self.protocol} of {self.world_size} on {self.store}"]
        if set(self.flavours) != {"traced"}:
            parts.append("ranks " + ",".join(self.flavours))
        if self.absent:
            parts.append(f"ranks {list(self.absent)} never start")
        parts += [str(fault) for fault in self.faults]
        if self.log != "file":
            parts.append(f"standard error {self.log}")
        if self.exporter:
            parts.append(f"exporter {self.exporter}")
        if self.http_clients >= 0:
            parts.append(f"{self.http_clients} hung clients")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, for the results file."""
        return asdict(self)
