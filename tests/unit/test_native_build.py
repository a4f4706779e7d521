"""The builder and the loader of the native base: refusals, and what must match."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import tracedstore
from support.fork_server import run_python
from tracedstore.common.errors import CommandError
from tracedstore.native import build, load

HEADER = Path(torch.__file__).parent / "include" / build._HEADER


class TestVirtuals:
    """The virtual methods in torch's header are compared with the known ones."""

    def test_of_this_torch_are_known(self) -> None:
        """The installed torch's Store can be built against."""
        found = build.virtuals(HEADER.read_text("utf-8"))

        assert set(found) >= build.KNOWN_VIRTUALS
        assert "compareSet" not in build._features(HEADER.read_text("utf-8"))

    @pytest.mark.parametrize(
        ("before", "after", "named"),
        [
            # A new method, a new overload, and one that is gone.
            (
                "virtual bool deleteKey(",
                (
                    "virtual void renameKey(const std::string& from, int64_t to);\n"
                    "virtual bool deleteKey("
                ),
                r"renameKey\(const std::string&,int64_t\)",
            ),
            (
                "virtual bool deleteKey(",
                (
                    "virtual bool deleteKey(const std::string& key, bool all) = 0;\n"
                    "virtual bool deleteKey("
                ),
                r"deleteKey\(const std::string&,bool\)",
            ),
            ("virtual int64_t getNumKeys()", "int64_t getNumKeys()", "getNumKeys"),
        ],
    )
    def test_others_are_refused(self, before: str, after: str, named: str) -> None:
        """The refusal names the method."""
        header = HEADER.read_text("utf-8")
        assert before in header

        with pytest.raises(CommandError, match=named):
            build._features(header.replace(before, after))

    def test_comments_are_no_methods(self) -> None:
        """A commented method does not count."""
        header = HEADER.read_text("utf-8").replace(
            "virtual bool deleteKey(",
            "// virtual void old();\n/* virtual void older(); */\n"
            "virtual bool deleteKey(",
        )

        assert build.virtuals(header) == build.virtuals(HEADER.read_text("utf-8"))


