"""Builds the native base against the installed torch, with one compiler command.

There is no lock: a build is made in a folder of its own, tested in a child process and
then renamed to its place. Two builders at once do the work twice, and nothing else.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from tracedstore.common.errors import CommandError
from tracedstore.native.load import (
    DIRECTORY_VARIABLE,
    SOURCE,
    NativeUnavailable,
    RefusedError,
    build_key,
    check_folders,
    digest_file,
    file_in,
    seal,
    user_directory,
)

_COMPILERS: Final = ("g++", "c++", "clang++")
# Seconds. A build takes half a minute of an idle core.
_COMPILE_TIMEOUT, _TEST_TIMEOUT = 3600.0, 600.0

_HEADER: Final = Path("torch/csrc/distributed/c10d/Store.hpp")
# The virtuals that every supported torch has, and the others. The base class would
# answer one that is not here, instead of the inner store.
_KEY, _KEYS = "const std::string&", "const std::vector<std::string>&"
_VALUE = "const std::vector<uint8_t>&"
_TIMEOUT = "const std::chrono::milliseconds&"
KNOWN_VIRTUALS: Final = frozenset(
    {
        "clone()",
        f"set({_KEY},{_VALUE})",
        f"compareSet({_KEY},{_VALUE},{_VALUE})",
        f"get({_KEY})",
        f"add({_KEY},int64_t)",
        f"deleteKey({_KEY})",
        f"check({_KEYS})",
        "getNumKeys()",
        f"wait({_KEYS})",
        f"wait({_KEYS},{_TIMEOUT})",
        "getTimeout()",
        f"setTimeout({_TIMEOUT})",
        f"append({_KEY},{_VALUE})",
        f"multiGet({_KEYS})",
        f"multiSet({_KEYS},const std::vector<std::vector<uint8_t>>&)",
        "hasExtendedApi()",
    }
)
_OPTIONAL: Final = {
    f"watchKey({_KEY},WatchKeyCallback)": "watchKey",
    f"queuePush({_KEY},{_VALUE})": "queuePush",
    f"queuePop({_KEY},bool)": "queuePop",
    f"queueLen({_KEY})": "queueLen",
    "listKeys()": "listKeys",
    f"barrier({_KEY},int64_t,{_TIMEOUT})": "barrier",
}
# They came together, and the source has them together.
_QUEUE: Final = frozenset({"queuePush", "queuePop", "queueLen"})

_TEST: Final = """
from torch.distributed import HashStore, PrefixStore
from tracedstore import TracedStore, wrap
store = wrap(HashStore())
assert type(store) is not TracedStore and isinstance(store, TracedStore)
store.set("key", "value")
assert store.get("key") == b"value"
above = PrefixStore("prefix", store)
above.set("key", "other")
assert above.get("key") == b"other"
if hasattr(store, "queue_push"):
    above.queue_push("queue", "value")
    assert above.queue_pop("queue") == b"value"
if hasattr(store, "clone"):
    assert isinstance(wrap(PrefixStore("other", HashStore())).clone(), TracedStore)
try:
    store.wait(["missing"], __import__("datetime").timedelta(milliseconds=1))
except Exception as error:
    assert "timeout" in str(error).lower(), error
else:
    raise AssertionError("a wait without end has ended")
"""


def build(directory: Path | None, progress: Callable[[str], None]) -> Path:
    """Build, test and install the native base; return its file.

    Args:
        directory: Where to install it; the user's cache if it is None.
        progress: Gets one line before each long step.

    Raises:
        CommandError: It cannot be built here; the text is one sentence.
    """
    features = _features((_include() / _HEADER).read_text("utf-8"))
    compiler = _compiler()[0]
    try:
        place = file_in((directory or user_directory()).absolute())
        place.parent.parent.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(mode=0o755, exist_ok=True)
        # Before the work: a build there would not be used.
        check_folders(place)
        folder = tempfile.mkdtemp(prefix="building-", dir=place.parent.parent)
    except RefusedError as error:
        raise CommandError(str(error)) from error
    except NativeUnavailable as error:
        raise CommandError(f"{error}; name a directory with --dir") from error
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be written: {error.strerror}; name another"
            " directory with --dir"
        ) from error
    try:
        made = file_in(Path(folder))
        made.parent.mkdir(mode=0o755)
        progress(
            f"compiling for torch {torch.__version__} with {compiler}; this takes"
            " half a minute of an idle core"
        )
        compile_extension(
            SOURCE,
            made,
            f'-DTRACEDSTORE_KEY="{build_key()}"',
            *(f"-DHAS_{name}" for name in sorted(features)),
        )
        seal(made)
        progress("testing the build in a process of its own")
        _test(Path(folder))
        made.replace(place)
        digest_file(made).replace(digest_file(place))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return place


def virtuals(header: str) -> list[str]:
    """Return the virtual methods of torch's Store, as name and types of parameters."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    body = text.partition("class TORCH_API Store")[2].partition("\n};")[0]
    found = re.findall(r"\bvirtual\b[^;{]*?(~?\w+)\s*\(([^)]*)\)", body)
    return [f"{name}({_types(parameters)})" for name, parameters in found]


