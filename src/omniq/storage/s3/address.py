"""The bucket, the prefix and the endpoint of a store, from a URL."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from omniq.errors import SettingsError
from omniq.text.masking import mask_url

_KNOWN = ("endpoint", "region")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*")
_LONGEST_PREFIX = 200


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store is. Without an endpoint: AWS, or the endpoint in the environment."""

    bucket: str
    prefix: str
    endpoint: str = ""
    region: str = ""


def parse(url: str) -> Address:
    """Parse a URL of `s3://`.

    >>> address = parse("s3://company-tasks/shop/live?endpoint=http://127.0.0.1:9000")
    >>> address.bucket, address.prefix, address.endpoint
    ('company-tasks', 'shop/live', 'http://127.0.0.1:9000')
    """
    try:
        return _parse(url)
    except ValueError as error:
        # The cause is omitted: it may quote a secret.
        raise SettingsError(f"storage URL {mask_url(url)}: {error}") from None


def _parse(url: str) -> Address:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError(
            "credentials do not belong in the URL; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    bucket, prefix = unquote(parts.netloc), unquote(parts.path.removeprefix("/").removesuffix("/"))
    if not bucket:
        raise ValueError("names no bucket; write s3://bucket/prefix")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"bucket {bucket!r}: expected 3 to 63 lower-case letters, digits, dots and hyphens"
        )
    if not prefix:
        raise ValueError(
            f"names no prefix; write s3://{bucket}/omniq, or another name of the store"
        )
    if parts.fragment or not _is_prefix(prefix):
        raise ValueError(
            f"prefix {prefix!r}: expected up to {_LONGEST_PREFIX} letters, digits and !_.*'()- , in "
            "parts that / separates"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(_KNOWN))
    if unknown:
        raise ValueError(_unknown_option(unknown[0]))
    endpoint = options.get("endpoint", "")
    if endpoint:
        _check_endpoint(endpoint)
    return Address(
        bucket=bucket, prefix=prefix, endpoint=endpoint, region=options.get("region", "")
    )


def _is_prefix(prefix: str) -> bool:
    return (
        len(prefix) <= _LONGEST_PREFIX
        and _PREFIX.fullmatch(prefix) is not None
        and not {".", ".."} & set(prefix.split("/"))
    )


def _unknown_option(name: str) -> str:
    if any(word in name.lower() for word in ("key", "secret", "token", "profile")):
        return (
            f"option {name!r}: credentials do not belong in the URL; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    return f"unknown option {name!r}; known: {', '.join(_KNOWN)}"


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(
            "endpoint: expected an address such as https://s3.example.com or http://127.0.0.1:9000"
        )
