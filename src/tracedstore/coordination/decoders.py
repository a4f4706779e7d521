"""Ranks become names, most of all names of hosts.

A decoder is a plain callable, so a caller's own function or a dictionary's
``__getitem__`` is one too.
"""

import os
from collections.abc import Callable, Mapping

from tracedstore.coordination.environment import DecoderError, shown
from tracedstore.coordination.launchers import (
    Decoder,
    hostfile,
    kubernetes,
    openmpi,
    slurm,
    torchrun,
)
from tracedstore.core.keys import printable

__all__ = [
    "Decoder",
    "DecoderError",
    "auto",
    "by_name",
    "chain",
    "hostfile",
    "kubernetes",
    "name_of",
    "nameless",
    "openmpi",
    "slurm",
    "torchrun",
]


def chain(*decoders: Decoder) -> Decoder:
    """Ask one after the other; one that raises costs only its own answer."""

    def first_answer(rank: int) -> str:
        for decoder in decoders:
            try:
                return decoder(rank)
            except Exception:  # noqa: S112
                continue
        raise LookupError(rank)

    return first_answer


def nameless(rank: int) -> str:
    """Name a rank of which nothing else is known."""
    return f"rank {rank}"


def auto(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Chain what works in this environment; at last every rank is ``rank N``."""
    decoders: list[Decoder] = []
    for factory in (slurm, kubernetes, openmpi, torchrun):
        try:
            decoders.append(factory(environ))
        except DecoderError:
            continue
    return chain(*decoders, nameless)


_FACTORIES: dict[str, Callable[[Mapping[str, str]], Decoder]] = {
    "auto": auto,
    "kubernetes": kubernetes,
    "openmpi": openmpi,
    "slurm": slurm,
    "torchrun": torchrun,
}
_HOSTFILE = "hostfile:"


def by_name(name: str, environ: Mapping[str, str] = os.environ) -> Decoder:
    """Make the decoder that a setting names."""
    if name.startswith(_HOSTFILE):
        return hostfile(name.removeprefix(_HOSTFILE))
    factory = _FACTORIES.get(name)
    if factory is None:
        raise DecoderError(
            f"there is no decoder {shown(name)}; there are"
            f" {', '.join(_FACTORIES)} and {_HOSTFILE}PATH"
        )
    return factory(environ)


def name_of(decoder: Decoder, rank: int) -> str:
    """Ask a decoder that may be anybody's: always a name, at most 256 characters.

    One that raises, or has nothing to say (``dict.get`` does it with None), costs
    that name only.
    """
    try:
        # Annotated as str; but it is the caller's function.
        answer: object = decoder(rank)
        return (printable(str(answer)) if answer is not None else "") or nameless(rank)
    except Exception:
        return nameless(rank)
