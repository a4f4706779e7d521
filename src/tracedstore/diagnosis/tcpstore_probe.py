"""Detects a TCPStore without importing torch, which takes seconds.

A torch client begins with two requests: VALIDATE, and PING with a number that the
server echoes. A server that echoes it is a TCPStore; torch cannot read another. The
server keeps nothing of either request.
"""

import re
import socket
import struct
from importlib.metadata import PackageNotFoundError, version

# The latest torch whose client is known to begin so; a test compares the installed one.
_KNOWN_TORCH = (2, 13)
# VALIDATE (0) with torch's magic number, PING (13) with ours.
_NONCE = 0x74726163
_REQUEST = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, _NONCE)
_RESPONSE = struct.pack("=I", _NONCE)


def probe(connection: socket.socket) -> bool:
    """Return whether a TCPStore server answers.

    Blocks until the server answers or hangs up, or the connection times out.
    """
    received = b""
    try:
        connection.sendall(_REQUEST)
        while len(received) < len(_RESPONSE):
            if not (more := connection.recv(len(_RESPONSE) - len(received))):
                break
            received += more
    except ConnectionError:
        return False
    return received == _RESPONSE


def is_supported() -> bool:
    """Return whether the installed torch is known to begin with these requests."""
    try:
        match = re.match(r"(\d+)\.(\d+)", version("torch"))
    except PackageNotFoundError:
        return False
    return match is not None and (int(match[1]), int(match[2])) <= _KNOWN_TORCH
