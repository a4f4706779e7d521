"""Serves the metrics of many simulated nodes from one port, for benchmarks/fleet.py.

The page of a node has the page of a real rank once for each of its ranks, with the rank
as a label. Its counters grow from scrape to scrape. The path is the number of the node.
"""

import asyncio
import re
import sys
import time
from pathlib import Path

RANKS_PER_NODE = 8
# A sample: name, labels in braces, value.
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_GROWING = ("_total", "_bucket", "_count", "_sum")
# Seconds in which a page stays the same.
_PAGE_AGE = 1.0


class Nodes:
    """The pages of all nodes."""

    def __init__(self, page: str) -> None:
        self._lines = page.splitlines()
        self._started = time.monotonic()
        self._rendered = b""
        self._age = -1

    def page(self, node: int) -> bytes:
        """Return the page of a node now."""
        age = int((time.monotonic() - self._started) / _PAGE_AGE)
        if age != self._age:
            self._age, self._rendered = age, self._render(age)
        page = self._rendered
        for local in range(RANKS_PER_NODE):
            rank = node * RANKS_PER_NODE + local
            page = page.replace(b"@%d@" % local, b"%d" % rank)
        return page

    def _render(self, age: int) -> bytes:
        lines = []
        for line in self._lines:
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                lines.append(line)
                continue
            name, labels, value = sample.groups()
            number = float(value)
            if name.endswith(_GROWING):
                number *= 1 + age / 10
            comma = "," if labels else ""
            lines += (
                f'{name}{{{labels or ""}{comma}rank="@{local}@"}} {number}'
                for local in range(RANKS_PER_NODE)
            )
        return "\n".join(lines).encode() + b"\n"


async def _serve(nodes: Nodes) -> None:
    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                body = nodes.page(int(request.split(b" ", 2)[1].lstrip(b"/")))
                writer.write(
                    b"HTTP/1.1 200 OK\r\n"
                    b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Nodes(Path(sys.argv[1]).read_text("utf-8"))))
