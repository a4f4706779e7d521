"""Fuzzes one target with one engine: ``python -m fuzz.worker``.

`fuzz.monitor` starts it, because a hostile input may end the process.
"""

import argparse
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fuzz.target import Target

ENGINES = ("hypothesis", "atheris")
TABLE = "fuzz.table"
FAILED = 77
FAILING_INPUT = "failing-input"
FAILURE = "failure.txt"
PROGRESS = "progress"


def main() -> None:
    """Run, and write the input and the traceback of a failure into the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", default=TABLE)
    parser.add_argument("--target", required=True)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    table = _import(arguments.table, instrumented=arguments.engine == "atheris")
    target: Target = table.TARGETS[arguments.target]

    # After the instrumentation.
    from fuzz import engines
    from fuzz.progress import Progress
    from fuzz.trial import Trial

    def fail(data: bytes, reason: str) -> NoReturn:
        (folder / FAILING_INPUT).write_bytes(data)
        (folder / FAILURE).write_text(reason)
        # Without the exit handlers of torch, of atheris and of the package.
        os._exit(FAILED)

    trial = Trial(target, arguments.inputs, Progress(folder / PROGRESS))
    run = target, arguments.inputs, arguments.seed, trial, fail
    if arguments.engine == "atheris":
        engines.run_atheris(*run, folder)
    else:
        engines.run_hypothesis(*run)


def _import(module: str, *, instrumented: bool) -> Any:
    if not instrumented:
        return importlib.import_module(module)
    import atheris

    with atheris.instrument_imports(include=["tracedstore"]):
        return importlib.import_module(module)


if __name__ == "__main__":
    main()
