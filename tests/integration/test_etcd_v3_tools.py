"""The commands on an etcd with TLS, client certificates and users."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import etcd
import pytest
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

from support.certificates import Authority, Pair
from support.etcd_security import SECRET, Administrator, tls_server
from support.rendezvous import handler
from tracedstore.etcd import EtcdV3Store, Tls
from tracedstore.tools.cli.main import main

pytestmark = pytest.mark.etcd


class Secure:
    """A server that requires a client certificate and a user.

    Attributes:
        address: Its address.
        options: The options of a command that log in.
    """

    def __init__(
        self, administrator: Administrator, authority: Authority, client: Pair
    ) -> None:
        self.address = administrator.server.address
        self.password = authority.certificate.with_name("password")
        self.password.write_text(SECRET)
        self.files = {
            "ca_cert": str(authority.certificate),
            "ssl_cert": str(client.certificate),
            "ssl_cert_key": str(client.key),
        }
        self.named = authority.sign("named")
        self.options = {
            f"--etcd-{name.replace('_', '-')}": value
            for name, value in (self.files | self.log_in).items()
        }

    @property
    def log_in(self) -> dict[str, str]:
        """The user, as in --rdzv-conf."""
        return {"user": "worker", "password_file": str(self.password)}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """An etcd with TLS, client certificates and users, and a job on it."""
    folder = tmp_path_factory.mktemp("secure")
    authority = Authority(folder, "authority")
    client = authority.sign("client", common_name=False)
    with tls_server(
        folder / "etcd",
        authority.sign("server"),
        "--client-cert-auth",
        f"--trusted-ca-file={authority.certificate}",
        "--bcrypt-cost=4",
    ) as server:
        tls = Tls(
            ca_cert=authority.certificate, cert=client.certificate, key=client.key
        )
        transport = EtcdV3Store(server.address, "any", tls=tls).transport
        administrator = Administrator(
            server,
            lambda method, request: transport.call(
                method, request, time.monotonic() + 20, repeatable=True
            ),
        )
        secure = Secure(administrator, authority, client)
        config: dict[str, Any] = {**secure.files, **secure.log_in, "nodes": (1, 1)}
        node = handler("traced-etcd", server.address, "mine", **config)
        node.next_rendezvous()
        yield secure
        node.shutdown()


Run = Callable[..., str]


@pytest.fixture
def run(secure: Secure, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command, and returns what it prints."""

    def run(command: str, scheme: str = "etcds", **changed: str | None) -> str:
        options = secure.options | {
            f"--etcd-{name.replace('_', '-')}": value for name, value in changed.items()
        }
        given = [
            word for name, value in options.items() if value for word in (name, value)
        ]
        main([command, "--store", f"{scheme}://{secure.address}/mine", *given])
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err
        return printed.out + printed.err

    return run


class TestLogIn:
    """--etcd-ca-cert, --etcd-ssl-cert, --etcd-user and so on."""

    def test_status(self, run: Run) -> None:
        """The job is read with the options of --rdzv-conf."""
        assert "rendezvous mine: round 0, complete" in run("status")

    def test_variables(
        self, secure: Secure, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Variables of the same names serve all commands."""
        for name, value in (secure.files | secure.log_in).items():
            monkeypatch.setenv(f"TRACEDSTORE_ETCD_{name.upper()}", value)

        printed = run("sd", **dict.fromkeys(secure.files | secure.log_in))

        assert json.loads(printed.partition("\n")[0]) == []

    def test_common_name(self, secure: Secure, run: Run) -> None:
        """Etcd rejects such a certificate where it has users; the text says so."""
        pair = secure.named

        printed = run(
            "status", ssl_cert=str(pair.certificate), ssl_cert_key=str(pair.key)
        )

        assert "accepts no client certificate with a common name" in printed

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            ({"ca_cert": None}, "belongs into the ca_cert"),
            (
                {"ssl_cert": None, "ssl_cert_key": None},
                "requires a valid client certificate",
            ),
            ({"user": "other"}, "rejects the user or the password"),
            ({"user": None, "password_file": None}, "it needs a user with a role"),
        ],
    )
    def test_denied(self, run: Run, changed: dict[str, str | None], text: str) -> None:
        """The reason is in one sentence."""
        printed = run("stacks", **changed)

        assert text in printed
        assert printed.count("\n") == 1


def test_v2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Torch's EtcdStore is found over TLS as well."""
    authority = Authority(tmp_path, "authority")
    certificate = str(authority.certificate)
    pair = authority.sign("server")
    with tls_server(tmp_path / "etcd", pair, "--enable-v2") as server:
        client = etcd.Client(
            host="127.0.0.1", port=server.port, protocol="https", ca_cert=certificate
        )
        store: Any = EtcdStore(client, "/jobs/7")
        store.set("step/num_members", "1")

        main(
            [
                *("status", "--store", f"etcds://{server.address}/jobs/7"),
                *("--etcd-ca-cert", certificate),
            ]
        )

    assert "step: 1 arrived" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["etcd://h:1/job", "--etcd-ca-cert", "ca.pem"], "--etcd-ca-cert is for etcds"),
        (["tcp://h:1", "--etcd-user", "u"], "--etcd-user is for etcd:// and etcds://"),
        (["etcds://h:1/job", "--etcd-ca-cert", "none.pem"], "which cannot be read"),
        (["etcd://h:1/job", "--etcd-user", "u"], "only one is set"),
        (
            ["etcd://h:1/job", "--etcd-user", "u", "--etcd-password-file", "none"],
            "the password file 'none' cannot be used: No such file",
        ),
        (["etcd://u:hidden@h:1/job"], "use --etcd-user and --etcd-password-file"),
    ],
)
def test_options(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be used is refused in one sentence, before anything is connected."""
    code = main(["status", "--store", *options])

    printed = capsys.readouterr().err
    assert code != 0
    assert text in printed
    assert "hidden" not in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"a\nb\n", b"\xff", b"x" * 5000])
def test_password_file(content: bytes, tmp_path: Path) -> None:
    """A file that is no password is refused without its content."""
    from tracedstore.common.errors import ConfigurationError
    from tracedstore.export.settings import read_password

    path = tmp_path / "password"
    path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"password' cannot be used: it"):
        read_password(path)
