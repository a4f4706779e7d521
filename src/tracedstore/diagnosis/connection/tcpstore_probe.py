"""Speaks to a TCPStore server without torch's client.

Importing torch takes seconds, and its client may wait without end for a server that
does not answer.

A torch client begins with two requests: VALIDATE, and PING with a number that the
server echoes. A server that echoes it is a TCPStore. The server keeps nothing of either
request. A test compares these requests with those of the installed torch.
"""

import re
import socket
import struct
from contextlib import suppress

# VALIDATE (0) with torch's magic number, PING (13) with ours.
_NONCE = 0x74726163
_REQUEST = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, _NONCE)
_RESPONSE = struct.pack("=I", _NONCE)
# HTTP, SSH, Redis and mail servers answer in text.
_TEXT = re.compile(rb"[\t\r\n\x20-\x7e]+")
# The server counts clients under this key, which torch's own methods cannot address.
_JOINED_KEY = b"init/"
# ADD (4) of 0 to it; the response is the sum.
_JOINED_REQUEST = struct.pack(f"=BQ{len(_JOINED_KEY)}sq", 4, 5, _JOINED_KEY, 0)
_JOINED_RESPONSE = struct.Struct("=q")


def probe(connection: socket.socket) -> bool | None:
    """Return whether a TCPStore server answers; None if only torch can tell.

    A server that closes the connection, or answers with other bytes than text, may be
    the TCPStore of a torch with other requests.

    Blocks until the server answers or hangs up, or the connection times out.
    """
    received = b""
    with suppress(ConnectionError):
        connection.sendall(_REQUEST)
        received = _receive(connection, len(_RESPONSE))
    if received == _RESPONSE:
        return True
    return False if _TEXT.fullmatch(received) else None


def joined_count(connection: socket.socket) -> int:
    """Return how many clients of the job have joined, as torch's message counts them.

    Only after `probe`, which begins the conversation.

    Raises:
        OSError: The server does not answer in time, or hung up.
    """
    connection.sendall(_JOINED_REQUEST)
    response = _receive(connection, _JOINED_RESPONSE.size)
    if len(response) < _JOINED_RESPONSE.size:
        raise ConnectionError("the server hung up")
    (count,) = _JOINED_RESPONSE.unpack(response)
    return int(count)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes; fewer if the server hangs up."""
    received = b""
    while len(received) < size:
        if not (more := connection.recv(size - len(received))):
            break
        received += more
    return received