def _types(parameters: str) -> str:
    # The name of a parameter follows its type.
    return ",".join(
        re.sub(r"(?<=[&*> ])\w+$", "", parameter.strip()).strip()
        for parameter in " ".join(parameters.split()).split(",")
    )


def _features(header: str) -> set[str]:
    """Return the optional virtuals that this torch has.

    Raises:
        CommandError: The header has others than the source knows.
    """
    found = virtuals(header)
    unknown = [each for each in found if each not in KNOWN_VIRTUALS | _OPTIONAL.keys()]
    missing = KNOWN_VIRTUALS.difference(found)
    features = {_OPTIONAL[each] for each in found if each in _OPTIONAL}
    if not unknown and not missing and len(features & _QUEUE) in (0, len(_QUEUE)):
        return features
    example = (unknown or sorted(missing) or ["a queue"])[0]
    raise CommandError(
        f"the Store of torch {torch.__version__} is not the one that this version of"
        f" tracedstore knows ({example}); its calls are recorded by the Python base"
    )


def _include() -> Path:
    return Path(torch.__file__).parent / "include"


def _compiler() -> list[str]:
    """Return the command of the compiler.

    Raises:
        CommandError: Something that compiling needs is not installed.
    """
    if sys.platform != "linux":
        raise CommandError(f"the native base is for Linux, and not for {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CommandError("the native base needs a Python with the GIL")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise CommandError(
            f"{headers} has no Python.h; install the headers of Python (python3-dev)"
        )
    given = shlex.split(os.environ.get("CXX", ""))
    for name in [given[0]] if given else _COMPILERS:
        if path := shutil.which(name):
            return [path, *given[1:]]
    wanted = f"CXX is {given[0]!r}, which" if given else "a C++ compiler (g++)"
    raise CommandError(f"{wanted} is not installed; calls are recorded by Python")


def _pybind_abi() -> list[str]:
    """Return the options by which pybind11 takes this build for one of torch's.

    Older ones compare the ABI numbers of the compilers, too, and do not know torch's
    classes in a build by another g++. The ABIs themselves are compatible.
    """
    parts = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    values = {part: getattr(torch._C, f"_PYBIND11_{part}", "") for part in parts}  # noqa: SLF001
    return [f'-DPYBIND11_{part}="{value}"' for part, value in values.items() if value]


def compile_extension(source: Path, result: Path, *options: str) -> None:
    """Compile one C++ source against the installed torch.

    Raises:
        CommandError: That failed; the text is one sentence.
    """
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *_compiler(),
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",  # noqa: SLF001
        *_pybind_abi(),
        *options,
        # torch's own copy of pybind11: another one would not know torch's classes.
        *("-isystem", str(_include()), "-isystem", sysconfig.get_path("include")),
        # Libraries after what needs them: some linkers drop them otherwise.
        str(source),
        f"-L{libraries}",
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
        *("-o", str(result)),
    ]
    done = _run(command, _COMPILE_TIMEOUT, dict(os.environ))
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        reason = (errors or done.stderr.splitlines() or ["it said nothing"])[0]
        raise CommandError(f"{command[0]} failed: {reason}")


def _test(directory: Path) -> None:
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TRACEDSTORE_")
        },
        DIRECTORY_VARIABLE: str(directory),
        "TRACEDSTORE_CORE": "native",
    }
    done = _run([sys.executable, "-c", _TEST], _TEST_TIMEOUT, environment)
    if done.returncode != 0:
        last = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CommandError(f"the build does not work and was not installed: {last}")


def _run(
    command: list[str], timeout: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - a compiler, and this Python
            command,
            capture_output=True,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"{command[0]} did not end within {timeout:g} s; nothing was installed"
        ) from None
