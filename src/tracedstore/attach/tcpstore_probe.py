"""Detects a TCPStore without importing torch, which takes seconds.

A torch client begins with two requests: VALIDATE, and PING with a number that the
server echoes. A server that echoes it is a TCPStore. The server keeps nothing of either
request. A test compares these requests with those of the installed torch.
"""

import re
import socket
import struct

# VALIDATE (0) with torch's magic number, PING (13) with ours.
_NONCE = 0x74726163
_REQUEST = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, _NONCE)
_RESPONSE = struct.pack("=I", _NONCE)
# HTTP, SSH, Redis and mail servers answer in text.
_TEXT = re.compile(rb"[\t\r\n\x20-\x7e]+")


def probe(connection: socket.socket) -> bool | None:
    """Return whether a TCPStore server answers; None if only torch can tell.

    A server that closes the connection, or answers with other bytes than text, may be
    the TCPStore of a torch with other requests.

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
        pass
    if received == _RESPONSE:
        return True
    return False if _TEXT.fullmatch(received) else None
