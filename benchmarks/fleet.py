"""Measures what a real Prometheus needs for the metrics of a large job.

Simulated nodes of eight ranks each serve the page of a rank of a real job. Prometheus
scrapes them and evaluates the rules of this project. Then the expressions of these
rules and the queries of the dashboard "Job" are run once more, while
nothing is scraped, to measure their CPU time. It ends at the first size that this
machine does not carry; larger sizes are extrapolated in proportion to the largest
measured one, and marked.
"""

import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import exposition
import simulated_nodes
import yaml
from harness import Bar, finish, parser
from prometheus_client import REGISTRY, generate_latest

import tracedstore

_ROOT = Path(__file__).parents[1]
_RULES = _ROOT / "dashboards/rules/prometheus.yaml"
_DASHBOARD = _ROOT / "dashboards/tracedstore-job.json"
# What "Time spent in barriers" would ask without a recording rule.
_WITHOUT_RULE = (
    "histogram_quantile(0.99, sum by (barrier, le)"
    " (rate(tracedstore_barrier_duration_seconds_bucket[5m])))"
)
_WITH_RULE = (
    "histogram_quantile(0.99, sum by (barrier, le)"
    " (job_run_id_barrier_le:tracedstore_barrier_duration_seconds_bucket:rate5m))"
)
_NODES_BEYOND = (2_000, 4_000)
# A target stays as large, and a recorded query reads as many series.
_PROPORTIONAL = (
    "series",
    "memory_mb",
    "cpu_cores",
    "rules_ms",
    "dashboard_ms",
    "unrecorded_ms",
)
# A server with 64 GB keeps a job of 2,000 nodes with room for others.
_MAX_BYTES_A_SERIES = 8_000


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one size.

    Attributes:
        nodes: Targets.
        ranks: Ranks on them.
        series: Series in the head of Prometheus.
        memory_mb: Resident memory of Prometheus.
        cpu_cores: CPU seconds that it uses a second, while it scrapes and evaluates.
        scrape_ms: The median duration of a scrape.
        rules_ms: CPU time of the expressions of all rules, once each.
        dashboard_ms: CPU time of all queries of the dashboard, at one point in time.
        recorded_ms: CPU time of a quantile of barriers from a recording rule.
        unrecorded_ms: The same from the series of all ranks.
        extrapolated: Not measured.
    """

    nodes: int
    ranks: int
    series: float
    memory_mb: float
    cpu_cores: float
    scrape_ms: float
    rules_ms: float
    dashboard_ms: float
    recorded_ms: float
    unrecorded_ms: float
    extrapolated: bool = False


class NotCarriedError(Exception):
    """Prometheus or this machine is too slow for a number of nodes."""


class Server:
    """A running Prometheus.

    Args:
        folder: Where it keeps its data.
        nodes_port: The port of the simulated nodes.
        interval: Seconds between scrapes, and between evaluations.
    """

    def __init__(self, folder: Path, nodes_port: int, interval: int) -> None:
        self._folder = folder
        self._nodes_port = nodes_port
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.set_nodes(0)
        files = {"files": [str(folder / "nodes.json")], "refresh_interval": "1s"}
        config = {
            "global": {
                "scrape_interval": f"{interval}s",
                "scrape_timeout": f"{interval}s",
                "evaluation_interval": f"{interval}s",
            },
            "rule_files": [str(_RULES)],
            "scrape_configs": [
                {
                    "job_name": "training",
                    "file_sd_configs": [files],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        path = f"{_ROOT / '.tools/bin'}{os.pathsep}{os.environ['PATH']}"
        program = shutil.which("prometheus", path=path)
        if program is None:
            raise RuntimeError("prometheus is missing: run `make setup`")
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def set_nodes(self, number: int) -> None:
        """Let Prometheus scrape this number of nodes."""
        written = self._folder / "nodes.json.new"
        targets = [
            {
                "targets": [f"127.0.0.1:{self._nodes_port}"],
                "labels": {
                    "__metrics_path__": f"/{node}",
                    "instance": f"node{node}:27400",
                    "host": f"node{node}",
                    "run_id": "fleet",
                },
            }
            for node in range(number)
        ]
        written.write_text(json.dumps(targets))
        written.rename(self._folder / "nodes.json")

    def query(self, expr: str, at: float | None = None) -> list[float]:
        """Return the values of an instant query."""
        parameters = {"query": expr} | ({} if at is None else {"time": str(at)})
        query = urllib.parse.urlencode(parameters)
        url = f"{self._url}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=300) as response:
            result = json.load(response)["data"]["result"]
        return [float(one["value"][1]) for one in result]

    def milliseconds(self, exprs: list[str], at: float) -> float:
        """Return the CPU time of instant queries, the median of three runs."""
        durations = []
        for _ in range(3):
            started = self._cpu_seconds()
            for expr in exprs:
                self.query(expr, at)
            durations.append(self._cpu_seconds() - started)
        return 1e3 * statistics.median(durations)

    def _cpu_seconds(self) -> float:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in threads) / 1e9

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until Prometheus has dropped its targets and all series are stale."""
        deadline = time.monotonic() + timeout
        while self.query("count(up) or vector(0)") != [0.0]:
            if time.monotonic() > deadline:
                raise NotCarriedError(f"still has targets after {timeout:.0f} s")
            time.sleep(0.5)

    def own(self) -> dict[str, float]:
        """Return the server's own metrics, summed over their labels."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = re.sub(r"\{.*\}", "", line).partition(" ")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_scraped(self, nodes: int, times: int, timeout: float) -> None:
        """Wait until every node has been scraped that many times from now on."""
        deadline, began = time.monotonic() + timeout, time.time()
        while True:
            if self.process.poll() is not None:
                log = (self._folder / "prometheus.log").read_text()
                raise RuntimeError(f"Prometheus has exited: {log[-2000:]}")
            window = f"[{int(time.time() - began) + 1}s]"
            scraped = f"count(count_over_time(up{window}) >= {times}) or vector(0)"
            try:
                if self.query(scraped) >= [nodes] and self.query("min(up)") == [1.0]:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise NotCarriedError(f"not scraped in {timeout:.0f} s")
            time.sleep(0.5)


def page_of_a_rank() -> str:
    """Run an ordinary job and return the page of its rank 0."""
    tracedstore.configure(log_format="off")
    exposition.ordinary()
    page = generate_latest(REGISTRY).decode()
    tracedstore.shutdown()
    return page


def dashboard_queries() -> list[str]:
    """Return the queries of the dashboard, for all runs and ranks."""
    dashboard = json.loads(_DASHBOARD.read_text("utf-8"))
    texts = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
        if target["datasource"]["type"] == "prometheus"
    ]
    return [
        re.sub(r"\$[a-z_]+", ".*", re.sub(r"\$__(rate_interval|range)", "5m", text))
        for text in texts
    ]


def rule_expressions() -> list[str]:
    """Return the expressions of all rules."""
    groups = yaml.safe_load(_RULES.read_text("utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def measure(server: Server, nodes: int, interval: int, timeout: float) -> Row:
    """Let Prometheus scrape a number of nodes, and measure it."""
    server.set_nodes(nodes)
    server.wait_until_scraped(nodes, 2, timeout)
    before, started = server.own(), time.monotonic()
    # Every rule is evaluated with two samples of all series.
    time.sleep(2 * interval)
    after = server.own()
    seconds = time.monotonic() - started
    cpu = after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
    at = time.time()
    scrape = server.query("quantile(0.5, scrape_duration_seconds)", at)
    # From here on only queries use CPU time; they are about the time before.
    server.set_nodes(0)
    server.wait_until_idle(timeout)
    return Row(
        nodes=nodes,
        ranks=nodes * simulated_nodes.RANKS_PER_NODE,
        series=after["prometheus_tsdb_head_series"],
        memory_mb=after["process_resident_memory_bytes"] / 1e6,
        cpu_cores=cpu / seconds,
        scrape_ms=1e3 * scrape[0],
        rules_ms=server.milliseconds(rule_expressions(), at),
        dashboard_ms=server.milliseconds(dashboard_queries(), at),
        recorded_ms=server.milliseconds([_WITH_RULE], at),
        unrecorded_ms=server.milliseconds([_WITHOUT_RULE], at),
    )


def extrapolate(largest: Row, nodes: int) -> Row:
    """Return what a larger size would need, in proportion to the largest measured."""
    share = nodes / largest.nodes
    return replace(
        largest,
        nodes=nodes,
        ranks=nodes * simulated_nodes.RANKS_PER_NODE,
        extrapolated=True,
        **{name: share * getattr(largest, name) for name in _PROPORTIONAL},
    )


@contextmanager
def serving(page: Path) -> Iterator[int]:
    """Serve the simulated nodes from another process, and yield the port."""
    with subprocess.Popen(
        [sys.executable, simulated_nodes.__file__, page],
        stdout=subprocess.PIPE,
        text=True,
    ) as nodes:
        assert nodes.stdout is not None
        try:
            yield int(nodes.stdout.readline())
        finally:
            nodes.kill()


def main() -> int:
    """Run the benchmark, print the table, write the JSON."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--nodes", type=int, nargs="+", default=[100, 400, 1600], metavar="NUMBER"
    )
    arguments.add_argument("--interval", type=int, default=15, help="seconds")
    arguments.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for each size"
    )
    options = arguments.parse_args()
    # Prometheus and the nodes end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    page = page_of_a_rank()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page").write_text(page)
        with serving(folder / "page") as port:
            server = Server(folder, port, options.interval)
            try:
                for nodes in options.nodes:
                    row = measure(server, nodes, options.interval, options.timeout)
                    _print(row, head=not rows)
                    rows.append(row)
            except NotCarriedError as error:
                print(f"{nodes:>6,} nodes: {error}")
            finally:
                # Its data are discarded.
                server.process.kill()
                server.process.wait()
    if not rows:
        return 1
    largest = rows[-1]
    for nodes in _NODES_BEYOND:
        if nodes > largest.nodes:
            rows.append(extrapolate(largest, nodes))
            _print(rows[-1])
    per_series = largest.memory_mb * 1e6 / largest.series
    results = {
        "interval": options.interval,
        "series_a_rank": sum(not line.startswith("#") for line in page.splitlines()),
        "bytes_a_series": per_series,
        "rows": [asdict(row) for row in rows],
    }
    bars = [
        Bar.at_most("bytes of memory a series", per_series, _MAX_BYTES_A_SERIES),
        Bar.at_most(
            "a recorded query over the same from all ranks",
            largest.recorded_ms / largest.unrecorded_ms,
            1.0,
        ),
    ]
    return finish(bars, results, options.output)


def _print(row: Row, *, head: bool = False) -> None:
    if head:
        print(
            f"{'nodes':>6}{'ranks':>8}{'series':>12}{'memory':>11}{'cores':>7}"
            f"{'scrape':>10}{'rules':>10}{'dashboard':>11}{'recorded':>10}"
            f"{'all ranks':>11}"
        )
    print(
        f"{row.nodes:>6,}{row.ranks:>8,}{row.series:>12,.0f}{row.memory_mb:>8,.0f} MB"
        f"{row.cpu_cores:>7.2f}{row.scrape_ms:>7.0f} ms{row.rules_ms:>7.0f} ms"
        f"{row.dashboard_ms:>8.0f} ms{row.recorded_ms:>7.1f} ms"
        f"{row.unrecorded_ms:>8.0f} ms" + ("  extrapolated" * row.extrapolated),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
