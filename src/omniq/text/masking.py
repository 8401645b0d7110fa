"""Hides secrets in URLs and in text, and tells the names of secrets from other names.

Every function takes time proportional to its input, which may come from any caller that enqueues a
task.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

HIDDEN = "***"

_CASE = re.compile(r"([a-z0-9])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])")
_NO_LETTER = re.compile(r"[\W_\d]+")
_SECRET_WORDS = """
    pass pw pwd auth oauth bearer jwt otp totp mfa dsn pin pincode cvv cvc cvn ssn iban
    cookie cookies sessionid sid signature signatures sig hmac passkey apikey cardnumber
    webhook
"""
"""Parts of a name that make it the name of a secret."""

_SECRET_STEMS = ("passw", "passphrase", "passcode", "secret", "token", "authoriz", "credential")
"""The same, wherever they stand in a part: `mypassword`, `accesstoken`."""

_SECRET_PAIRS = frozenset({("session", "id"), ("card", "number")})

_PUBLIC_KEYS = """
    primary foreign sort partition routing cache unique public idempotency dedup row
    group lookup object bucket index map dict json
"""
"""A name that ends in `key` is the name of a secret, unless this stands before it."""

_SECRET_SET, _PUBLIC_SET = frozenset(_SECRET_WORDS.split()), frozenset(_PUBLIC_KEYS.split())

_MAX_NAME = 100
_OPTION_END = re.compile(
    r"&(?=(?:host|port|user|username|db|dbname|database|ssl\w{0,20}|client_name|application_name"
    r"|target_session_attrs|durability|lease|max_pending|result_ttl|schema|prefix|poll_only"
    r"|pool_size|replicas|monitor|tls|tls_\w{0,10}|creds|nkey|token)=)"
)
"""Where the value of an option of a URL ends: an unquoted & alone may be part of a password."""

_PAIR_END = re.compile(r";")
_WORD_END = re.compile(r"[&\s;,]")
_SHOWN_USER = re.compile(r"[\w.%-]{1,64}")
_NAME_BEFORE = re.compile(r"[\w.\- %]+\Z")
_URL_START = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{1,30}:(?://)?")
_LOCAL = ("file", "sqlite", "memory", "unix")
_URL_IN_TEXT = re.compile(
    r"(?:postgres|redis|valkey|nats|mysql|mariadb|mongodb|amqp|https?|ftp)\w{0,10}:|:(?=//)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a value of that name should be hidden. Parts are separated by case and punctuation.

    >>> [is_secret_name(name) for name in ("user", "db_password", "apiKey", "card_cvv", "spinner")]
    [False, True, True, True, False]
    """
    # The cache must not hold long texts, and a long text is hardly a name.
    return _is_secret_name(name if len(name) <= _MAX_NAME else name[-_MAX_NAME:])


@lru_cache(maxsize=4_096)
def _is_secret_name(name: str) -> bool:
    parts = [part.lower() for part in _NO_LETTER.split(_CASE.sub(r"\1\2_", name)) if part]
    if any(part in _SECRET_SET or _has_stem(part) for part in parts):
        return True
    joined = "".join(parts)
    if joined.endswith(("apikey", "privatekey", "accesskey")):
        return True
    for before, part in pairwise(parts):
        if part in ("key", "keys", "keyid") and before not in _PUBLIC_SET:
            return True
        if (before, part) in _SECRET_PAIRS:
            return True
    return False


def _has_stem(part: str) -> bool:
    return any(stem in part for stem in _SECRET_STEMS)


