"""The address of a Redis server, of Sentinels or of a cluster, and the connection options, from a URL."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from omniq.errors import SettingsError
from omniq.text.masking import is_secret_name, mask_url

_KNOWN = (
    "db, username, password, password_file, client_name; of redis+sentinel:// also "
    "sentinel_username, sentinel_password; of rediss:// also ssl_ca_certs, ssl_ca_path, "
    "ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs, ssl_check_hostname"
)
_UNREADABLE = (
    "cannot be read; is the port a number, and are special characters of the password written as "
    "%23, %2F, %3F, %40?"
)
_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


Kind = Literal["server", "sentinel", "cluster"]
_SCHEMES: dict[str, Kind] = {
    "redis": "server",
    "rediss": "server",
    "unix": "server",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
_PORTS: dict[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}


class Node(NamedTuple):
    """The host and the port of one server."""

    host: str
    port: int


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the store is, and the connection options. A `path` names a socket on this machine.

    `nodes` are the Sentinels, or servers of a cluster; then the server is found through them.
    """

    kind: Kind = "server"
    host: str = "localhost"
    port: int = 6379
    nodes: tuple[Node, ...] = ()
    service: str = ""
    path: str = ""
    tls: ssl.SSLContext | None = None
    username: str = ""
    password: str = ""
    password_file: str = ""
    sentinel_username: str = ""
    sentinel_password: str = ""
    database: int = 0
    client_name: str = ""

    def current_password(self) -> str:
        """The password, read from its file each time: a changed one needs no restart."""
        if not self.password_file:
            return self.password
        return Path(self.password_file).read_text(encoding="utf-8").strip()


def parse(url: str) -> Address:
    """Parse a URL of `redis://`, `rediss://`, `valkey://`, `valkeys://` or `unix://`.

    `redis+sentinel://` names Sentinels and a service, `redis+cluster://` some servers of a cluster.

    >>> address = parse("redis://me:secret@example.com/2")
    >>> address.host, address.port, address.username, address.password, address.database
    ('example.com', 6379, 'me', 'secret', 2)
    >>> parse("redis+sentinel://a,b:26380/shop").nodes
    (Node(host='a', port=26379), Node(host='b', port=26380))
    """
    try:
        return _parse(url)
    except (ValueError, OSError) as error:
        # Without its cause, which may quote the password.
        raise SettingsError(f"storage URL {mask_url(url)}: {error}") from None


def _parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.replace("valkey", "redis")
        kind = _SCHEMES.get(scheme, "server")
        nodes = _nodes(parts, _PORTS[kind])
    except ValueError:
        raise ValueError(_UNREADABLE) from None
    if parts.fragment or ("@" in url and "@" not in parts.netloc):
        raise ValueError(_UNREADABLE)
    if scheme not in _SCHEMES:
        raise ValueError(f"unknown kind {parts.scheme!r}; known: {', '.join(_SCHEMES)}")
    path = unquote(parts.path)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    service = ""
    if kind == "sentinel":
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise ValueError("names no service: write redis+sentinel://host1,host2,host3/service")
    elif kind == "server" and len(nodes) > 1:
        raise ValueError(
            "names several servers: write redis+sentinel://host1,host2/service for Sentinels, or "
            "redis+cluster://host1,host2 for a cluster"
        )
    if scheme != "unix":
        options.setdefault("db", path.strip("/"))
    elif not path:
        raise ValueError("names no socket: write unix:///run/redis.sock")
    username, password = options.pop("username", ""), options.pop("password", "")
    sentinel_options = {
        name: options.pop(name, "")
        for name in ("sentinel_username", "sentinel_password")
        if kind == "sentinel"
    }
    address = Address(
        kind=kind,
        host=nodes[0].host if kind == "server" else "",
        port=nodes[0].port if kind == "server" else 0,
        nodes=() if kind == "server" else nodes,
        service=service,
        path=path if scheme == "unix" else "",
        tls=_tls(options) if scheme.startswith("rediss") else None,
        username=unquote(parts.username or "") or username,
        password=unquote(parts.password or "") or password,
        password_file=options.pop("password_file", ""),
        **sentinel_options,
        database=_database(options.pop("db", "")),
        client_name=options.pop("client_name", ""),
    )
    if options:
        # Behind a password with an unquoted & stands not an option, but the rest of it.
        name = "" if is_secret_name(parts.query) else f" {min(options)!r}"
        raise ValueError(f"unknown option{name}; known: {_KNOWN}")
    _check(address)
    return address


def _check(address: Address) -> None:
    if address.kind == "cluster" and address.database:
        raise ValueError("a cluster has only database 0")
    if address.password_file:
        if address.password:
            raise ValueError("has a password and a password_file: give one of them")
        # A file that is missing is found when the program starts, and not at the first call.
        address.current_password()


def _nodes(parts: SplitResult, default_port: int) -> tuple[Node, ...]:
    """The servers before the path. Raises `ValueError` for one that cannot be read."""
    nodes = []
    for text in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{text}")
        port = default_port if one.port is None else one.port
        if not port:
            raise ValueError
        nodes.append(Node(unquote(one.hostname or "localhost"), port))
    return tuple(nodes)


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdecimal()):
        # Without the text: after an unquoted / it may be the rest of a password.
        raise ValueError("expected a number as the database, such as /0")
    return int(text or 0)


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    """How the server is verified, and the client certificate. Files are read here."""
    context = ssl.create_default_context(
        cafile=options.pop("ssl_ca_certs", None), capath=options.pop("ssl_ca_path", None)
    )
    # Some URLs have the names of Python's constants here.
    checks = options.pop("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    named = options.pop("ssl_check_hostname", "true").lower()
    if checks not in _CHECKS or named not in _SWITCHES:
        raise ValueError(
            "ssl_cert_reqs is none, optional or required, ssl_check_hostname is true or false"
        )
    context.check_hostname = _SWITCHES[named] and checks != "none"
    context.verify_mode = _CHECKS[checks]
    certfile, keyfile = options.pop("ssl_certfile", None), options.pop("ssl_keyfile", None)
    password = options.pop("ssl_password", None)
    if certfile:
        context.load_cert_chain(certfile, keyfile, password)
    elif keyfile:
        raise ValueError("ssl_keyfile: give the certificate of that key too, as ssl_certfile")
    return context
