"""What a server's error means: whether to try again, and what to do about it."""

from __future__ import annotations

import re

from omniq.errors import StorageCorrupt, StorageError, StorageRefused
from omniq.storage.redis.address import Node

DAMAGED_COUNTER = "a counter of the store is damaged: restore the store from a backup"


class ConnectionLost(StorageError):
    """The connection failed. `was_sent`: the server may have run the call."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class ServerNotReady(StorageError):
    """The server refuses calls for now: it loads, is busy, or is not the primary. Try again."""


class NotPrimary(ServerNotReady):
    """The server is a replica, or has given the store to another server: connect again."""


class UnknownScript(StorageError):
    """The server does not have the script; nothing was done."""


class OutOfMemory(StorageError):
    """The server may not use more memory; nothing was written."""


def error_of(text: str, reply: str, *, has_worked: bool) -> StorageError:
    """The error for an error reply; `text` is that reply with the server's name.

    Credentials that the server has accepted before are refused for a while only: they are being changed.
    """
    code = code_of(reply)
    if unknown := _UNKNOWN_COMMAND.search(reply):
        name = unknown[1].upper()
        if name in _NEEDED:
            return StorageRefused(
                f"{text}; omniq needs the command {name}: is it renamed or disabled on this server?"
            )
    if code == "NOPERM" and (forbidden := _FORBIDDEN_COMMAND.search(reply)):
        text += f"; allow this user the command with: ACL SETUSER <user> +{forbidden[1].lower()}"
        return ServerNotReady(text) if has_worked else StorageRefused(text)
    if code in _REFUSALS:
        text = f"{text}; {_REFUSALS[code]}"
        return ServerNotReady(text) if has_worked and code in _ACCESS else StorageRefused(text)
    if code in _NOT_PRIMARY:
        return NotPrimary(text)
    if code in _NOT_READY:
        return ServerNotReady(text)
    if code == "NOSCRIPT":
        return UnknownScript(text)
    if code == "OOM":
        return OutOfMemory(f"{text}; give the server more memory, or store less")
    if "value is not an integer" in text:
        return StorageCorrupt(f"{text}; {DAMAGED_COUNTER}")
    return StorageError(text)


def redirection(reply: str) -> tuple[str, Node] | None:
    """`MOVED` or `ASK` and the server that it names, if the reply is one of them.

    >>> redirection("MOVED 3999 127.0.0.1:6381")
    ('MOVED', Node(host='127.0.0.1', port=6381))
    """
    found = _REDIRECTION.fullmatch(reply)
    return None if found is None else (found[1], Node(found[2], int(found[3])))


def is_client_name_refused(reply: str) -> bool:
    """Whether the server only refuses `CLIENT SETNAME`."""
    return "client" in reply.lower() and code_of(reply) in ("NOPERM", "")


def code_of(reply: str) -> str:
    """The code of a server's error. The error of a script has it inside its text."""
    found = _CODE.search(reply)
    return _CODES[found[0]] if found else ""


_NEEDED = frozenset(("EVALSHA", "SCRIPT", "HSCAN", "HMGET", "TIME", "PING"))

_REFUSALS = {
    "WRONGPASS": "give the right user and password in the URL",
    "NOAUTH": "give a user and password in the URL",
    "NOPERM": "allow this user the keys and channels that begin with the prefix, and the commands "
    "in the guide Security, Restrict server users",
    "MOVED": "the store's keys are on another node of this cluster: write redis+cluster:// in the URL",
    "ASK": "the store's keys are on another node of this cluster: write redis+cluster:// in the URL",
    "CROSSSLOT": "the keys of a store belong in one slot: does another program use this prefix?",
    "WRONGTYPE": "another program uses these keys: give this store another `?prefix=`",
    "NODB": "name a database that the server has, such as /0",
    "DENIED": "the server refuses remote clients while it has no password: set one there",
}
_ACCESS = frozenset(("WRONGPASS", "NOAUTH", "NOPERM", "DENIED"))
_NOT_PRIMARY = frozenset(("READONLY", "MASTERDOWN"))
_NOT_READY = frozenset(
    (
        *("LOADING", "BUSY", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF", "MAXCLIENTS"),
        "UNBLOCKED",
    )
)
_CODES = {
    **{code: code for code in (*_REFUSALS, *_NOT_PRIMARY, *_NOT_READY, "OOM", "NOSCRIPT")},
    "DB index is out of range": "NODB",
    "invalid DB index": "NODB",
    "max number of clients": "MAXCLIENTS",
    "invalid password": "WRONGPASS",
    # The reply to a password where none is set.
    "AUTH": "WRONGPASS",
    # The reply of servers before Redis 7 when a script may not touch a key.
    "The user executing the script": "NOPERM",
}
_CODE = re.compile("|".join(rf"\b{code}\b" for code in _CODES))
_REDIRECTION = re.compile(r"(MOVED|ASK) \d{1,5} (\S*):(\d{1,5})")
_UNKNOWN_COMMAND = re.compile(r"unknown command ['`]?(\w+)", re.IGNORECASE)
_FORBIDDEN_COMMAND = re.compile(r"the '([\w|]+)' command")
