"""Small pickles that make ``pickle.Unpickler`` hang, or use much memory."""

import pickle

from support.rendezvous import pickled_state

_SIZE = 16 * 1024 * 1024
_SET = b"cbuiltins\nset\n"
_NODE = b"ctorch.distributed.elastic.rendezvous.dynamic_rendezvous\n_NodeDesc\n"
_STATE = _NODE.replace(b"_NodeDesc", b"_RendezvousState")
# Opcodes of a state, with arguments.
OPCODES = [
    *(
        bytes([opcode])
        for opcode in b"\x94(N\x88\x89)\x85\x86\x87}]\x8fsuae\x90\x93\x81bR0"
    ),
    *(
        b"h\x00",
        b"h\x01",
        b"h\x02",
        b"j\x00\x00\x00\x00",
        b"q\x00",
        b"r\x01\x00\x00\x00",
    ),
    *(
        b"K\x01",
        b"M\x01\x00",
        b"J\xff\xff\xff\xff",
        b"\x8a\x01\x01",
        b"\x8a\x09" + b"\x7f" * 9,
    ),
    *(
        b"\x8c\x05round",
        b"\x8c\x08datetime",
        b"X\x01\x00\x00\x00a",
        b"C\x0a" + bytes(10),
    ),
    *(_SET, _NODE, _STATE, b"cdatetime\ntimedelta\n", b"cdatetime\ntimezone\n"),
    *(
        b"cdatetime\ndatetime\n",
        b"cos\nsystem\n",
        b"C\x0a\x07\xea\x0b\x10\x0f\x11\x02\x0f\x0c\x86",
    ),
]


def _filled(
    start: bytes, repeated: bytes, end: bytes = b".", size: int = _SIZE
) -> bytes:
    """Repeat opcodes until the pickle has about `size` bytes."""
    count = (size - len(start) - len(end)) // len(repeated)
    return start + repeated * count + end


def hostile_pickles() -> dict[str, bytes]:
    """Return pickles by what they do; none is a state."""
    proto = b"\x80\x04"
    repeats = {
        "marks": (proto, b"("),
        "empty sets": (proto, b"\x8f\x94"),
        "empty dicts": (proto, b"}\x94"),
        "memo": (proto + b"N", b"\x94"),
        "tuples": (proto + b"NN", b"\x86"),
        "wide tuples": (proto + b"K\x01\x94", b"h\x00h\x00\x86\x94"),
        "nodes": (proto + _NODE + b"\x94", b"h\x00)\x81\x94"),
        "doubling lists": (proto + b"]\x94", b"(h\x00h\x00eh\x00\x94"),
        "doubling tuples": (proto + b")\x94", b"\x94h\x00h\x00\x86"),
        "copied sets": (
            proto + _SET + b"\x94](" + b"N" * 100_000 + b"e\x94",
            b"h\x00h\x01\x85R",
        ),
        "copied sets of nodes": (
            proto
            + _SET
            + b"\x94]("
            + _NODE
            + b")\x81\x94"
            + b"h\x01" * 99_000
            + b"e\x94",
            b"h\x00h\x02\x85R",
        ),
        "texts": (proto, b"X\x00\x04\x00\x00" + "\U0001f600".encode() + b"x" * 1020),
        "short texts": (proto, b"\x8c\x05\xf0\x9f\x98\x80x\x94"),
        "integers": (proto, b"J\xff\xff\xff\x7f\x94"),
        "dictionary entries": (proto + b"}", b"\x8c\x01kNs"),
        "times": (
            proto + b"cdatetime\ntimedelta\n\x94",
            b"h\x00K\x01K\x01K\x01\x87R\x94",
        ),
        "frames": (proto, b"\x95" + b"\xff" * 8),
        "persistent ids": (proto, b"Px\n"),
    }
    # Within the parser's limit of 4 MiB, and one beyond it.
    pickles = {name: _filled(*parts, size=4_000_000) for name, parts in repeats.items()}
    pickles["16 MB"] = _filled(*repeats["memo"])
    doubled = b"))\x86"
    for number in range(200):
        doubled += b"\x94" + b"h" + bytes([number]) + b"\x86"
    return pickles | {
        "hashed nested tuples": proto + b"}" + doubled + b"Ns.",
        "hashed in a set": proto + b"\x8f(" + doubled + b"\x90.",
        "huge integer": proto + b"\x8b" + _SIZE.to_bytes(4, "little") + b"\x7f" * _SIZE,
        "integer as text": b"L" + b"9" * _SIZE + b"L\n.",
        "huge memo index": proto + b"Nr\xff\xff\xff\xff.",
        "huge bytearray": b"\x80\x05\x96" + b"\xff\xff\xff\xff\xff\x00\x00\x00" + b".",
        "huge text": proto + b"\x8d" + b"\xff\xff\xff\xff\x0f\x00\x00\x00" + b".",
        "deep lists": proto + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "state of itself": proto + _STATE + b")\x81\x94}\x94h\x01b.",
        "damaged state": pickled_state({f"n{n}": 0 for n in range(15_000)})[:-1],
        "too many nodes": pickled_state({f"n{n}": 0 for n in range(40_000)}),
        "long list": pickle.dumps([0] * 1_000_000),
    }
