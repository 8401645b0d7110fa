"""Reads the URL of PostgreSQL servers before the driver, whose errors quote parts of it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from omniq.errors import SettingsError
from omniq.text.masking import mask_url

UNREADABLE = (
    "cannot be read; is the port a number from 1 to 65535, and are special characters of the "
    "password written as %23, %2F, %3F, %40?"
)
_DEFAULT_PORT = 5432
_READERS = frozenset({"read-only", "standby", "prefer-standby"})
"""Values of `target_session_attrs` that ask for a server that cannot be written to."""


@dataclass(frozen=True)
class Server:
    """One of several servers of a URL. `host` may be the folder of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def check(url: str) -> None:
    """Raise `SettingsError` for a URL that cannot be read without a guess.

    A password with an unquoted `/`, `#` or `?` ends the host's part of the URL: an `@` that stands
    behind it shows that.

    >>> check("postgresql://me:secret@db.example.com:5432,other/app?sslmode=require")
    """
    try:
        parts = urlsplit(url)
        hosts = _hosts(url)
        ports = _port_option(url)
    except ValueError:
        # Without its cause, which may quote the password.
        raise SettingsError(f"storage URL {mask_url(url)}: {UNREADABLE}") from None
    is_quoting = parts.fragment or "@" in parts.path + parts.query
    are_ports = all(0 < port < 65_536 for port in ports) and all(map(_has_port, hosts))
    if is_quoting or not are_ports:
        raise SettingsError(f"storage URL {mask_url(url)}: {UNREADABLE}")
    wanted = parse_qs(parts.query).get("target_session_attrs", [""])[0]
    if wanted in _READERS:
        raise SettingsError(
            f"storage URL {mask_url(url)}: target_session_attrs={wanted} asks for a server that "
            "cannot be written to; omniq writes: use read-write or primary"
        )


def servers(url: str) -> tuple[Server, ...]:
    """The servers of a URL that names several, in its order; empty if it names one, or none.

    >>> [str(server) for server in servers("postgresql://me@db1,db2:6000/app")]
    ['db1:5432', 'db2:6000']
    >>> servers("postgresql://me@db1/app")
    ()
    """
    hosts = _hosts(url)
    if len(hosts) < 2:
        return ()
    ports = _port_option(url)
    # As in libpq: one port is for all hosts, or there is one for each.
    defaults = ports if len(ports) == len(hosts) else (ports or [_DEFAULT_PORT]) * len(hosts)
    return tuple(_server(host, port) for host, port in zip(hosts, defaults, strict=False))


def names_a_role(url: str) -> bool:
    """Whether the URL says which of several servers is meant.

    >>> names_a_role("postgresql://db1,db2/app?target_session_attrs=primary")
    True
    """
    return "target_session_attrs" in parse_qs(urlsplit(url).query)


def _hosts(url: str) -> list[str]:
    """The hosts with their ports, from before the path or from the option `host`."""
    parts = urlsplit(url)
    before_path = parts.netloc.rpartition("@")[2]
    if before_path:
        return [unquote(host) for host in before_path.split(",")]
    return parse_qs(parts.query).get("host", [""])[0].split(",")


def _port_option(url: str) -> list[int]:
    found = parse_qs(urlsplit(url).query).get("port", [""])[0]
    return [int(port) for port in found.split(",") if port]


def _server(host: str, default: int) -> Server:
    if host.startswith("/"):
        return Server(host, default)
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return Server(name, int(port.lstrip(":") or default))
    name, _, port = host.partition(":")
    return Server(name, int(port or default))


def _has_port(host: str) -> bool:
    """Whether the port of a host can be used; it may be missing."""
    _, colon, port = host.rpartition("]")[2].rpartition(":")
    if not colon or not port:
        return True
    return port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65_536