def mask_url(url: str) -> str:
    """The URL with every password replaced, for logs, messages and screens.

    A URL that is not written correctly, with a password that has unquoted `@`, `/`, `#`, `?`, `:`
    or `&`, shows nothing of it either: all that stands before the last `@`, or behind the name of a
    secret option, may belong to it.

    >>> mask_url("postgresql://me:secret@db/app?sslpassword=other")
    'postgresql://me:***@db/app?sslpassword=***'
    """
    found = _URL_START.match(url)
    start = "" if found is None else found[0]
    scheme = start.partition(":")[0].lower()
    rest = url[len(start) :]
    if scheme in _LOCAL and (rest.startswith("/") or not start.endswith("//")):
        return start + mask_options(rest, _OPTION_END)
    userinfo, at, address = rest.rpartition("@")
    if not at and address.startswith(":"):
        # No host, so what follows is a password without its @.
        return start + HIDDEN
    if at and ("?" in userinfo or "&" in userinfo):
        # The last @ may stand in the value of an option.
        address = HIDDEN
    return (
        start + _shown_user(scheme, userinfo, at) + mask_options(_masked_port(address), _OPTION_END)
    )


def _shown_user(scheme: str, userinfo: str, at: str) -> str:
    if not at:
        return ""
    user, colon, _ = userinfo.partition(":")
    # A lone name before the @ of other kinds of URL is often a token.
    is_name = bool(colon) or scheme.startswith("postgres")
    shown = user if is_name and (not user or _SHOWN_USER.fullmatch(user)) else HIDDEN
    return f"{shown}:{HIDDEN}@" if colon else f"{shown}@"


def _masked_port(address: str) -> str:
    """Hide what stands in place of the port and is no number: a password before a missing `@`."""
    authority = re.split(r"[/?]", address, maxsplit=1)[0]
    host, colon, port = authority.partition(":")
    if not colon or host.startswith("[") or _is_port_list(port):
        return address
    return f"{host}:{HIDDEN}"


def _is_port_list(port: str) -> bool:
    # PostgreSQL accepts several hosts: a:1,b:2.
    return all(
        not each or each.isdecimal()
        for part in port.split(",")
        for each in part.rpartition(":")[2:]
    )


def mask_text(text: str) -> str:
    """The text with the passwords of the URLs in it, and the values of `name=value`, replaced.

    >>> mask_text("Server=db;User Id=me;Password=x y;Timeout=5")
    'Server=db;User Id=me;Password=***;Timeout=5'
    """
    if "@" in text and (url := _URL_IN_TEXT.search(text)):
        head = text[: url.end() - 1]
        scheme = re.split(r"[^A-Za-z0-9+.\-]", head[-32:])[-1]
        text = head + mask_url(scheme + text[url.end() - 1 :])[len(scheme) :]
    if "=" not in text:
        return text
    if "://" in text:
        return mask_options(text, _OPTION_END)
    return mask_options(text, _PAIR_END if ";" in text else _WORD_END)


def mask_options(text: str, end_of_value: re.Pattern[str]) -> str:
    """The text with the value of each `name=value` replaced whose name is that of a secret.

    A value in quotes ends at the closing quote.
    """
    shown, position = [], 0
    while (equals := text.find("=", position)) >= 0:
        begin = equals + 1
        shown.append(text[position:begin])
        position = begin
        if _is_secret_option(shown[-1][-_MAX_NAME:-1], has_blanks=end_of_value is not _WORD_END):
            position = _end_of_value(text, begin, end_of_value)
            shown.append(HIDDEN)
    shown.append(text[position:])
    return "".join(shown)


def _end_of_value(text: str, begin: int, end_of_value: re.Pattern[str]) -> int:
    while text[begin : begin + 1] == " ":
        begin += 1
    quote = text[begin : begin + 1]
    if quote and quote in "'\"" and end_of_value is not _OPTION_END:
        closing = text.find(quote, begin + 1)
        return len(text) if closing < 0 else closing + 1
    end = end_of_value.search(text, begin)
    return len(text) if end is None else end.start()


def _is_secret_option(before: str, *, has_blanks: bool) -> bool:
    """Whether the text before an equals sign ends in the name of a secret."""
    found = _NAME_BEFORE.search(before)
    name = "" if found is None else found[0].strip()
    if not has_blanks:
        name = name.rpartition(" ")[2]
    return bool(name) and (name.lower() == "key" or is_secret_name(name))
