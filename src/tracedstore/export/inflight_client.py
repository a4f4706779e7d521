"""Ask ranks what they are doing, in bounded time, whoever of them is there."""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.export.process_status import ProcessStatus

# Less than the files that a process may have open, of which 1024 is a common limit.
_MOST_ASKED_AT_ONCE = 512
_MOST_NAMES_LOOKED_UP_AT_ONCE = 32
_LONGEST_ANSWER = 4 << 20

State = Literal["answered", "silent", "without", "absent"]


class _UnansweredError(ValueError):
    """What came is no answer, and the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of asking one rank.

    Attributes:
        state: It answered; it did not (`silent`); it runs torch's debug server
            without this page (`without`); or it never registered (`absent`).
        info: What it registered, where it did.
        answer: What it answered.
        why: Why there is no answer.
    """

    state: State
    info: RankInfo | None = None
    answer: ProcessStatus | None = None
    why: str = ""


def ask_each(
    infos: Iterable[RankInfo],
    fetch: Callable[[RankInfo], Awaitable[bytes]],
    one_within: float,
    all_within: float,
) -> dict[RankInfo, Reply]:
    """Ask ranks, all at once, and give the replies that came in time.

    Args:
        infos: Whom.
        fetch: Gets the answer of one.
        one_within: Seconds that one of them has.
        all_within: Seconds after which nobody is waited for any more.
    """
    replies: dict[RankInfo, Reply] = {}
    done = threading.Event()
    asking = _ask(infos, fetch, one_within, replies, done)
    # Not waited for: it ends when the last name server has given up.
    threading.Thread(target=lambda: asyncio.run(asking), daemon=True).start()
    done.wait(all_within)
    # Copied, because who is still being asked may answer now.
    return dict(replies)


async def _ask(
    infos: Iterable[RankInfo],
    fetch: Callable[[RankInfo], Awaitable[bytes]],
    within: float,
    replies: dict[RankInfo, Reply],
    done: threading.Event,
) -> None:
    places = asyncio.Semaphore(_MOST_ASKED_AT_ONCE)
    # Python's default is a few, and a name server that is down holds each for long.
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(_MOST_NAMES_LOOKED_UP_AT_ONCE)
    )

    async def ask(info: RankInfo) -> None:
        async with places:
            replies[info] = await _reply(info, fetch, within)

    await asyncio.gather(*map(ask, infos))
    done.set()


async def _reply(
    info: RankInfo, fetch: Callable[[RankInfo], Awaitable[bytes]], within: float
) -> Reply:
    try:
        written = await asyncio.wait_for(fetch(info), within)
        answer = ProcessStatus.from_bytes(written)
    except TimeoutError:
        why = f"no answer within {within:.0f} s"
    except _UnansweredError as error:
        why = str(error)
    except ConnectionRefusedError:
        why = "nobody listens there any more"
    except Exception as error:  # no route, hung up on, or something else speaks there
        why = f"{type(error).__name__}: {error}"
    else:
        if _is(answer.process, info):
            return Reply(state="answered", info=info, answer=answer)
        why = "another process answers at its address"
    return Reply(state="silent", info=info, why=why)


def _is(process: Mapping[str, Any], info: RankInfo) -> bool:
    """Tell whether it was the rank itself: addresses and ports change hands.

    Where nobody told the process its rank or host, the others have to do.
    """
    said = {name: process.get(name) for name in ("rank", "host", "pid")}
    return said["pid"] == info.pid and all(
        value in (None, getattr(info, name)) for name, value in said.items()
    )


async def fetch(
    host: str,
    port: int,
    path: str = "/",
    extra: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """Get what a rank says it is doing; with headers besides, and over TLS."""
    lines = [f"GET {path} HTTP/1.0"]
    lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = await reader.readuntil(b"\r\n\r\n")
        status, _, headers = head.partition(b"\r\n")
        if status.split()[1:2] != [b"200"]:
            raise _UnansweredError(
                f"answered {str(status.partition(b' ')[2], 'latin-1'):.60}"
            )
        length = _length(headers)
        if length > _LONGEST_ANSWER:
            raise _UnansweredError(f"the answer has {length} bytes")
        return await reader.readexactly(length)
    finally:
        writer.close()


def _length(headers: bytes) -> int:
    for line in headers.splitlines():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise _UnansweredError("the answer does not say how long it is")
