"""Checks the URL of a PostgreSQL server before the driver, whose errors quote parts of it."""

from __future__ import annotations

from urllib.parse import urlsplit

from omniq.errors import SettingsError
from omniq.text.masking import mask_url

UNREADABLE = (
    "cannot be read; is the port a number from 1 to 65535, and are special characters of the "
    "password written as %23, %2F, %3F, %40?"
)


def check(url: str) -> None:
    """Raise `SettingsError` for a URL that cannot be read without a guess.

    A password with an unquoted `/`, `#` or `?` ends the host's part of the URL: an `@` that stands
    behind it shows that.

    >>> check("postgresql://me:secret@db.example.com:5432,other/app?sslmode=require")
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        # Without its cause, which may quote the password.
        raise SettingsError(f"storage URL {mask_url(url)}: {UNREADABLE}") from None
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if parts.fragment or "@" in parts.path + parts.query or not all(map(_has_port, hosts)):
        raise SettingsError(f"storage URL {mask_url(url)}: {UNREADABLE}")


def _has_port(host: str) -> bool:
    """Whether the port of a host can be used; it may be missing."""
    _, colon, port = host.rpartition("]")[2].rpartition(":")
    if not colon or not port:
        return True
    return port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65_536
