"""Store record: what a store says about itself, in the document `store`, and which lease file it has.

Two processes that open one database under two names (hard links) would have two lease files, and take
each other's tasks. So the lease file has an id, and the store knows it.
"""

from __future__ import annotations

import os

import msgspec

from omniq.errors import StorageError
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.sqlite.connection import Connection

_FORMAT = 1


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The store's id, the format of its records, and the oldest format that their readers must know.

    `epoch` grows when the store is restored from a backup. `leases` is the id of the lease file, and
    `path` that of the database when it was last opened with another lease file.
    """

    id: str
    epoch: int = 0
    format: int = _FORMAT
    oldest_reader: int = _FORMAT
    leases: str = ""
    path: str = ""


_decode = lenient_decoder(StoreRecord, None)


def read_record(db: Connection) -> StoreRecord | None:
    """The store's record; None if it has none yet."""
    found = db.execute(
        "SELECT data FROM omniq_documents WHERE kind = 'store' AND key = 'store'"
    ).fetchone()
    return None if found is None else _decode(found[0])


def read_lease_file_id(db: Connection) -> str:
    """The id of the lease file, on its own connection or one that has it attached."""
    lease_file: str = db.execute("SELECT id FROM omniq_lease_file").fetchone()[0]
    return lease_file


def put_record(db: Connection, path: str, leases: str, new_id: str) -> None:
    """Store that the database is used with that lease file."""
    known = read_record(db)
    if known is not None and known.leases == leases:
        return
    if known is not None and _is_in_use(known.path, path):
        raise StorageError(
            f"SQLite database {path}: it is also {known.path}, whose leases are in "
            f"{known.path}-leases; open it under that name only"
        )
    record = StoreRecord(id=known.id if known else new_id, leases=leases, path=path)
    db.execute(
        "INSERT OR REPLACE INTO omniq_documents VALUES ('store', 'store', ?, NULL)",
        (encode_internal(record),),
    )


def _is_in_use(name: str, path: str) -> bool:
    """Whether the database has that other name, with leases beside it."""
    if name == path or not os.path.exists(f"{name}-leases"):
        return False
    try:
        return os.path.samefile(name, path)
    except OSError:
        return False


def check_lease_file(db: Connection, path: str) -> None:
    """Raise `StorageError` when others use the database with another lease file. `db` reads both."""
    known, leases = read_record(db), read_lease_file_id(db)
    if known is not None and known.leases != leases:
        raise StorageError(
            f"SQLite database {path}: it was opened as {known.path}, with other leases; "
            "restart every process that uses it, under one name"
        )
