"""Which endpoints get the bearer token."""

import argparse
from urllib.parse import urlsplit

import pytest

from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.cli.options import add_token_arguments, token_policy

NODE7 = "http://node7:27400/metrics"
LOCAL = "http://127.0.0.1:27400/metrics"


@pytest.mark.parametrize(
    ("url", "hosts", "insecure", "options"),
    [
        ("https://node7:27400/metrics", [], False, None),
        (NODE7, [], False, "--token-host node7 --insecure-token"),
        (NODE7, ["node7"], False, "--insecure-token"),
        (NODE7, [], True, "--token-host node7"),
        (NODE7, ["node1"], True, "--token-host node7"),
        (NODE7, ["NODE7."], True, None),
        (LOCAL, [], False, "--token-host 127.0.0.1"),
        (LOCAL, [], True, "--token-host 127.0.0.1"),
        (LOCAL, ["127.0.0.1"], False, None),
        (LOCAL, ["localhost"], False, None),
        ("http://[::1]:27400/metrics", ["localhost"], False, None),
        (
            "http://localhost.evil:1/",
            ["localhost"],
            True,
            "--token-host localhost.evil",
        ),
        (
            "http://127.0.0.1.evil:1/",
            ["127.0.0.1"],
            True,
            "--token-host 127.0.0.1.evil",
        ),
        ("http://node7@evil:1/", ["node7"], True, "--token-host evil"),
    ],
)
def test_refusal(
    url: str, hosts: list[str], insecure: bool, options: str | None
) -> None:
    """TLS qualifies; plain HTTP needs a named host, and consent beyond loopback."""
    parts = urlsplit(url)
    policy = TokenPolicy(token="secret", hosts=hosts, insecure=insecure)

    if options is None:
        assert policy.refusal(parts) is None
        assert policy.headers(parts) == {"Authorization": "Bearer secret"}
    else:
        assert policy.headers(parts) == {}
        assert policy.refusal(parts) == (
            f"token not sent to http://{parts.netloc} (not TLS): use {options}"
        )


def test_no_token() -> None:
    """Without a token there is nothing to send and nothing to refuse."""
    policy = TokenPolicy()
    assert policy.headers(urlsplit(LOCAL)) == {}
    assert policy.refusal(urlsplit(NODE7)) is None


def test_token_is_not_shown() -> None:
    """The text of a policy, as in a traceback, does not contain the token."""
    assert "secret" not in repr(TokenPolicy(token="secret"))


def policy_of(*arguments: str, store_host: str = "node1") -> TokenPolicy:
    """Return the policy of a command line."""
    parser = argparse.ArgumentParser()
    add_token_arguments(parser)
    return token_policy(parser.parse_args(arguments), store_host)


class TestOptions:
    """The options of a command."""

    def test_named_hosts(self) -> None:
        """The host of the store is named, and those of --token-host."""
        policy = policy_of("--token", "t", "--token-host", "a", "--token-host", "b")
        assert policy.hosts == ("node1", "a", "b")
        assert policy_of(store_host="").hosts == ()

    def test_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The variable is the default; an empty one is no token."""
        monkeypatch.setenv("TRACEDSTORE_HTTP_TOKEN", "from-environment")
        assert policy_of().token == "from-environment"
        monkeypatch.setenv("TRACEDSTORE_HTTP_TOKEN", "")
        assert policy_of().token is None

    @pytest.mark.parametrize(
        ("token", "variable"),
        [
            *((token, False) for token in ("a b", "a\r\nHost: evil", "a\x00", "ä", "")),
            *((token, True) for token in ("a b", "a\r\nHost: evil", "a\x7f", "ä", " ")),
        ],
    )
    def test_invalid_token(
        self,
        token: str,
        variable: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """White space and control characters are refused, and not shown."""
        if variable:
            monkeypatch.setenv("TRACEDSTORE_HTTP_TOKEN", token)
        with pytest.raises(SystemExit):
            policy_of(*([] if variable else ["--token", token]))

        error = capsys.readouterr().err.splitlines()[-1]
        assert "argument --token: the token here or in TRACEDSTORE_HTTP_TOKEN" in error
        assert "evil" not in error
