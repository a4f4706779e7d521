"""The tables of docs/scale.md and docs/cost.md on the traffic of large jobs."""

from typing import Any

from tables import code, results_of, table


def fleet() -> str:
    """Return what a Prometheus needs."""
    results = results_of("fleet")
    rows = [
        [
            f"{row['nodes']:,}" + (" (extrapolated)" if row["extrapolated"] else ""),
            f"{row['ranks']:,}",
            f"{row['series']:,.0f}",
            f"{row['memory_mb'] / 1000:,.1f} GB",
            f"{row['cpu_cores']:.2f}",
            *(
                f"{row[column]:,.0f} ms"
                for column in ("scrape_ms", "rules_ms", "dashboard_ms")
            ),
            f"{row['recorded_ms']:,.1f} ms",
            f"{row['unrecorded_ms']:,.0f} ms",
        ]
        for row in results["rows"]
    ]
    head = [
        "nodes",
        "ranks",
        "series",
        "memory",
        "cores",
        "a scrape",
        "all rules",
        "dashboard",
        "a recorded quantile",
        "from all ranks",
    ]
    return (
        f"{table(head, rows)}\n\n"
        f"{results['series_a_rank']} series a rank, {results['bytes_a_series']:,.0f}"
        " bytes of memory a series at the largest measured size. Scrapes and"
        f" evaluations every {results['interval']} s."
    )


def stall_traffic() -> str:
    """Return what a stall costs the store."""
    rows = [
        [
            f"{row['ranks']:,}",
            f"{row['max_requests']} at most",
            f"{row['kilobytes']:.1f} kB",
            f"{row['looker_requests']:,}",
            f"{row['looker_kilobytes']:,.0f} kB",
            f"{row['total_megabytes']:.1f} MB",
            f"{row['timeout_requests']}",
            f"{row['timeout_kilobytes']:.1f} kB",
        ]
        for row in results_of("stall_traffic")["worlds"]
    ]
    head = [
        "ranks",
        "requests of a rank",
        "bytes of a rank",
        "requests of a rank that looks",
        "bytes of it",
        "bytes of all ranks",
        "requests of a call that times out",
        "bytes of it",
    ]
    return table(head, rows)


_PURPOSES = ("job", "registration", "questions", "diagnosis")


def _jobs() -> list[tuple[str, int, dict[str, Any]]]:
    """Return the jobs of benchmarks/job_traffic.py: kind, ranks, phases."""
    results = results_of("job_traffic")
    return [
        ("real", results["ranks"], results["real"]),
        ("simulated", results["simulated_ranks"], results["simulated"]),
    ]


_PHASES = {
    "start": "start",
    "idle": "idle, a second",
    "barriers": "a barrier",
    "stalled barrier": "a stalled barrier",
    "hang": "a hang",
}


def job_requests() -> str:
    """Return the requests to a store, by phase of a job and purpose."""
    rows = []
    for phase, title in _PHASES.items():
        for kind, ranks, phases in _jobs():
            row, requests = phases[phase], phases[phase]["requests"]
            times = {"idle": row["seconds"]}.get(phase, row["barriers"] or 1)
            purposes = requests["purposes"]
            rows.append(
                [
                    title,
                    f"{ranks:,} {kind}",
                    *(f"{purposes.get(one, 0) / times:,.0f}" for one in _PURPOSES),
                    f"{requests['requests'] / times / ranks:,.2f}",
                    # The relay measures no simulated seconds.
                    f"{requests['most_a_second']:,}" if kind == "real" else "-",
                    f"{requests['bytes'] / times / 1e6:,.2f} MB",
                ]
            )
    head = [
        "phase",
        "ranks",
        "torch's and barriers' keys",
        "registration",
        "questions",
        "diagnosis",
        "all, a rank",
        "all, in the busiest second",
        "bytes",
    ]
    return table(head, rows)


