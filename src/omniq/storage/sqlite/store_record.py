"""Store record: what a store says about itself, in the document `store`, and which lease file it has.

Two processes that open one database under two names (hard links) would have two lease files, and take
each other's tasks. So the lease file has an id, and the store knows it.
"""

from __future__ import annotations

import os

import msgspec

from omniq.errors import StorageError
from omniq.serialization import encode_internal
from omniq.storage.incarnation import StoreRecord, decode_record
from omniq.storage.sqlite.connection import Connection


def read_epoch(db: Connection) -> int:
    """The store's epoch."""
    sql = "SELECT coalesce(max(due), 0) FROM omniq_documents WHERE kind = 'store' AND key = 'store'"
    epoch: int = db.execute(sql).fetchone()[0]
    return epoch


def read_data(db: Connection) -> bytes | None:
    """The store's record, encoded; None if it has none yet."""
    sql = "SELECT data FROM omniq_documents WHERE kind = 'store' AND key = 'store'"
    found = db.execute(sql).fetchone()
    return None if found is None else found[0]


def read_record(db: Connection) -> StoreRecord | None:
    """The store's record; None if it has none yet."""
    return decode_record(read_data(db))


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
    record = msgspec.structs.replace(known or StoreRecord(new_id), leases=leases, path=path)
    db.execute(
        "INSERT OR REPLACE INTO omniq_documents VALUES ('store', 'store', ?, ?)",
        (encode_internal(record), record.epoch),
    )


def _is_in_use(name: str, path: str) -> bool:
    """Whether the database has that other name, with leases beside it."""
    if name == path or not os.path.exists(f"{name}-leases"):
        return False
    try:
        return os.path.samefile(name, path)
    except OSError:
        return False


def check_lease_file(db: Connection, path: str) -> bytes | None:
    """Raise `StorageError` when others use the database with another lease file. `db` reads both.

    Returns the store's record, encoded.
    """
    data, leases = read_data(db), read_lease_file_id(db)
    known = decode_record(data)
    if known is not None and known.leases != leases:
        raise StorageError(
            f"SQLite database {path}: it was opened as {known.path}, with other leases; "
            "restart every process that uses it, under one name"
        )
    return data
