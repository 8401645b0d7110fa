"""The history: runs per minute and hour, versions, ended workers and operator actions, as documents with ordered keys.

A worker stores its own counts of a minute under `new:`. Some time later, any worker adds them to the counts of the
whole fleet for that minute and for its hour, and deletes them, in one atomic step. The history therefore has one
document for each minute and one for each hour, for any number of workers. Minutes are deleted after 3 days, hours
after 90 days.

It contains names of functions and queues, but no arguments. It is not sealed: a client that can write to the store
can change the history, but this affects nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from omniq.clock import to_micros
from omniq.models import AuditEntry, EndedWorker, Version
from omniq.serialization import encode_internal, lenient_decoder
from omniq.storage.backend import ANY, Changes, Document, DocumentChange, DocumentQuery, Section
from omniq.storage.run_counts import FunctionCounts, PeriodCounts, RunCounts

KIND, VERSION, ENDED, AUDIT = "run_counts", "version", "ended_worker", "audit"
"""The kinds of the documents."""

_KINDS = (KIND, VERSION, ENDED, AUDIT)

MINUTE, HOUR = 60, 3_600

_DAY = 86_400 * 1_000_000
_KEPT_MINUTES, _KEPT_HOURS, _KEPT_ENDED = 3 * _DAY, 90 * _DAY, _DAY
_NEW, _MINUTES, _HOURS = "new:", "minute:", "hour:"
_MERGE_AFTER = 3 * MINUTE
"""Seconds after the end of a minute in which the counts of all workers usually arrive."""

_LATEST = 10**17 - 1
_PAGE = 1_000
_MERGED, _PURGED = 200, 500
"""The most documents that one step merges or deletes, so that other steps can run in between."""

_decode = lenient_decoder(PeriodCounts, None)
_decode_version = lenient_decoder(Version, None)
_decode_ended = lenient_decoder(EndedWorker, None)
_decode_entry = lenient_decoder(AuditEntry, None)


class _OnlyTotal(msgspec.Struct, array_like=True):
    """The beginning of `PeriodCounts`: most of the decoding time is spent on the rest."""

    start: int
    total: RunCounts


_decode_total = lenient_decoder(_OnlyTotal, None)


class _RawLine(msgspec.Struct, array_like=True):
    """`FunctionCounts` with counts that are decoded only if they are wanted."""

    func_path: str
    queue: str
    counts: msgspec.Raw


class _RawLines(msgspec.Struct, array_like=True):
    """`PeriodCounts` with such lines."""

    start: int
    total: RunCounts
    functions: list[_RawLine] = []
    workers: dict[str, RunCounts] = {}


_decode_lines = lenient_decoder(_RawLines, None)
_decode_counts = lenient_decoder(RunCounts, None)


def new_counts(owner: str, minutes: Sequence[PeriodCounts], now: int) -> list[DocumentChange]:
    """The documents of a worker's own minutes."""
    return [
        DocumentChange(
            KIND,
            f"{_key(_NEW, each.start)}:{owner}",
            ANY,
            encode_internal(each),
            now + _KEPT_MINUTES,
        )
        for each in minutes
    ]


async def may_merge(section: Section) -> bool:
    """Whether there is a minute of a worker to merge. This check is cheaper than a step that writes."""
    first = await section.find_documents(DocumentQuery(kind=KIND, prefix=_NEW, limit=1))
    return bool(first) and first[0].key < _merged_until(section)


