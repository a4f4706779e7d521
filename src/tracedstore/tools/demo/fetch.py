"""HTTP requests to servers on this machine."""

import urllib.request

# Without the user's proxy, which is not for this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str, timeout: float) -> bytes:
    """Return the body of a page; raise OSError if the request fails."""
    with _opener.open(url, timeout=timeout) as response:
        body: bytes = response.read()
        return body
