"""What counts as harm, in the classes of the fault suite that compare with bare."""

from typing import Any

from faults import endings, harm, pairs


def result(base: str, compared: str = "get", **findings: list[str]) -> dict[str, Any]:
    """Return the result of one case."""
    return {
        "class": "exits",
        "base": base,
        "row": compared,
        "compared": compared,
        "faults": 1,
        "findings": {column: findings.get(column, []) for column in endings.COLUMNS},
    }


def end(
    *codes: int | None, restarts: int = 1, hit: bool = True, seconds: float = 5.0
) -> pairs.End:
    """Return how a job ended."""
    return pairs.End(list(codes), restarts, hit, seconds, seconds + 10, 8.0, [])


JOB = pairs.Job(number=1, fault="kill worker", rank=2, step=3, shared=False)


class TestHarm:
    """A finding counts if the bare process has none of its kind."""

    def test_finding(self) -> None:
        """A traced process aborts, a bare one does not."""
        aborted = result("native", aborts=["exit status -6"])
        results = [result("bare"), result("python"), aborted]

        assert harm.harm_in(results) == [aborted]
        assert "| exits | get | native | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 0 |" in harm.table(
            results
        )

    def test_bare_has_it_too(self) -> None:
        """Both abort in one case, and only the traced process in another."""
        both = [result(base, aborts=["exit status -6"]) for base in ("bare", "native")]
        other = result("native", "wait", aborts=["exit status -6"])

        assert harm.harm_in([*both, result("bare", "wait"), other]) == [other]


class TestPairs:
    """Jobs are compared by their ends, beyond what bare ones do by chance."""

    def test_same_ends(self) -> None:
        """Which of the agents has which exit code does not matter."""
        judged = pairs.judge(JOB, {"bare": [end(0, 1)], "traced": [end(1, 0)]})

        assert not any(judged["findings"].values())
        assert not judged["unlike"]
        assert "| kill worker, new store | 1 | 0 | 0 | 0 | 5.0 s |" in pairs.table(
            [judged]
        )

    def test_chance(self) -> None:
        """One of the bare jobs ends as the traced one did."""
        ends = {"bare": [end(0, 0), end(1, 1)], "traced": [end(1, 1), end(0, 0)]}
        judged = pairs.judge(JOB, ends)

        assert judged["unlike"]
        assert not any(judged["findings"].values())

    def test_different_ends(self) -> None:
        """All traced jobs end in another way."""
        ends = {"bare": [end(0, 0)] * 3, "traced": [end(1, 1)] * 3}

        assert len(pairs.judge(JOB, ends)["findings"]["different ends"]) == 3

    def test_hang(self) -> None:
        """A traced job hangs, and no bare one."""
        ends = {"bare": [end(0, 0)] * 3, "traced": [end(0, None)] * 3}

        assert pairs.judge(JOB, ends)["findings"]["deadlocks"]

    def test_without_fault(self) -> None:
        """A job that ended before its fault has no time from the fault on."""
        ends = {"bare": [end(1, 1, hit=False), end(1, 1)], "traced": [end(1, 1)]}
        judged = pairs.judge(JOB, ends)

        assert judged["unlike"]
        assert "| kill worker, new store | 1 | 0 | 1 | 0 |  |" in pairs.table([judged])

    def test_seed(self) -> None:
        """A job depends on the seed and its number."""
        jobs = [pairs.make_job(1, number) for number in range(100)]

        assert jobs == [pairs.make_job(1, number) for number in range(100)]
        assert len({job.fault for job in jobs}) == 8
        assert {job.shared for job in jobs} == {True, False}
        assert {job.host for job in jobs if job.forked} == {0, 1}
        assert len([job for job in jobs if not job.forked]) == 13
