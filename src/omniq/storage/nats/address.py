"""The servers, the store and the connection options, from a URL."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from omniq.errors import SettingsError
from omniq.text.masking import is_secret_name, mask_url

_KNOWN = "replicas, monitor, host, token, creds, nkey, tls, tls_ca, tls_cert, tls_key"
_UNREADABLE = (
    "cannot be read; is each port a number, and are special characters of the password written as "
    "%23, %2F, %3F, %40?"
)
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_STORE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]@\s]+)(?::(\d{1,5}))?")
_PORT = 4222


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of one cluster, a store in it, and the connection options."""

    servers: tuple[str, ...]
    """Each as `nats://host:port`, without user and password."""
    store: str
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    tls: ssl.SSLContext | None = None
    replicas: int = 1
    monitor: str = ""
    """The address of the server's monitoring endpoint, which shows how the server syncs to disk."""
    host: str = "auto"

    @property
    def secrets(self) -> list[str]:
        """The secrets of the URL, which no message may contain."""
        return [secret for secret in (self.password, self.token) if secret]


def parse(url: str) -> Address:
    """Parse `nats://[user:password@]host:port[,host:port]/store?options`.

    >>> address = parse("nats://me:secret@one:4222,two/shop?replicas=3")
    >>> address.servers, address.store, address.user, address.password, address.replicas
    (('nats://one:4222', 'nats://two:4222'), 'shop', 'me', 'secret', 3)
    """
    try:
        return _parse(url)
    except (ValueError, OSError) as error:
        # The cause is omitted: it may quote the password.
        raise SettingsError(f"storage URL {mask_url(url)}: {error}") from None


def _parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(_UNREADABLE) from None
    if parts.fragment or ("@" in url and "@" not in parts.netloc):
        raise ValueError(_UNREADABLE)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    # As in all NATS URLs, a user without a password is a token.
    token = options.pop("token", "") or ("" if colon else unquote(user))
    address = Address(
        servers=tuple(map(_server, (hosts or "localhost").split(","))),
        store=_store(unquote(parts.path).strip("/")),
        user=unquote(user) if colon else "",
        password=unquote(password),
        token=token,
        creds=_file(options, "creds"),
        nkey=_file(options, "nkey"),
        tls=_tls(options),
        replicas=_replicas(options.pop("replicas", "1")),
        monitor=_monitor(options.pop("monitor", "")),
        host=_host(options.pop("host", "auto")),
    )
    if options:
        # After an unquoted & in a password, the text is the rest of the password, not an option.
        name = "" if is_secret_name(parts.query) else f" {min(options)!r}"
        raise ValueError(f"unknown option{name}; known: {_KNOWN}")
    return address


def _server(text: str) -> str:
    found = _SERVER.fullmatch(text)
    port = int(found[2] or _PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        raise ValueError(_UNREADABLE)
    return f"nats://{found[1]}:{port}"


def _store(name: str) -> str:
    if name and not _STORE.fullmatch(name):
        # The error omits the text: after an unquoted / it may be the rest of a password.
        raise ValueError(
            "name the store with 1 to 64 letters, digits, _ or -, such as nats://host:4222/omniq"
        )
    return name or "omniq"


def _replicas(text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise ValueError("replicas is a number from 1 to 5: the servers that store each task")
    return int(text)


def _host(text: str) -> str:
    if text not in ("auto", "never", "only"):
        raise ValueError("host is auto, never or only")
    return text


def _monitor(text: str) -> str:
    if text and not text.startswith(("http://", "https://")):
        raise ValueError("monitor is the server's monitoring address, such as http://host:8222")
    return text.rstrip("/")


def _file(options: dict[str, str], name: str) -> str:
    path = options.pop(name, "")
    if path and not Path(path).is_file():
        raise ValueError(f"{name}: there is no file {path}")
    return path


def _tls(options: dict[str, str]) -> ssl.SSLContext | None:
    """How the server is verified, and the client certificate. Reads the files."""
    authority, certificate, key = (_file(options, f"tls_{name}") for name in ("ca", "cert", "key"))
    wanted = options.pop("tls", "true" if authority or certificate or key else "false").lower()
    if wanted not in _SWITCHES:
        raise ValueError("tls is true or false")
    if not _SWITCHES[wanted]:
        if authority or certificate or key:
            raise ValueError("tls=false: remove tls_ca, tls_cert and tls_key, or the false")
        return None
    context = ssl.create_default_context(cafile=authority or None)
    if certificate:
        context.load_cert_chain(certificate, key or None)
    elif key:
        raise ValueError("tls_key: give the certificate of that key too, as tls_cert")
    return context