def job_lines() -> str:
    """Return the log lines, by phase of a job."""
    rows = []
    for phase in _PHASES:
        for kind, ranks, phases in _jobs():
            log = phases[phase]["log"]
            events = ", ".join(f"{n:,} `{event}`" for event, n in log["events"].items())
            rows.append(
                [
                    phase,
                    f"{ranks:,} {kind}",
                    f"{log['seconds']:,.0f} s" if log["lines_a_minute"] else "-",
                    events or "none",
                    # A phase of less than a second has no minutes.
                    ", ".join(
                        f"{number:,}"
                        for number in log["lines_a_minute"] or [log["lines"]]
                    ),
                    f"{max(log['bytes_a_minute'] or [log['bytes']]) / 1e3:,.1f} kB",
                    f"{log['ranks']:,}",
                    f"{log['longest_line']:,}",
                ]
            )
    head = [
        "phase",
        "ranks",
        "duration",
        "lines",
        "lines a minute",
        "bytes in the busiest minute",
        "ranks that write",
        "bytes of the longest line",
    ]
    return table(head, rows)


def store_capacity() -> str:
    """Return the requests that a TCPStore answers, and what a large job takes of it."""
    results = results_of("job_traffic")
    rows = [
        [
            one["backend"],
            str(one["clients"]),
            code(one["call"]),
            f"{one['requests_a_second']:,.0f}",
        ]
        for one in results["capacity"]
    ]
    rates = table(["backend", "clients", "call", "requests a second"], rows)
    slowest = min(
        one["requests_a_second"]
        for one in results["capacity"]
        if one["backend"] == "libuv" and one["clients"] > 1
    )
    simulated, ranks = results["simulated"], results["simulated_ranks"]

    def seconds(phase: str) -> str:
        requests = simulated[phase]["requests"]["requests"]
        return f"{requests / slowest:,.1f} s"

    idle = simulated["idle"]
    share = idle["requests"]["requests"] / idle["seconds"] / slowest
    return (
        f"{rates}\n\nComputed for {ranks:,} ranks with the smallest number of the libuv"
        f" backend with several clients, {slowest:,.0f} requests a second:"
        f" registration takes a server {seconds('start')}, a barrier"
        f" {seconds('barriers')}, a barrier that times out"
        f" {seconds('stalled barrier')}, all requests of the hang"
        f" {seconds('hang')}; questions take {share:.1%} of it while the job runs."
    )


# Defaults of Loki's documentation.
_LOKI_RATE, _LOKI_BURST = 4e6, 6e6


def loki() -> str:
    """Return Loki's limits, and what a large job needs of them."""
    results = results_of("job_traffic")
    (_, _, real), (_, ranks, simulated) = _jobs()
    logs = [row["log"] for job in (real, simulated) for row in job.values()]
    longest = max(log["longest_line"] for log in logs)
    hung = max(simulated["hang"]["log"]["bytes_a_minute"])
    burst = real["stalled barrier"]["log"]["bytes"] / (results["ranks"] - 1) * ranks
    seconds = max(0.0, burst - _LOKI_BURST) / _LOKI_RATE
    hang = f"{hung / 1e3:,.1f} kB in the busiest minute of a hung job (simulated)"
    timeout = (
        f"{burst / 1e6:,.0f} MB at once if a barrier of {ranks:,} ranks times out"
        f" (computed: the bytes of one of {results['ranks']} real ranks, times"
        f" {ranks:,})"
    )
    rows = [
        [code("ingestion_rate_mb"), "4 MB/s", hang],
        [code("ingestion_burst_size_mb"), "6 MB", timeout],
        [
            code("per_stream_rate_limit", "per_stream_rate_limit_burst"),
            "3 MB/s, 15 MB",
            "the same, if all ranks are one stream",
        ],
        [
            code("max_global_streams_per_user"),
            "5,000",
            f"{ranks:,} streams if the rank, the pid or the file is a label, else one",
        ],
        [code("max_line_size"), "256 kB", f"{longest / 1e3:,.1f} kB, the longest line"],
    ]
    return (
        f"{table(['setting', 'default', 'needed'], rows)}\n\n"
        "One Loki with these defaults carries the hung jobs of a cluster. A barrier of"
        f" {ranks:,} ranks that times out is more than a burst: Loki answers 429, and"
        f" a sender that tries again needs {seconds:,.0f} s at that rate (computed)."
    )
