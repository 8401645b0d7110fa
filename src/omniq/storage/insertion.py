"""Insertion: which rows an enqueue inserts, and which unique keys they hold from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from omniq.errors import DuplicateTask
from omniq.storage.backend import Changes, DocumentChange, Record, Section
from omniq.storage.conflicts import Conflicts, wait_for_end
from omniq.storage.row_rules import Row
from omniq.storage.row_seals import RowSeals
from omniq.storage.step import UNIQUE


class UniqueKeys(msgspec.Struct):
    """Who holds unique keys, and documents of keys that no live task holds.

    `holders` has the ids of the tasks, by the names that rows have. A store that writes rows and documents
    one after the other may leave a document behind.
    """

    holders: dict[str, str] = {}
    left_behind: dict[str, bytes] = {}

    def hold(self, row: Row) -> list[DocumentChange]:
        """Have the row hold its key, under all its names."""
        return [
            DocumentChange(
                UNIQUE, name, self.left_behind.get(name), row.id.encode(), row.held_until
            )
            for name in row.unique_names
        ]


async def read_unique_keys(
    section: Section, rows: Sequence[Row], seals: RowSeals | None
) -> UniqueKeys:
    """Who holds the unique keys of these rows. With `seals`, a holder must be verified."""
    keys = UniqueKeys()
    wanted: dict[str, tuple[str, str | None]] = {}
    for row in rows:
        if row.unique:
            key = row.unique if seals is None else seals.unique_key(row)
            # Also under the key itself: so it is held by tasks that an older omniq has enqueued.
            names = row.unique_names if key is None else (*row.unique_names, key)
            wanted |= dict.fromkeys(names, (row.unique, key))
    if wanted:
        found = await section.documents(UNIQUE, sorted(wanted))
        ids = {name: document.data.decode(errors="replace") for name, document in found.items()}
        held = await section.load(list(ids.values()), bodies=seals is not None)
        for name, holder in ids.items():
            unique, key = wanted[name]
            record = held.get(holder)
            if record is not None and record.is_live and _is_holder(record.row, key, seals):
                keys.holders[unique] = holder
                continue
            document = found[name]
            keys.left_behind[name] = document.data
            if document.due is not None and document.due > section.now:
                # It has ended, and holds its key for longer.
                keys.holders[unique] = holder
    return keys


def _is_holder(row: Row, key: str | None, seals: RowSeals | None) -> bool:
    return seals is None or seals.is_holder(row, key)


def insertion(
    rows: Sequence[Row],
    bound: int | None,
    known: Mapping[str, Record] | None = None,
    keys: UniqueKeys | None = None,
    conflicts: Conflicts | None = None,
) -> tuple[Changes, list[str]]:
    """What to insert, and the id that each row's enqueue returns.

    `known` has what is stored under the ids of the rows, and `keys` who holds their unique keys; without
    them, nothing is stored and no key is held. `conflicts` settles what a row does that finds its key held.
    """
    keys = keys or UniqueKeys()
    holders = dict(keys.holders)
    ids: list[str] = []
    fresh: list[Row] = []
    documents: list[DocumentChange] = []
    for row in rows:
        record = known.get(row.id) if known else None
        if record is not None:
            if record.row.nonce != row.nonce:
                raise DuplicateTask(row.id)
            ids.append(row.id)
            continue
        holder = None if row.unique is None else holders.get(row.unique)
        if holder is not None and (
            conflicts is None
            or row.on_conflict is None
            or conflicts.is_settled(row, holder, {each.id: each for each in fresh})
        ):
            ids.append(holder)
            continue
        ids.append(row.id)
        fresh.append(row)
        if row.unique is not None:
            holders[row.unique] = row.id
            documents += keys.hold(row) if holder is None else _take_key(row, holder)
        if holder is not None:
            wait_for_end(row, holder)
    return Changes(inserted=fresh, bound=bound, documents=documents), ids


def _take_key(row: Row, holder: str) -> list[DocumentChange]:
    """Have the row hold its key in place of a task that runs."""
    before, after = holder.encode(), row.id.encode()
    return [
        DocumentChange(UNIQUE, name, before, after, row.held_until) for name in row.unique_names
    ]
