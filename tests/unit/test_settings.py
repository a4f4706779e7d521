"""Settings are read from keywords, then the environment, then defaults."""

from dataclasses import fields
from typing import Any

import pytest

import tracedstore
from tracedstore import ConfigurationError, Settings


class TestLoad:
    """Settings.load() parses and validates every setting."""

    def test_defaults(self) -> None:
        """The defaults are the documented ones."""
        settings = Settings.load({}, {})

        assert settings == Settings(
            disabled=False,
            spans="budget",
            span_rate=20.0,
            span_burst=200,
            slow_after=0.010,
            stall_after=30.0,
            contended_after=5,
            log_format="auto",
            tracing=False,
            http_port=None,
            http_host="127.0.0.1",
            http_token=None,
            http_basic_auth=None,
            http_cert=None,
            http_key=None,
            http_client_ca=None,
        )

    def test_keyword_wins_over_environment(self) -> None:
        """A keyword overrides the environment variable."""
        environ = {"TRACEDSTORE_SLOW_AFTER": "3", "TRACEDSTORE_SPANS": " ALL "}

        settings = Settings.load({"slow_after": 2}, environ)

        assert settings.slow_after == 2.0
        assert settings.spans == "all"

    @pytest.mark.parametrize(
        ("name", "value", "accepted"),
        [
            ("SPANS", "some", "one of budget, notable, all, off"),
            ("SPAN_RATE", "-1", "a number per second, 0 or more"),
            ("SPAN_BURST", "0", "a whole number, 1 or more"),
            ("SPAN_BURST", "1.5", "a whole number, 1 or more"),
            ("SLOW_AFTER", "10ms", "a number of seconds, 0 or more"),
            ("STALL_AFTER", "nan", "a number of seconds, 0 or more"),
            ("STALL_AFTER", "inf", "a number of seconds, 0 or more"),
            ("CONTENDED_AFTER", " ", "a whole number, 1 or more"),
            ("LOG_FORMAT", "xml", "one of auto, json, console, off"),
            ("DISABLED", "maybe", "true or false (also 1, yes, on; 0, no, off)"),
            ("TRACING", "2", "true or false (also 1, yes, on; 0, no, off)"),
            ("HTTP_PORT", "http", "a port number, 0 to 65535; 0 for any that is free"),
            ("HTTP_PORT", "65536", "a port number, 0 to 65535; 0 for any that is free"),
            ("HTTP_HOST", " ", "a text that is not empty"),
        ],
    )
    def test_bad_values(self, name: str, value: str, accepted: str) -> None:
        """The error has the variable, its value and the accepted values."""
        with pytest.raises(ConfigurationError) as raised:
            Settings.load({}, {f"TRACEDSTORE_{name}": value})

        expected = f"TRACEDSTORE_{name} is {value!r}; accepted is {accepted}"
        assert str(raised.value) == expected

    def test_empty_variables(self) -> None:
        """An empty variable is as if it were not set."""
        names = [f"TRACEDSTORE_{field.name.upper()}" for field in fields(Settings)]

        assert Settings.load({}, dict.fromkeys(names, "")) == Settings()

    @pytest.mark.parametrize("setting", [field.name for field in fields(Settings)])
    def test_configure_accepts_every_setting(self, setting: str) -> None:
        """configure() accepts each setting by name and rejects invalid values."""
        invalid: dict[str, Any] = {setting: object()}

        with pytest.raises(ConfigurationError, match=f"^{setting} is (<object|not)"):
            tracedstore.configure(**invalid)

    def test_abort_needs_stalls(self) -> None:
        """Without them nothing would ever be done, silently."""
        environ = {"TRACEDSTORE_ON_STALL": "abort", "TRACEDSTORE_STALL_AFTER": "0"}

        with pytest.raises(ConfigurationError) as raised:
            Settings.load({}, environ)

        assert str(raised.value) == (
            "on_stall is 'abort' and stall_after is 0, with which no stall is found;"
            " accepted is a stall_after of more than 0 seconds"
        )
        assert Settings.load({"on_stall": "observe"}, environ).stall_after == 0
        with pytest.raises(ConfigurationError, match="'kill'; accepted is one of"):
            Settings.load({"on_stall": "kill"}, {})

    def test_secrets_are_not_shown(self) -> None:
        """Neither an error nor the repr of settings has the value of a secret."""
        with pytest.raises(ConfigurationError) as raised:
            Settings.load({"http_basic_auth": "hunter2"}, {})
        settings = Settings(http_token="hunter2", http_basic_auth="user:hunter2")

        assert str(raised.value) == (
            "http_basic_auth is not shown here; accepted is user:password"
        )
        assert "hunter2" not in repr(settings)

    def test_wrap_rejects_invalid_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """wrap() raises ConfigurationError for an invalid variable."""
        from torch.distributed import HashStore

        monkeypatch.setenv("TRACEDSTORE_SPANS", "some")

        with pytest.raises(ConfigurationError, match="TRACEDSTORE_SPANS is 'some'"):
            tracedstore.wrap(HashStore())
