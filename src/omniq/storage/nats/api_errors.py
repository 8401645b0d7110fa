"""What the errors of JetStream mean, and what to do about them."""

from __future__ import annotations

from omniq.errors import StorageError, StorageRefused

NOT_FOUND, EXISTS, WRONG_SEQUENCE, FULL = "not found", "exists", "wrong sequence", "full"
CODES = {
    10037: NOT_FOUND,
    10059: NOT_FOUND,
    10058: EXISTS,
    10071: WRONG_SEQUENCE,
    10164: WRONG_SEQUENCE,
    10047: FULL,
    10077: FULL,
    10023: FULL,
    10122: FULL,
}
"""What the error codes of JetStream mean here."""

REFUSALS = {
    10039: "enable JetStream for this account",
    10076: "enable JetStream: start the server with -js",
    10065: "another stream has the subjects of this store: name another store in the URL",
    10074: "replicas= is for clusters: remove it, or name the servers of a cluster",
    10005: "the cluster has fewer servers than replicas= asks for",
    10113: "the account requires a byte limit for each stream: create the streams first",
}
"""Error codes for which a retry does not help, and what to do."""


class ApiError(StorageError):
    """JetStream refused a request; `kind` is one of those in `CODES`, or empty."""

    kind = ""


class StreamFull(StorageRefused):
    """A limit of the account or of the stream is reached; nothing was stored."""


class NoResponders(StorageError):
    """No process subscribes to the subject; the request was not delivered."""


class Unanswered(StorageError):
    """No reply arrived; the request may have been delivered."""
