"""Decoders: functions from a rank to a name, mostly the name of its host.

A decoder is any callable, so a user's function or a dictionary's ``__getitem__`` is
one too.
"""

import os
from collections.abc import Callable, Iterable, Mapping

from tracedstore.common.keys import key_text
from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import plural
from tracedstore.naming.environment import DecoderError, quoted
from tracedstore.naming.launchers import (
    Decoder,
    hostfile,
    kubernetes,
    openmpi,
    slurm,
    torchrun,
)

__all__ = [
    "Decoder",
    "DecoderError",
    "auto",
    "by_host",
    "by_name",
    "chain",
    "default_name",
    "describe_missing",
    "hostfile",
    "kubernetes",
    "name_of",
    "openmpi",
    "slurm",
    "torchrun",
]


def chain(*decoders: Decoder) -> Decoder:
    """Return a decoder that tries others in order, until one does not raise."""

    def first_name(rank: int) -> str:
        for decoder in decoders:
            try:
                return decoder(rank)
            except Exception:  # noqa: S112 - the next decoder may know the rank
                continue
        raise LookupError(rank)

    return first_name


def default_name(rank: int) -> str:
    """Return ``rank N``, the name of a rank that has no other."""
    return f"rank {rank}"


def auto(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Chain all decoders that this environment supports, and `default_name`."""
    decoders: list[Decoder] = []
    for factory in (slurm, kubernetes, openmpi, torchrun):
        try:
            decoders.append(factory(environ))
        except DecoderError:
            continue
    return chain(*decoders, default_name)


_FACTORIES: dict[str, Callable[[Mapping[str, str]], Decoder]] = {
    "auto": auto,
    "kubernetes": kubernetes,
    "openmpi": openmpi,
    "slurm": slurm,
    "torchrun": torchrun,
}
_HOSTFILE = "hostfile:"


def by_name(name: str, environ: Mapping[str, str] = os.environ) -> Decoder:
    """Create a decoder by its name.

    Raises:
        DecoderError: There is no such decoder, or the environment does not support it.
    """
    if name.startswith(_HOSTFILE):
        return hostfile(name.removeprefix(_HOSTFILE))
    factory = _FACTORIES.get(name)
    if factory is None:
        raise DecoderError(
            f"unknown decoder {quoted(name)}; the decoders are"
            f" {', '.join(_FACTORIES)} and {_HOSTFILE}PATH"
        )
    return factory(environ)


def name_of(decoder: Decoder, rank: int) -> str:
    """Call a decoder that may be the user's; always returns a name.

    The name has at most 256 characters. If the decoder raises or returns None, as
    ``dict.get`` does, the name is `default_name`.
    """
    try:
        # Annotated as str, but it is the user's function.
        name: object = decoder(rank)
        return (key_text(str(name)) if name is not None else "") or default_name(rank)
    except Exception:
        return default_name(rank)


def by_host(ranks: Iterable[int], decoder: Decoder) -> dict[str, list[int]]:
    """Group ranks by name, in the order of each name's first rank."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(set(ranks)):
        hosts.setdefault(name_of(decoder, rank), []).append(rank)
    return hosts


def describe_missing(
    ranks: Iterable[int], total: int, decoder: Decoder, max_hosts: int = 16
) -> str:
    """Describe missing ranks for the operator, in a text of bounded length.

    ``missing 9 of 64: node1 (ranks 8-15), rank 40``: first the hosts with their ranks,
    then the ranks without a known host.
    """
    groups = by_host(ranks, decoder)
    missing = sum(map(len, groups.values()))
    without_host = [
        group[0]
        for name, group in groups.items()
        if len(group) == 1 and name == default_name(group[0])
    ]
    for rank in without_host:
        del groups[default_name(rank)]
    hosts = [f"{host} ({ranks_text(group)})" for host, group in groups.items()]
    parts = hosts[:max_hosts]
    if rest := len(hosts) - len(parts):
        parts.append(f"... and {plural(rest, 'more host')}")
    if without_host:
        parts.append(ranks_text(without_host))
    return f"missing {missing} of {total}" + (f": {', '.join(parts)}" if parts else "")
