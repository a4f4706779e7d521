"""The two engines that make inputs: Hypothesis and atheris.

Each draws the same inputs again from the same seed. Hypothesis makes structured inputs
and shrinks one that fails. atheris changes inputs so that they reach more code.
"""

import hashlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.target import Target
from fuzz.trial import FoundFailure, Trial

# Hypothesis keeps all inputs of a batch in memory. Small batches, because that must not
# count as growth.
_BATCH = 500
# The first inputs of atheris.
_CORPUS = 100
_MAX_LENGTH = 8192

# Ends the process, with the input and the traceback of a failure.
Fail = Callable[[bytes, str], NoReturn]


def draw(
    target: Target, count: int, first_seed: int, use: Callable[[bytes], None]
) -> None:
    """Draw inputs from the target's strategy; shrink one for which `use` raises."""
    for batch, start in enumerate(range(0, count, _BATCH)):

        @seed(first_seed * 1_000_003 + batch)
        @settings(
            max_examples=min(_BATCH, count - start),
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @given(target.inputs)
        def use_batch(data: bytes) -> None:
            use(data)

        use_batch()


def run_hypothesis(
    target: Target, count: int, first_seed: int, trial: Trial, fail: Fail
) -> None:
    """Try structured inputs, and shrink one that fails."""
    failing, reason = b"", ""

    def try_input(data: bytes) -> None:
        nonlocal failing, reason
        try:
            trial(data)
        except FoundFailure:  # shrinking a slow input takes hours
            fail(data, traceback.format_exc())
        except Exception:
            failing, reason = data, traceback.format_exc()
            raise

    try:
        # A strategy with few values ends early, so the next seed follows.
        while trial.counts.inputs < count:
            draw(target, count - trial.counts.inputs, first_seed, try_input)
            first_seed += 1
    except Exception:
        fail(failing, reason or traceback.format_exc())


def run_atheris(
    target: Target, count: int, first_seed: int, trial: Trial, fail: Fail, folder: Path
) -> None:
    """Try inputs that atheris makes, and end the process.

    The modules of the target must have been imported with its instrumentation.
    """
    import atheris

    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)

    def add(data: bytes) -> None:
        name = hashlib.sha256(data).hexdigest()[:16]
        (corpus / name).write_bytes(data)

    draw(target, _CORPUS, first_seed, add)

    def try_input(data: bytes) -> None:
        try:
            trial(data)
        except Exception:
            fail(trial.input, traceback.format_exc())

    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-seed={first_seed}",
            f"-runs={count}",
            f"-max_len={_MAX_LENGTH}",
            f"-artifact_prefix={folder}/",
            # The monitor has these bounds.
            "-timeout=1000000",
            "-rss_limit_mb=0",
        ],
        try_input,
    )
    atheris.Fuzz()
