"""The addresses that gloo's ranks publish in the store, and what is wrong with them.

Each rank writes its host name and socket address under a key of its own: size, host
name, size, sockaddr, and the ids of its connections (gloo's transport/tcp/context.cc).
Any client can write the key, so the value is checked.
"""

import ipaddress
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracedstore.common import ranges
from tracedstore.common.codec import printable_text
from tracedstore.common.procfs import IPAddress
from tracedstore.coordination.arrivals import find_absent
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict

_MAX_HOST_NAME = 256
_MAX_VALUE = 1024 * 1024
# sizeof(struct sockaddr_storage)
_SOCKADDR = 128
_SIZE = struct.Struct("=Q")
_MAX_RANKS_READ = 4096


@dataclass(frozen=True, slots=True)
class GlooAddress:
    """What a rank published.

    Attributes:
        host: Its host name.
        address: The IP address at which it listens.
        port: The port.
    """

    host: str
    address: IPAddress
    port: int


def parse(value: bytes) -> GlooAddress | None:
    """Parse a published value; None if it is not one."""
    try:
        if len(value) > _MAX_VALUE:
            return None
        host, rest = _sized(value, _MAX_HOST_NAME)
        peer, _ = _sized(rest, _MAX_VALUE)
        if len(peer) < _SOCKADDR:
            return None
        family = int.from_bytes(peer[:2], "little")
        port = int.from_bytes(peer[2:4], "big")
        if family == socket.AF_INET:
            address: IPAddress = ipaddress.IPv4Address(peer[4:8])
        elif family == socket.AF_INET6:
            address = ipaddress.IPv6Address(peer[8:24])
        else:
            return None
        return GlooAddress(printable_text(host.decode()), address, port)
    except (ValueError, struct.error):
        return None


def _sized(data: bytes, limit: int) -> tuple[bytes, bytes]:
    (size,) = _SIZE.unpack_from(data)
    end = _SIZE.size + size
    if not 0 < size <= limit or end > len(data):
        raise ValueError("not a size")
    return data[_SIZE.size : end], data[end:]


def read(store: Any, prefix: str, size: int) -> dict[int, GlooAddress]:
    """Read what the ranks of a group have published.

    Args:
        store: A store that no other thread waits on.
        prefix: The key of a rank without the rank.
        size: The number of ranks of the group.
    """
    keys = [f"{prefix}{rank}" for rank in range(min(size, _MAX_RANKS_READ))]
    absent = set(find_absent(lambda some: bool(store.check(list(some))), keys))
    present = [rank for rank, key in enumerate(keys) if key not in absent]
    values = store.multi_get([keys[rank] for rank in present]) if present else []
    parsed = zip(present, map(parse, values), strict=True)
    return {rank: address for rank, address in parsed if address is not None}


def check_loopback(
    addresses: Mapping[int, GlooAddress], phase: str, members: Mapping[int, int]
) -> Verdict | None:
    """Find ranks that publish loopback addresses to ranks of other hosts.

    Args:
        addresses: What the ranks of a group have published.
        phase: What the ranks execute.
        members: Global ranks by group rank; a rank that is not in it is its own.
    """
    hosts = {address.host for address in addresses.values()}
    loopback = {
        rank: found for rank, found in addresses.items() if found.address.is_loopback
    }
    if len(hosts) < 2 or not loopback:  # noqa: PLR2004 - more than one host
        return None
    named = [
        AwaitedRank(
            rank=members.get(rank, rank),
            host=found.host,
            cause="address",
            doing=f"publishes {found.address}:{found.port}",
        )
        for rank, found in sorted(loopback.items())
    ]
    ranks = tuple(sorted(one.rank for one in named))
    shown = ", ".join(sorted({found.host for found in loopback.values()})[:4])
    evidence = (
        "loopback addresses, which ranks of other hosts cannot reach, published to"
        f" gloo by {ranges.ranks_text(ranks)}"
    )
    return Verdict(
        phase=phase,
        cause="address",
        awaited=tuple(named),
        awaited_ranks=ranks,
        waiting_ranks=tuple(
            sorted(members.get(rank, rank) for rank in addresses.keys() - loopback)
        ),
        evidence=(evidence,),
        remedy=f"set GLOO_SOCKET_IFNAME on {shown}, or let its name resolve to its"
        " network address",
        time=time.time(),
    )


def key_prefix(group_name: str) -> str:
    """Return the keys of a group's ranks without the rank, below the store given to it.

    For the first device and the backend of the CPU.
    """
    return f"{group_name}//cpu//0/"
