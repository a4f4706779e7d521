"""What kinds of failures there are, and which of them are consequences of others."""

import re
import signal
from enum import IntEnum
from typing import Final


class FailureKind(IntEnum):
    """Kind of a failure. Those from DISCONNECTED on follow from a failure elsewhere.

    A rank that waits for another one times out, a rank that talks to one that has
    ended loses its connection, and torchrun stops those that are left. A process that
    went on after an exception has caught it.
    """

    OUT_OF_MEMORY = 0
    GPU = 1
    EXCEPTION = 2
    SIGNAL = 3
    EXIT = 4
    DISCONNECTED = 5
    TIMEOUT = 6
    STOPPED = 7
    CAUGHT = 8

    @property
    def is_cause(self) -> bool:
        """Whether it explains itself, and is no consequence of another failure."""
        return self < FailureKind.DISCONNECTED

    @property
    def order(self) -> int:
        """Position in the order of kinds: causes, then what lost or awaited them."""
        if self.is_cause:
            return 0
        return max(1, self - FailureKind.TIMEOUT + 1)


_OUT_OF_MEMORY: Final = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|DefaultCPUAllocator: (?:can't|not enough)"
    r"|Cannot allocate memory|CUDNN_STATUS_ALLOC_FAILED",
)
# In the messages of gloo, NCCL and torch's stores.
_DISCONNECTED: Final = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset) by (?:remote )?peer|[Bb]roken pipe"
    r"|[Cc]onnection refused|got 0 bytes|remote process exited|ncclRemoteError"
    r"|ncclSystemError|connectFullMesh failed|no error$|[Cc]onnection was likely closed"
    r"|Failed to recv|failed to send|sendBytes failed|recvBytes? failed"
)
_TIMEOUT: Final = re.compile(
    r"[Tt]imed out|wait timeout after|[Tt]imeout|before timing out|failed to pass"
    r" monitoredBarrier"
)
_COMMUNICATION: Final = re.compile(
    r"gloo/|[Gg]loo |NCCL|\bnccl|TCPStore|c10d|monitoredBarrier|Store timed? ?out"
    r"|wait timeout after \d+ ?ms"
)
_COMMUNICATION_TYPES: Final = frozenset(
    {
        "BarrierTimeout",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "RendezvousConnectionError",
        "RendezvousTimeoutError",
    }
)
_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def exception_kind(name: str, message: str, *, in_torch: bool = False) -> FailureKind:
    """Return the kind of an exception.

    A timeout or a lost connection is a consequence only if the communication of the
    job has it: a download that times out is a cause.

    Args:
        name: Type of the exception.
        message: Its message.
        in_torch: Whether torch.distributed raised it.
    """
    if name in {"OutOfMemoryError", "MemoryError"} or _OUT_OF_MEMORY.search(message):
        return FailureKind.OUT_OF_MEMORY
    if name in {"KeyboardInterrupt", "SignalException"}:
        return FailureKind.STOPPED
    if in_torch or name in _COMMUNICATION_TYPES or _COMMUNICATION.search(message):
        if _DISCONNECTED.search(message):
            return FailureKind.DISCONNECTED
        if name in {"BarrierTimeout", "TimeoutError"} or _TIMEOUT.search(message):
            return FailureKind.TIMEOUT
        if name == "DistNetworkError":
            return FailureKind.DISCONNECTED
    return FailureKind.EXCEPTION


def exit_kind(exit_code: int, *, stopped: bool) -> FailureKind:
    """Return the kind of an exit.

    Args:
        exit_code: The exit code, negative for a signal.
        stopped: Whether torchrun sent a signal to the process before.
    """
    if stopped or -exit_code in _STOP_SIGNALS:
        return FailureKind.STOPPED
    return FailureKind.SIGNAL if exit_code < 0 else FailureKind.EXIT


def exit_text(exit_code: int) -> str:
    """Format as ``exit code 1`` or as ``SIGKILL``."""
    if exit_code < 0:
        try:
            return signal.Signals(-exit_code).name
        except ValueError:
            return f"signal {-exit_code}"
    return f"exit code {exit_code}"
