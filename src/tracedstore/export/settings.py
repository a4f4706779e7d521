"""The list of settings: keywords of ``configure()``, else environment variables.

A value that cannot be used raises an error with the setting, the value, and the values
that are accepted.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from tracedstore.common.errors import ConfigurationError
from tracedstore.common.validation import MAX_PORT

PREFIX: Final = "TRACEDSTORE_"
_MAX_PASSWORD_BYTES: Final = 4096


def _choice(*accepted: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = str(value).strip().lower()
        if text not in accepted:
            raise ValueError(f"one of {', '.join(accepted)}")
        return text

    return parse


def _seconds(value: Any) -> float:
    accepted = "a number of seconds, 0 or more"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(accepted) from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(accepted)
    return number


def _rate(value: Any) -> float:
    try:
        return _seconds(value)
    except ValueError:
        raise ValueError("a number per second, 0 or more") from None


def _count(minimum: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        accepted = f"a whole number, {minimum} or more"
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ValueError(accepted) from None
        if number < minimum:
            raise ValueError(accepted)
        return number

    return parse


def _port(value: Any) -> int:
    accepted = f"a port number, 0 to {MAX_PORT}; 0 for any that is free"
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ValueError(accepted) from None
    if not 0 <= number <= MAX_PORT:
        raise ValueError(accepted)
    return number


def _text(value: Any) -> str:
    text = str(value).strip() if isinstance(value, (str, os.PathLike)) else ""
    if not text:
        raise ValueError("a text that is not empty")
    return text


def parse_token(value: Any) -> str:
    """Return a bearer token without surrounding white space.

    Raises:
        ValueError: It cannot be sent in a header; the text has what is accepted.
    """
    text = _text(value)
    # It goes into an HTTP header, where a newline would end it.
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError("ASCII text without white space and control characters")
    return text


def _host_names(value: Any) -> tuple[str, ...]:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)):
        raise ValueError("host names, separated by commas")  # noqa: TRY004 - see load
    return tuple(_text(name).lower() for name in given)


def _user_and_password(value: Any) -> str:
    user, _, password = str(value).strip().partition(":")
    if not (user and password):
        raise ValueError("user:password")
    return f"{user}:{password}"


_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off", "")


def _switch(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError("true or false (also 1, yes, on; 0, no, off)")
    return text in _TRUE


def _setting(default: Any, parse: Callable[[Any], Any], *, secret: bool = False) -> Any:
    return field(
        default=default, repr=not secret, metadata={"parse": parse, "secret": secret}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a process.

    The environment variable of a setting is ``TRACEDSTORE_`` and its name in capitals.
    An empty variable is as none.

    Attributes:
        disabled: Record nothing. Wrapped stores only forward calls.
        core: What records the calls of torch's C++ stores. ``python``: Python;
            ``native``: the extension that ``tracedstore build-native`` builds, and an
            error without it; ``auto``: the extension if it is built for this torch,
            else Python.
        spans: Which calls get a span. ``budget``: slow, failed and retried calls, and
            other calls within the budget; ``notable``: slow, failed and retried calls
            only; ``all``: every call; ``off``: none.
        span_rate: Budget of spans per second for other calls.
        span_burst: Maximum number of these spans at once.
        slow_after: Seconds from which a call is slow.
        stall_after: Seconds after which a call in flight is reported; 0 disables the
            report.
        answers: Answer questions of other processes of the job about what this one
            does: its Store calls, and file, line and function of its threads' stacks.
            Only processes of the same user, and clients of the job's store, can ask.
        collectives: Watch the collectives of process groups, and report those that do
            not end, as Store calls.
        on_stall: What happens when a job hangs for good. ``observe``: it is reported;
            ``abort``: one of the waiting processes ends with the verdict as its error,
            if the cause is ``gone``, ``mismatch`` or ``diverged`` and has been for
            another ``stall_after``, so that the launcher restarts the job.
        contended_after: Number of compare-and-sets lost in a row that is reported.
        log_format: Format of events if the application has not configured structlog.
            ``auto``: text on a terminal, else JSON; ``json``; ``console``: text;
            ``off``: no events at all.
        metrics: Which series are exported. ``compact``: those that dashboards and
            alerts use, from the first call of an operation on; ``full``: every
            operation from the first scrape on, with more bounds, and blocking calls in
            both histograms.
        metrics_exporter: Where metrics go besides the Prometheus registry.
            ``prometheus``: nowhere else; ``otlp``: to a collector, as the ``OTEL_*``
            variables say.
        events_exporter: Where events go besides the log. ``auto``: to the application's
            OpenTelemetry LoggerProvider, if it has one; ``otlp``: to a collector,
            unless the application has a LoggerProvider; ``log``: nowhere else.
        report_dir: Folder in which each process writes its events, and at SIGTERM the
            stacks of its threads, to a file of its own: for ``tracedstore report``
            after the pods and their logs are gone. At most 8 MB a process.
        tracing: Set up an OpenTelemetry TracerProvider from the ``OTEL_*``
            variables, unless the application has one.
        exit_timeout: Seconds that exporting and writing events may delay the end of the
            process.
        http_port: Port of the HTTP endpoint. A process that serves adds its local rank
            to it. If that port is taken, it uses the next free one; 0 selects any free
            port. Without this setting the process serves nothing.
        http_scope: Who serves a worker of torchrun. ``node``: its agent, if that is
            traced; one endpoint serves a node. ``rank``: the worker itself. Without
            torchrun, each process serves itself.
        http_host: The address to listen on; ``0.0.0.0`` for all addresses of IPv4,
            ``::`` for all of IPv6 and IPv4.
        http_advertised_host: Name or address by which others reach this process: it
            is in the registry, in ``/sd`` and in events. Without it, they have the
            address to listen on, or the name of this machine for all addresses.
        http_hosts: Names in the ``Host`` header that are accepted besides localhost,
            IP addresses, the name of this machine, the advertised name and, in a pod,
            names of Services, separated by commas.
        http_token: Bearer token that clients must send. Browsers send it as a password.
        http_basic_auth: ``user:password`` that clients must send. If a token is set
            as well, either is accepted.
        http_cert: Certificate file. Setting it enables HTTPS.
        http_key: Private key file, if the certificate file does not contain the key.
        http_client_ca: File of certificate authorities. Clients must present a
            certificate signed by one of them.
    """

    disabled: bool = _setting(False, _switch)
    core: str = _setting("auto", _choice("auto", "python", "native"))
    spans: str = _setting("budget", _choice("budget", "notable", "all", "off"))
    span_rate: float = _setting(20.0, _rate)
    span_burst: int = _setting(200, _count(1))
    slow_after: float = _setting(0.010, _seconds)
    stall_after: float = _setting(30.0, _seconds)
    answers: bool = _setting(True, _switch)
    collectives: bool = _setting(True, _switch)
    on_stall: str = _setting("observe", _choice("observe", "abort"))
    contended_after: int = _setting(5, _count(1))
    log_format: str = _setting("auto", _choice("auto", "json", "console", "off"))
    metrics: str = _setting("compact", _choice("compact", "full"))
    metrics_exporter: str = _setting("prometheus", _choice("prometheus", "otlp"))
    events_exporter: str = _setting("auto", _choice("auto", "otlp", "log"))
    report_dir: str | None = _setting(None, _text)
    tracing: bool = _setting(False, _switch)
    exit_timeout: float = _setting(5.0, _seconds)
    http_port: int | None = _setting(None, _port)
    http_scope: str = _setting("node", _choice("node", "rank"))
    http_host: str = _setting("127.0.0.1", _text)
    http_advertised_host: str | None = _setting(None, _text)
    http_hosts: tuple[str, ...] = _setting((), _host_names)
    http_token: str | None = _setting(None, parse_token, secret=True)
    http_basic_auth: str | None = _setting(None, _user_and_password, secret=True)
    http_cert: str | None = _setting(None, _text)
    http_key: str | None = _setting(None, _text)
    http_client_ca: str | None = _setting(None, _text)

    @classmethod
    def load(
        cls, given: Mapping[str, Any], environ: Mapping[str, str] = os.environ
    ) -> "Settings":
        """Load the settings: as given, else from the environment, else the default.

        Raises:
            TypeError: There is no setting of a given name.
            ConfigurationError: A setting has a value that cannot be used.
        """
        known = [setting.name for setting in fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"there is no setting {name!r}; there are: {known}")
        values = {}
        for setting in fields(cls):
            variable = PREFIX + setting.name.upper()
            if given.get(setting.name) is not None:
                name, value = setting.name, given[setting.name]
            # A manifest or a script may set a variable to nothing, to unset it.
            elif environ.get(variable):
                name, value = variable, environ[variable]
            else:
                continue
            try:
                values[setting.name] = setting.metadata["parse"](value)
            except ValueError as accepted:
                shown = "not shown here" if setting.metadata["secret"] else repr(value)
                raise ConfigurationError(
                    f"{name} is {shown}; accepted is {accepted}"
                ) from None
        loaded = cls(**values)
        if loaded.on_stall == "abort" and not loaded.stall_after:
            raise ConfigurationError(
                "on_stall is 'abort' and stall_after is 0, with which no stall is"
                " found; accepted is a stall_after of more than 0 seconds"
            )
        return loaded


def read_password(path: str | os.PathLike[str]) -> str:
    """Return the password in the first line of a file.

    A command line or a log does not show it there.

    Raises:
        ConfigurationError: The file cannot be read, or has something else.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_PASSWORD_BYTES + 1)
        password = data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except ValueError:
        raise _unusable(path, "it is no text in UTF-8") from None
    if not password or "\n" in password or len(data) > _MAX_PASSWORD_BYTES:
        raise _unusable(path, "it must have one line, the password")
    return password


def _unusable(path: str | os.PathLike[str], reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"the password file {os.fspath(path)!r} cannot be used: {reason}"
    )
