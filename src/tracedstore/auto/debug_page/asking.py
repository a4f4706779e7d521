"""Ask all ranks what they are doing, in bounded time, whoever is there.

torch's own pages read the addresses of all ranks with one ``multi_get``, which blocks
until the last rank has registered, or for the store's 300 s. Here nothing blocks the
page: what touches the store or the network is done in threads of its own, and the
page takes what has come when its time is up.
"""

import asyncio
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from tracedstore.coordination.missing import bisect, let_go
from tracedstore.coordination.ranks import RankInfo, registered
from tracedstore.export.answers import Answer

# Seconds that one rank has to answer, and the store to say where the ranks are.
_ANSWER_WITHIN = 2.0
_STORE_WITHIN = 2.0
# Less than the files that a process may have open, of which 1024 is a common limit.
_MOST_ASKED_AT_ONCE = 512
_MOST_NAMES_LOOKED_UP_AT_ONCE = 32
_LONGEST_ANSWER = 4 << 20

_KEYS_CHANGED = (
    "torch's debug server keeps its addresses elsewhere than torch 2.13 does, so a rank"
    " that runs it without this page is shown as one that never registered"
)

State = Literal["answered", "silent", "without", "absent"]


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
    answer: Answer | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    """The ranks that registered with us, and those with torch's server only."""

    ours: Mapping[int, RankInfo] = field(default_factory=dict)
    torchs: frozenset[int] = frozenset()


class Directory:
    """Where the ranks are, as far as the store has said.

    The store may not answer: then the page shows what was known before. One thread
    at a time asks it, however often the page is called for.
    """

    def __init__(self, connect: Callable[[], Any], world_size: int) -> None:
        self._connect = connect
        self._ranks = range(world_size)
        self._lock = threading.Lock()
        self._under_way: threading.Event | None = None
        self._known = _Known()
        self._trouble = ""

    def look(self, within: float) -> tuple[_Known, str]:
        """Give what is known, and what is wrong with the store, if anything is."""
        with self._lock:
            if self._under_way is None:
                self._under_way = threading.Event()
                threading.Thread(target=self._read, daemon=True).start()
            under_way = self._under_way
        if not under_way.wait(within):
            return self._known, f"the store has not answered for {within:.0f} s"
        return self._known, self._trouble

    def _read(self) -> None:
        try:
            store = self._connect()
            try:
                self._known = self._registered(store)
                # This runs in what torch's rank 0 started after it had registered.
                self._trouble = "" if store.check(["rank0"]) else _KEYS_CHANGED
            finally:
                let_go(store)
        except Exception as error:
            self._trouble = f"the store could not be read: {error!r:.200}"
        finally:
            with self._lock:
                if self._under_way is not None:
                    self._under_way.set()
                self._under_way = None

    def _registered(self, store: Any) -> _Known:
        ours = registered(store, self._ranks)
        rest = [rank for rank in self._ranks if rank not in ours]
        nowhere = bisect(
            lambda some: bool(store.check([f"rank{rank}" for rank in some])), rest
        )
        return _Known(ours, frozenset(rest) - frozenset(nowhere))


def ask_all(
    directory: Directory, world_size: int, within: float
) -> tuple[dict[int, Reply], str]:
    """Ask all ranks; gives a reply for each, and what is wrong with the store."""
    deadline = time.monotonic() + within
    known, trouble = directory.look(min(_STORE_WITHIN, within / 2))
    left = deadline - time.monotonic()
    asked = ask_each(known.ours.values(), _where_it_answers, _ANSWER_WITHIN, left)
    came = {info.rank: reply for info, reply in asked.items()}
    return {
        rank: came.get(rank) or _without_answer(known, rank)
        for rank in range(world_size)
    }, trouble


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


def _without_answer(known: _Known, rank: int) -> Reply:
    if rank in known.ours:
        return Reply(state="silent", info=known.ours[rank], why="no time was left")
    return Reply(state="without" if rank in known.torchs else "absent")


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
        answer = Answer.from_bytes(written)
    except TimeoutError:
        why = f"no answer within {within:.0f} s"
    except Exception as error:  # refused, hung up on, or something else speaks there
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


async def _where_it_answers(info: RankInfo) -> bytes:
    host, _, port = str(info.answers).rpartition(":")
    return await fetch(host, int(port))


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
            raise ValueError(f"answered {status!r:.60}")
        length = _length(headers)
        if length > _LONGEST_ANSWER:
            raise ValueError(f"the answer has {length} bytes")
        return await reader.readexactly(length)
    finally:
        writer.close()


def _length(headers: bytes) -> int:
    for line in headers.splitlines():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError("the answer does not say how long it is")