class TestRefusals:
    """One sentence says what is missing."""

    def test_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """No compiler is on the path."""
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))

        with pytest.raises(CommandError, match=r"a C\+\+ compiler .* not installed"):
            build.build(tmp_path, print)

    def test_given_compiler(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """CXX is one that does not exist."""
        monkeypatch.setenv("CXX", "no-such-compiler -O0")

        with pytest.raises(CommandError, match="CXX is 'no-such-compiler'"):
            build.build(tmp_path, print)

    def test_directory(self, tmp_path: Path) -> None:
        """The directory cannot be created."""
        file = tmp_path / "file"
        file.touch()

        with pytest.raises(CommandError, match=r"cannot be written: .*--dir"):
            build.build(file, print)

    def test_compiler_that_fails(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Its first error is in the sentence, and nothing stays behind."""
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no' >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        directory = tmp_path / "builds"

        with pytest.raises(CommandError, match=r"failed: x\.cpp:1: error: no"):
            build.build(directory, lambda _line: None)

        assert [path for path in directory.rglob("*") if path.is_file()] == []

    # The child process imports torch, which takes long on a busy machine.
    def test_build_that_does_not_work(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A result that cannot be loaded is not installed."""
        compiler = tmp_path / "compiler"
        # The last argument but those of the libraries is the result.
        compiler.write_text(
            '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho no > "$2"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        directory = tmp_path / "builds"

        with pytest.raises(CommandError, match="was not installed"):
            build.build(directory, lambda _line: None)

        assert not load.file_in(directory).exists()


WRAP = """
import pathlib, sys
from torch.distributed import HashStore
import tracedstore
from tracedstore.native import load
load.PACKAGE_DIRECTORY = pathlib.Path(sys.argv[1])
try:
    for _ in range(2):
        store = tracedstore.wrap(HashStore())
        print("python" if type(store) is tracedstore.TracedStore else "native")
except tracedstore.ConfigurationError as error:
    print(error)
"""


class TestFallBack:
    """A process without a build that can be used."""

    @pytest.mark.parametrize(
        ("core", "broken", "expected"),
        [
            ("auto", False, "python\npython\n"),
            ("auto", True, "python\npython\n"),
            ("native", False, "core is 'native', but no build for torch .*\n"),
            ("native", True, "core is 'native', but .* cannot be loaded: .*\n"),
        ],
    )
    def test_to_python(
        self, core: str, broken: bool, expected: str, tmp_path: Path
    ) -> None:
        """Stores are traced by Python; an error is only for those who ask for it."""
        if broken:
            file = load.file_in(tmp_path)
            file.parent.mkdir()
            file.write_text("no extension")
            load.seal(file)

        assert re.fullmatch(expected, run(WRAP, tmp_path, core))


def run(script: str, directory: Path, core: str) -> str:
    """Run a script in a process that finds builds in this directory only."""
    done = run_python(
        *("-c", script, directory),
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(tracedstore.__file__).parents[1]),
            "XDG_CACHE_HOME": str(directory / "cache"),
            "TRACEDSTORE_CORE": core,
        },
    )
    return done.stdout


# Puts another file in the place of the one that was checked, before it is loaded.
REPLACE = (
    """
from tracedstore.native import load
check = load.open_verified

def check_and_replace(file):
    descriptor = check(file)
    other = file.with_name("other")
    other.write_text("no extension")
    other.replace(file)
    return descriptor

load.open_verified = check_and_replace
"""
    + WRAP
)


class TestVerification:
    """A build that is damaged, or that another user may have written, is not loaded."""

    @pytest.fixture
    def build_in(self, tmp_path: Path) -> Path:
        """A copy of the build, in a directory of its own."""
        file = load.file_in(tmp_path)
        file.parent.mkdir(mode=0o755)
        shutil.copy(load.find(), file)
        load.seal(file)
        return file

    @staticmethod
    def refused(file: Path) -> str:
        """Return why a build is not loaded; it is one sentence."""
        with pytest.raises(load.NativeUnavailable) as raised:
            load.load_file(file)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def test_intact(self, build_in: Path) -> None:
        """A copy of file and digest is used."""
        assert run(WRAP, build_in.parent.parent, "native") == "native\nnative\n"

    @pytest.mark.parametrize("core", ["auto", "native"])
    @pytest.mark.parametrize("truncated", [True, False])
    def test_damaged(self, build_in: Path, core: str, truncated: bool) -> None:
        """A file that was copied in part, or has other bytes, ends no process."""
        content = build_in.read_bytes()
        half = len(content) // 2
        flipped = bytes(byte ^ 0xFF for byte in content[4096:])
        build_in.write_bytes(content[:half] if truncated else content[:4096] + flipped)

        printed = run(WRAP, build_in.parent.parent, core)

        reason = "SHA-256 is not the one that it was built with"
        if truncated:
            reason = f"it has {half} bytes, and had {len(content)} when it was built"
        if core == "auto":
            assert printed == "python\npython\n"
        else:
            assert f"core is 'native', but {build_in} is damaged: " in printed
            assert f"{reason}; run `tracedstore build-native` again\n" in printed

    def test_checked_file_is_loaded(self, build_in: Path) -> None:
        """What is put in its place after the check is not loaded."""
        printed = run(REPLACE, build_in.parent.parent, "native")

        assert printed == "native\nnative\n"
        assert build_in.read_text() == "no extension"

    def test_without_digest(self, build_in: Path) -> None:
        """A build of an earlier version is not used."""
        load.digest_file(build_in).unlink()

        reason = self.refused(build_in)

        assert reason.startswith(f"{build_in}.sha256 is missing")
        assert reason.endswith("run `tracedstore build-native` again")

    @pytest.mark.parametrize("content", [b"", b"0" * 64, b"x" * 1000, b"\xff 1\n"])
    def test_damaged_digest(self, build_in: Path, content: bytes) -> None:
        """The digest may be copied in part, too."""
        load.digest_file(build_in).write_bytes(content)

        assert f"{build_in}.sha256 is damaged" in self.refused(build_in)

    @pytest.mark.parametrize("digest", [False, True])
    @pytest.mark.parametrize("mode", [0o775, 0o757])
    def test_others_can_write(self, build_in: Path, digest: bool, mode: int) -> None:
        """Neither the file nor its digest may be writable by others."""
        file = load.digest_file(build_in) if digest else build_in
        file.chmod(mode)

        reason = self.refused(build_in)

        assert f"other users can write to {file}; run `chmod go-w " in reason

    @pytest.mark.parametrize("above", [False, True])
    def test_folder_of_everyone(self, build_in: Path, above: bool) -> None:
        """In a folder that every user can write to, the file can be replaced."""
        folder = build_in.parent.parent if above else build_in.parent
        folder.chmod(0o777)

        assert f"every user can write to {folder}; run `chmod o-w" in self.refused(
            build_in
        )

    @pytest.mark.parametrize("mode", [0o1777, 0o775])
    def test_folder_in_which_nobody_replaces(self, build_in: Path, mode: int) -> None:
        """In a sticky folder nobody can; members of a group own what they write."""
        build_in.parent.parent.chmod(mode)

        os.close(load.open_verified(build_in))

    @pytest.mark.parametrize("owned", ["directory", "folder", "file", "digest"])
    def test_other_owner(
        self, build_in: Path, owned: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What belongs to another user than this one and root is not used."""
        path = {
            "directory": build_in.parent.parent,
            "folder": build_in.parent,
            "file": build_in,
            "digest": load.digest_file(build_in),
        }[owned]
        inode = path.stat().st_ino
        fstat = os.fstat

        def of_another_user(descriptor: int) -> os.stat_result:
            found = fstat(descriptor)
            if found.st_ino != inode:
                return found
            return os.stat_result((*found[:4], 12345, *found[5:]))

        monkeypatch.setattr(os, "fstat", of_another_user)

        reason = self.refused(build_in)

        assert reason.startswith(f"{path} belongs to the user 12345, and not to this")
        assert "run `tracedstore build-native` as this user or root" in reason

    def test_pipe(self, build_in: Path) -> None:
        """A pipe is not waited for."""
        build_in.unlink()
        os.mkfifo(build_in)

        assert f"{build_in} is not a regular file" in self.refused(build_in)

    def test_seal_with_any_umask(self, tmp_path: Path) -> None:
        """Others cannot write to a new build."""
        file = load.file_in(tmp_path)
        file.parent.mkdir(mode=0o755)
        before = os.umask(0)
        try:
            file.write_text("content")
            load.seal(file)
        finally:
            os.umask(before)

        os.close(load.open_verified(file))

    def test_build_into_folder_of_everyone(self, tmp_path: Path) -> None:
        """It is refused before the work: nobody would use the build."""
        tmp_path.chmod(0o777)

        with pytest.raises(CommandError, match=r"every user can write to .*chmod o-w"):
            build.build(tmp_path, pytest.fail)


class TestFind:
    """Where a build is looked for."""

    def test_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The variable's directory is before the user's cache."""
        given, cache = tmp_path / "given", tmp_path / "cache"
        monkeypatch.setenv(load.DIRECTORY_VARIABLE, str(given))
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(load, "PACKAGE_DIRECTORY", tmp_path / "package")
        with pytest.raises(load.NativeUnavailable, match="build-native"):
            load.find()

        found = []
        for directory in (load.user_directory(), given):
            file = load.file_in(directory)
            file.parent.mkdir(parents=True)
            file.touch()
            found.append(load.find() == file)

        assert load.user_directory() == cache / "tracedstore" / "native"
        assert found == [True, True]

    def test_unreadable_directory(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A directory that cannot be looked into has no build."""
        built = load.find()
        unreadable = tmp_path / ("long" * 100)
        monkeypatch.setenv(load.DIRECTORY_VARIABLE, str(unreadable))

        with pytest.raises(OSError, match="too long"):
            load.file_in(unreadable).is_file()
        assert load.find() == built

    def test_exception_is_not_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each caller gets one of its own, whose traceback has no other caller."""
        monkeypatch.setattr(load, "_load_once", lambda: "there is none")
        raised = []
        for _ in range(2):
            with pytest.raises(load.NativeUnavailable, match="there is none") as error:
                load.load()
            raised.append(error.value)

        assert raised[0] is not raised[1]

    @pytest.mark.parametrize(
        ("local_rank", "said"), [(None, True), ("0", True), ("1", False)]
    )
    def test_says_what_to_build(
        self,
        local_rank: str | None,
        said: bool,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """One process of a node says at info that there is no build, and the remedy."""
        monkeypatch.setattr(load, "PACKAGE_DIRECTORY", tmp_path)
        monkeypatch.setenv(load.DIRECTORY_VARIABLE, str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.delitem(sys.modules, load._AGENT, raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)

        with caplog.at_level("INFO", "tracedstore"):
            reason = load._load_once.__wrapped__()

        told = [(one.levelname, one.getMessage()) for one in caplog.records]
        expected = f"the Python base records, which has limits: {reason}"
        assert told == ([("INFO", expected)] if said else [])
        assert "`tracedstore build-native`" in reason

    def test_other_file_is_not_loaded(self, tmp_path: Path) -> None:
        """A file that is no extension is refused with its name."""
        file = tmp_path / "tracedstore_native.so"
        file.write_text("no extension")
        load.seal(file)

        with pytest.raises(load.NativeUnavailable, match="cannot be loaded"):
            load.load_file(file)

    @pytest.mark.parametrize("core", ["auto", "python"])
    def test_description(
        self,
        core: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """One line has the base that records, and why not the other."""
        monkeypatch.setenv("TRACEDSTORE_CORE", core)
        built = load.describe()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(load, "PACKAGE_DIRECTORY", tmp_path)
        monkeypatch.delenv(load.DIRECTORY_VARIABLE, raising=False)

        selected = {"auto": "core: native, /", "python": "core: python, by TRACED"}
        assert built.startswith(selected[core])
        assert load.describe().startswith("core: python; native is not available: no")

    def test_key_has_versions(self) -> None:
        """A build for another torch is in another folder."""
        assert torch.__version__ in load.build_key()
        assert str(torch.version.git_version)[:12] in load.build_key()