def _merged_until(section: Section) -> str:
    return _key(_NEW, section.now // 1_000_000 - MINUTE - _MERGE_AFTER)


async def merge(section: Section) -> int:
    """Add some minutes of workers to those of the fleet; returns how many, 0 if there are no more."""
    until = _merged_until(section)
    page = await section.find_documents(DocumentQuery(kind=KIND, prefix=_NEW, limit=_MERGED))
    ripe = [document for document in page if document.key < until]
    if not ripe:
        return 0
    by_minute: dict[int, list[tuple[str, PeriodCounts]]] = defaultdict(list)
    for document in ripe:
        counts = _decode(document.data)
        if counts is not None:
            by_minute[counts.start].append((document.key.rpartition(":")[2], counts))
    hours = {start - start % HOUR for start in by_minute}
    keys = [_key(_MINUTES, start) for start in by_minute] + [_key(_HOURS, hour) for hour in hours]
    stored = await section.documents(KIND, keys)
    merged: dict[str, PeriodCounts] = {}
    for start, found in by_minute.items():
        minute = _stored(stored, merged, _MINUTES, start)
        hour = _stored(stored, merged, _HOURS, start - start % HOUR)
        for owner, counts in found:
            # Stored twice: the reply to the first write was lost, and that one has been merged.
            if owner in minute.workers:
                continue
            minute.add(msgspec.structs.replace(counts, workers={owner: counts.total}))
            hour.add(msgspec.structs.replace(counts, workers={}))
    changes = [
        DocumentChange(
            KIND,
            key,
            stored[key].data if key in stored else None,
            encode_internal(counts),
            section.now + (_KEPT_MINUTES if key.startswith(_MINUTES) else _KEPT_HOURS),
        )
        for key, counts in merged.items()
    ]
    changes += [DocumentChange(KIND, document.key, document.data, None) for document in ripe]
    await section.write(Changes(documents=changes))
    return len(ripe)


def _stored(
    stored: dict[str, Document], merged: dict[str, PeriodCounts], tier: str, start: int
) -> PeriodCounts:
    """The counts of a period: the stored ones, and those merged so far in this step."""
    key = _key(tier, start)
    if key not in merged:
        found = _decode(stored[key].data) if key in stored else None
        merged[key] = found or PeriodCounts(start, RunCounts())
    return merged[key]


async def may_purge(section: Section) -> bool:
    """Whether the retention time of a document has passed."""
    queries = [DocumentQuery(kind=kind, due_by=section.now, limit=1) for kind in _KINDS]
    return any([await section.find_documents(query) for query in queries])


async def purge(section: Section) -> int:
    """Delete some documents whose retention time has passed; returns how many, 0 if there are no more."""
    for kind in _KINDS:
        query = DocumentQuery(kind=kind, due_by=section.now, limit=_PURGED)
        found = await section.find_documents(query)
        if found:
            changes = [DocumentChange(kind, each.key, ANY, None) for each in found]
            await section.write(Changes(documents=changes))
            return len(found)
    return 0


async def read(
    section: Section,
    since: int,
    until: int,
    *,
    hours: bool,
    only_totals: bool,
    function: str | None = None,
    queue: str | None = None,
) -> list[PeriodCounts]:
    """The counts of the periods from that of `since` until before `until`, in order of time."""
    size, tier = (HOUR, _HOURS) if hours else (MINUTE, _MINUTES)
    since -= since % size
    decode = _decoder(only_totals, function, queue)
    # New counts are read first: those that are merged meanwhile are recognized by their owners.
    new = await _between(section, _NEW, since, until)
    periods: dict[int, PeriodCounts] = {}
    owners: dict[int, set[str]] = {}
    for document in await _between(section, tier, since, until):
        counts = decode(document.data)
        if counts is not None:
            periods[counts.start] = counts
    if new and (hours or only_totals):
        owners = await _merged_owners(section, new)
    for document in new:
        counts = decode(document.data)
        if counts is None or not since <= counts.start < until:
            continue
        owner = document.key.rpartition(":")[2]
        start = counts.start - counts.start % size
        period = periods.setdefault(start, PeriodCounts(start, RunCounts()))
        if owner in owners.get(counts.start, ()) or (not hours and owner in period.workers):
            continue
        if only_totals:
            period.total.add(counts.total)
        else:
            workers = {} if hours else {owner: counts.total}
            period.add(msgspec.structs.replace(counts, workers=workers))
    return [periods[start] for start in sorted(periods)]


def _decoder(
    only_totals: bool, function: str | None, queue: str | None
) -> Callable[[bytes], PeriodCounts | None]:
    """The fastest decoder of what is wanted."""
    if only_totals:
        return _total_of
    if function is None and queue is None:
        return _decode
    return lambda data: _lines_of(data, function, queue)


def _total_of(data: bytes) -> PeriodCounts | None:
    short = _decode_total(data)
    return None if short is None else PeriodCounts(short.start, short.total)


def _lines_of(data: bytes, function: str | None, queue: str | None) -> PeriodCounts | None:
    """The period with the lines of one function or queue only."""
    raw = _decode_lines(data)
    if raw is None:
        return None
    lines = [
        FunctionCounts(line.func_path, line.queue, counts)
        for line in raw.functions
        if function in (None, line.func_path) and queue in (None, line.queue)
        if (counts := _decode_counts(bytes(line.counts))) is not None
    ]
    return PeriodCounts(raw.start, raw.total, lines, raw.workers)


async def _merged_owners(section: Section, new: Iterable[Document]) -> dict[int, set[str]]:
    """The owners whose counts were merged since, by minute."""
    starts = {int(document.key.split(":")[1]) for document in new}
    stored = await section.documents(KIND, [_key(_MINUTES, start) for start in starts])
    found = [_decode(document.data) for document in stored.values()]
    return {counts.start: set(counts.workers) for counts in found if counts is not None}


async def _between(section: Section, tier: str, since: int, until: int) -> list[Document]:
    found: list[Document] = []
    after, end = _key(tier, since - 1), _key(tier, until)
    while True:
        query = DocumentQuery(kind=KIND, prefix=tier, after=after, limit=_PAGE)
        page = await section.find_documents(query)
        found += [document for document in page if document.key < end]
        if len(page) < _PAGE or page[-1].key >= end:
            return found
        after = page[-1].key


def _key(tier: str, start: int) -> str:
    return f"{tier}{max(0, start):012d}"


async def note_version(section: Section, version: Version) -> bool:
    """Store when this version was first started; False if it is known."""
    key = f"{version.code}:{version.omniq}"
    stored = await section.document(VERSION, key)
    if stored is not None:
        return False
    data = encode_internal(version)
    change = DocumentChange(VERSION, key, None, data, section.now + _KEPT_HOURS)
    await section.write(Changes(documents=[change]))
    return True


async def versions(section: Section) -> list[Version]:
    """The versions in the order in which they were first started."""
    found = await section.find_documents(DocumentQuery(kind=VERSION, limit=_PAGE))
    known = [version for each in found if (version := _decode_version(each.data)) is not None]
    return sorted(known, key=lambda version: version.started_at)


def ended_worker(ended: EndedWorker, now: int) -> DocumentChange:
    """The document of a worker that has ended."""
    return DocumentChange(ENDED, ended.worker.id, ANY, encode_internal(ended), now + _KEPT_ENDED)


async def ended_workers(section: Section) -> list[EndedWorker]:
    """The workers that ended in the last 24 hours, newest first, up to a limit."""
    found = await section.find_documents(DocumentQuery(kind=ENDED, limit=_PAGE))
    known = [ended for each in found if (ended := _decode_ended(each.data)) is not None]
    return sorted(known, key=lambda ended: ended.ended_at, reverse=True)


def audit_entry(entry: AuditEntry, entry_id: str, now: int) -> DocumentChange:
    """The document of an operator action. Its key sorts the newest first."""
    key = f"{_LATEST - to_micros(entry.at):017d}:{entry_id}"
    return DocumentChange(AUDIT, key, ANY, encode_internal(entry), now + _KEPT_HOURS)


async def audit_log(section: Section, after: str, limit: int) -> tuple[list[AuditEntry], str]:
    """A page of operator actions, newest first, and the key of its last entry if another page follows."""
    found = await section.find_documents(DocumentQuery(kind=AUDIT, after=after, limit=limit))
    known = [entry for each in found if (entry := _decode_entry(each.data)) is not None]
    return known, found[-1].key if len(found) == limit else ""
