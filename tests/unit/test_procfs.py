"""Tests of common.procfs, with real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from integration.harness import pause, wait_until
from tracedstore.common import procfs


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits until it is killed."""
    process = subprocess.Popen(["/bin/sleep", "100"])
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str | None:
    """Return the state of a process of this namespace that is certain."""
    return procfs.process_state(pid, procfs.start_ticks(pid), procfs.own_namespace())


class TestProcessState:
    """process_state()."""

    def test_running(self, child: "subprocess.Popen[bytes]") -> None:
        """A sleeping process is running."""
        assert state_of(child.pid) == "running"

    def test_stopped(self, child: "subprocess.Popen[bytes]") -> None:
        """A process after SIGSTOP is stopped."""
        pause(child.pid)

        assert state_of(child.pid) == "stopped"

    def test_zombie_is_gone(self, child: "subprocess.Popen[bytes]") -> None:
        """A killed process is gone before its parent has waited for it."""
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: procfs.read_stat(child.pid).letter == "Z")  # type: ignore[union-attr]  # it is there until it is waited for

        assert state_of(child.pid) == "gone"
        code = procfs.zombie_exit(child.pid)
        assert code == -signal.SIGKILL
        assert procfs.describe_exit(code) == "killed by SIGKILL"

    def test_exit_code_of_zombie(self) -> None:
        """The exit code of a process that is not waited for is known."""
        with subprocess.Popen([sys.executable, "-c", "exit(7)"]) as process:
            wait_until(lambda: procfs.read_stat(process.pid).letter == "Z")  # type: ignore[union-attr]  # see above

            assert procfs.zombie_exit(process.pid) == 7
            assert procfs.describe_exit(7) == "exited with code 7"

    def test_absent_is_gone(self, child: "subprocess.Popen[bytes]") -> None:
        """A process that its parent has waited for is gone."""
        ticks = procfs.start_ticks(child.pid)
        child.kill()
        child.wait()

        namespace = procfs.own_namespace()
        assert procfs.process_state(child.pid, ticks, namespace) == "gone"

    def test_other_start_time_is_gone(self) -> None:
        """The pid of this process with another start time is another process."""
        namespace = procfs.own_namespace()

        assert procfs.process_state(os.getpid(), 1, namespace) == "gone"

    @pytest.mark.parametrize("namespace", [None, "boot-id/pid:[1]"])
    def test_other_namespace_is_unknown(self, namespace: str | None) -> None:
        """Nothing is known about a pid of another host or pid namespace."""
        ticks = procfs.own_start_ticks()

        assert procfs.process_state(os.getpid(), ticks, namespace) is None

    def test_without_start_time_is_unknown(self) -> None:
        """An entry without a start time cannot be told from a later process."""
        namespace = procfs.own_namespace()

        assert procfs.process_state(os.getpid(), None, namespace) is None

    def test_process_of_other_user_is_not_gone(self) -> None:
        """Process 1 exists, whether /proc shows it or not."""
        assert not procfs.is_absent(1)


class TestCommand:
    """read_command()."""

    def test_program_of_many_lines(self) -> None:
        """Its line breaks and escape sequences reach no log."""
        script = "import time\n# \x1b[31m\ttext\ntime.sleep(100)"
        with subprocess.Popen([sys.executable, "-c", script]) as process:

            def started() -> bool:
                # Before the exec it is a copy of this process.
                return "sleep" in procfs.read_command(process.pid)

            try:
                wait_until(started)
                words = procfs.read_command(process.pid)
            finally:
                process.kill()

        assert words.isprintable()
        assert words.endswith(
            "-c import time # \N{REPLACEMENT CHARACTER}[31m text time.sleep(100)"
        )


class TestNamespaces:
    """Processes in a pid namespace of their own."""

    @pytest.mark.parametrize("option", ["--mount-proc", "--kill-child"])
    def test_pids_of_new_namespace(self, option: str) -> None:
        """A process in a new pid namespace takes no outer process for its own.

        With a /proc of its own its namespace has another name. With the outer /proc
        the pids do not agree, and its namespace is unknown.
        """
        script = (
            "from tracedstore.common import procfs\n"
            f"ns = {procfs.own_namespace()!r}\n"
            f"ticks = {procfs.own_start_ticks()}\n"
            f"print(procfs.own_namespace() == ns,"
            f" procfs.process_state({os.getpid()}, ticks, ns))\n"
        )
        unshare = ["unshare", "--pid", "--fork", option]

        done = subprocess.run(
            [*unshare, sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        if "Operation not permitted" in done.stderr:
            pytest.skip("creating a pid namespace needs root")
        assert done.stdout == "False None\n", done.stderr

    def test_other_host_name_in_same_namespace(self) -> None:
        """Containers with other host names but the same pids are one namespace."""
        script = (
            "import socket\n"
            "from tracedstore.common import procfs\n"
            "socket.sethostname('elsewhere')\n"
            f"print(procfs.own_namespace() == {procfs.own_namespace()!r})\n"
        )

        done = subprocess.run(
            ["unshare", "--uts", sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        if "Operation not permitted" in done.stderr:
            pytest.skip("creating a UTS namespace needs root")
        assert done.stdout == "True\n", done.stderr


class TestReaders:
    """What else is read from /proc."""

    def test_ancestors(self, child: "subprocess.Popen[bytes]") -> None:
        """The parents of a process end with process 1."""
        found = procfs.ancestors(child.pid)

        assert found[0] == os.getpid()
        assert found[-1] == 1 or len(found) == 32

    def test_environ(self) -> None:
        """The variables that a process was started with."""
        environ = {"RANK": "3", "EMPTY": "", "EQUALS": "a=b"}
        with subprocess.Popen(["/bin/sleep", "100"], env=environ) as process:
            try:
                wait_until(lambda: procfs.read_environ(process.pid) == environ)
            finally:
                process.kill()

    def test_no_process(self) -> None:
        """A pid that no process has is no error."""
        assert procfs.read_environ(2**31 - 1) == {}
        assert procfs.read_stat(2**31 - 1) is None
        assert procfs.ancestors(2**31 - 1) == []
