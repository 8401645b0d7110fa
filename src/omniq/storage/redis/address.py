"""The address of a Redis server and the connection options, from a URL."""

from __future__ import annotations

import ssl
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from omniq.errors import SettingsError
from omniq.text.masking import is_secret_name, mask_url

_KNOWN = (
    "db, username, password, client_name; of rediss:// also ssl_ca_certs, ssl_ca_path, "
    "ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs, ssl_check_hostname"
)
_UNREADABLE = (
    "cannot be read; is the port a number, and are special characters of the password written as "
    "%23, %2F, %3F, %40?"
)
_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server and the connection options. A `path` names a socket on this machine."""

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    tls: ssl.SSLContext | None = None
    username: str = ""
    password: str = ""
    database: int = 0
    client_name: str = ""


def parse(url: str) -> Address:
    """Parse a URL of `redis://`, `rediss://`, `valkey://`, `valkeys://` or `unix://`.

    >>> address = parse("redis://me:secret@example.com/2")
    >>> address.host, address.port, address.username, address.password, address.database
    ('example.com', 6379, 'me', 'secret', 2)
    """
    try:
        return _parse(url)
    except (ValueError, OSError) as error:
        # Without its cause, which may quote the password.
        raise SettingsError(f"storage URL {mask_url(url)}: {error}") from None


def _parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
        port = 6379 if parts.port is None else parts.port
        if not port:
            raise ValueError
    except ValueError:
        raise ValueError(_UNREADABLE) from None
    if parts.fragment or ("@" in url and "@" not in parts.netloc):
        raise ValueError(_UNREADABLE)
    scheme = parts.scheme.replace("valkey", "redis")
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"unknown kind {parts.scheme!r}; known: redis, rediss, unix")
    path = unquote(parts.path)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if scheme != "unix":
        options.setdefault("db", path.strip("/"))
    elif not path:
        raise ValueError("names no socket: write unix:///run/redis.sock")
    username, password = options.pop("username", ""), options.pop("password", "")
    address = Address(
        host=unquote(parts.hostname or "localhost"),
        port=port,
        path=path if scheme == "unix" else "",
        tls=_tls(options) if scheme == "rediss" else None,
        username=unquote(parts.username or "") or username,
        password=unquote(parts.password or "") or password,
        database=_database(options.pop("db", "")),
        client_name=options.pop("client_name", ""),
    )
    if options:
        # Behind a password with an unquoted & stands not an option, but the rest of it.
        name = "" if is_secret_name(parts.query) else f" {min(options)!r}"
        raise ValueError(f"unknown option{name}; known: {_KNOWN}")
    return address


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
