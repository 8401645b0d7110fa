"""The output of tasks as documents: one head for each task, and pages of chunks in order.

The head lists the runs that have output, and the pages of each. A write adds to the newest page or makes new ones,
and deletes the oldest pages while there is more than may be kept. A reader that looks for news reads the head
alone. The head belongs to one record of the task's id: see `record_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated

import msgspec

from omniq import signing
from omniq.errors import SerializationError
from omniq.serialization import Serializer, encode_internal, internal_decoder
from omniq.settings import Settings
from omniq.signing import open_document, seal_document
from omniq.storage.backend import ANY, Document, DocumentChange, DocumentQuery, Record, Section
from omniq.storage.row_rules import Row
from omniq.tasks.task_output import (
    OutputBatch,
    OutputChunk,
    OutputPage,
    OutputPosition,
    StoredChunk,
    decoded_chunk,
)

OUTPUT, OUTPUT_PAGE = "output", "output_page"
"""The kinds of the documents."""

_PAGE_CHUNKS, _PAGE_BYTES, _PARTS = 256, 32_768, 8
"""The size of a page, which is at most one part of what is kept: pages are dropped as a whole."""

_MAX_PAGES = 256
"""The most pages of a task: a task that repeats may make a small one in each run."""

_READ_PAGES = 8
"""The most pages that one read returns."""

_LIVE_CHECK, _ENDED_CHECK = 300_000_000, 21_600_000_000
"""Microseconds after which a purge looks again whether the record of the output still exists."""

_CLEARED = b"\xc0"
"""A head in place of one that was not read: nothing of its pages is for the record any more."""


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A damaged head may have any number; a write adds to these."""

_Token = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class PageEntry(msgspec.Struct, array_like=True, frozen=True):
    """A page in the head: the number of its key, of its first chunk, and of its chunks, and its size."""

    index: _Number
    first: _Number
    count: _Number
    size: _Number


class RunEntry(msgspec.Struct, array_like=True):
    """A run in the head. `end` is the number of its newest chunk."""

    token: _Token
    attempt: _Number
    end: _Number = 0
    pages: list[PageEntry] = []


class Head(msgspec.Struct, array_like=True):
    """What a task has of output. `record` names its record, and `next_index` is that of the next page."""

    record: str
    next_index: _Number = 1
    runs: list[RunEntry] = []


class StoredPage(msgspec.Struct, array_like=True):
    """A page. It repeats where it belongs, since a page may be rewritten between two reads."""

    token: _Token
    first: _Number
    chunks: list[StoredChunk]


class OutputQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to read: behind `after`, of the newest run or of `all_runs`; of the `tail` newest chunks only."""

    after: OutputPosition | None = None
    all_runs: bool = False
    tail: int | None = None


class Bounds(msgspec.Struct, frozen=True):
    """How much is kept of a task."""

    chunks: int
    size: int

    @classmethod
    def of(cls, settings: Settings) -> Bounds:
        return cls(settings.max_output_chunks, settings.max_output_bytes)

    @property
    def page_chunks(self) -> int:
        return max(1, min(_PAGE_CHUNKS, self.chunks // _PARTS))

    @property
    def page_size(self) -> int:
        return min(_PAGE_BYTES, self.size // _PARTS)


_decode_head = internal_decoder(Head)
_decode_page = internal_decoder(StoredPage)


class OutputCodec:
    """Seals and opens the documents of outputs."""

    def __init__(self, serializer: Serializer) -> None:
        self._serializer = serializer

    def head(self, document: Document | None, record: str) -> Head | None:
        """The head, if it is that of the record with this name."""
        if document is None or document.data == _CLEARED:
            return None
        opened = open_document(self._serializer, signing.OUTPUT, document.data, document.key)
        head = _decode_head(opened)
        return head if head.record == record else None

    def head_to_extend(self, document: Document | None, record: str) -> Head | None:
        """The same for a writer, who replaces a head that cannot be verified."""
        try:
            return self.head(document, record)
        except SerializationError:
            return None

    def page(self, document: Document | None, token: int, first: int) -> StoredPage | None:
        """The page, if it is still the one that the head said."""
        if document is None:
            return None
        opened = open_document(self._serializer, signing.OUTPUT, document.data, document.key)
        page = _decode_page(opened)
        return page if (page.token, page.first) == (token, first) else None

    def page_to_extend(
        self, document: Document | None, token: int, first: int
    ) -> StoredPage | None:
        """The same for a writer, who begins another page if it cannot be verified."""
        try:
            return self.page(document, token, first)
        except SerializationError:
            return None

    def head_change(self, task_id: str, head: Head, due: int) -> DocumentChange:
        data = seal_document(self._serializer, signing.OUTPUT, encode_internal(head), task_id)
        return DocumentChange(OUTPUT, task_id, ANY, data, due)

    def page_change(self, key: str, page: StoredPage) -> DocumentChange:
        data = seal_document(self._serializer, signing.OUTPUT, encode_internal(page), key)
        return DocumentChange(OUTPUT_PAGE, key, ANY, data)


def record_name(row: Row) -> str:
    """What distinguishes the record of a row from all others of its id.

    The nonce alone does not: an enqueue whose reply was lost is repeated with it, and its task may have ended and
    been deleted meanwhile.
    """
    return f"{row.nonce}/{row.stored_at}"


def page_key(task_id: str, index: int) -> str:
    """The key of a page. No id has a colon."""
    return f"{task_id}:{index:010d}"


def cleared_output(task_id: str, now: int) -> DocumentChange:
    """Have nothing that is stored for the id count any more; a purge deletes it."""
    return DocumentChange(OUTPUT, task_id, ANY, _CLEARED, now)


# Writing


async def append(
    section: Section,
    codec: OutputCodec,
    rows: dict[str, Row],
    batches: Sequence[OutputBatch],
    bounds: Bounds,
) -> list[DocumentChange]:
    """The documents with these batches, one of each task, added to the output of these rows."""
    stored = await section.documents(OUTPUT, [batch.task_id for batch in batches])
    changes: list[DocumentChange] = []
    heads: dict[str, Head] = {}
    for batch in batches:
        document = stored.get(batch.task_id)
        record = record_name(rows[batch.task_id])
        head = codec.head_to_extend(document, record)
        if head is None and document is not None:
            changes += await _deleted_pages(section, batch.task_id)
        heads[batch.task_id] = head or Head(record)
    open_pages = {
        page_key(batch.task_id, entry.index): batch
        for batch in batches
        if (entry := _open_entry(heads[batch.task_id], batch, bounds)) is not None
    }
    found = await section.documents(OUTPUT_PAGE, list(open_pages)) if open_pages else {}
    for batch in batches:
        head = heads[batch.task_id]
        entry = _open_entry(head, batch, bounds)
        page = None
        if entry is not None:
            document = found.get(page_key(batch.task_id, entry.index))
            page = codec.page_to_extend(document, batch.token, entry.first)
        if not (addition := _Addition(head, batch, bounds)).is_empty:
            addition.write(page)
            addition.drop_oldest()
            changes += addition.changes(codec, section.now)
    return changes


async def _deleted_pages(section: Section, task_id: str) -> list[DocumentChange]:
    """The deletion of all pages that the id has, whichever record they belong to."""
    query = DocumentQuery(kind=OUTPUT_PAGE, prefix=f"{task_id}:")
    pages = await section.find_documents(query)
    return [DocumentChange(OUTPUT_PAGE, page.key, ANY, None) for page in pages]


def _open_entry(head: Head, batch: OutputBatch, bounds: Bounds) -> PageEntry | None:
    """The last page of the run, if the batch may continue it."""
    run = head.runs[-1] if head.runs else None
    if run is None or run.token != batch.token or not run.pages or batch.first > run.end + 1:
        return None
    last = run.pages[-1]
    is_full = last.count >= bounds.page_chunks or last.size >= bounds.page_size
    return None if is_full else last


class _Addition:
    """The chunks of a batch that are not stored yet, added to the head of its task."""

    def __init__(self, head: Head, batch: OutputBatch, bounds: Bounds) -> None:
        self._head, self._batch, self._bounds = head, batch, bounds
        end = head.runs[-1].end if head.runs and head.runs[-1].token == batch.token else 0
        # A batch is stored again if the reply to the first time was lost.
        known = max(0, end + 1 - batch.first)
        self._first = batch.first + known
        self._chunks = batch.chunks[known:]
        self._written: dict[int, StoredPage] = {}
        self._deleted: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self._chunks

    def write(self, page: StoredPage | None) -> None:
        """Add the chunks to that page, the last one of the run, and to new ones."""
        head, batch = self._head, self._batch
        if not head.runs or head.runs[-1].token != batch.token:
            head.runs.append(RunEntry(batch.token, batch.attempt))
        run = head.runs[-1]
        chunks, number = list(self._chunks), self._first
        index = None
        if page is not None:
            # Written again as a whole, with what is new behind what it has.
            index = run.pages.pop().index
            chunks[:0], number = page.chunks, page.first
        while chunks:
            index = self._new_index() if index is None else index
            count = self._fitting(chunks)
            part, chunks = chunks[:count], chunks[count:]
            size = sum(len(chunk.data) for chunk in part)
            run.pages.append(PageEntry(index, number, count, size))
            self._written[index] = StoredPage(batch.token, number, part)
            number, index = number + count, None
        run.end = number - 1

    def _fitting(self, chunks: list[StoredChunk]) -> int:
        size = count = 0
        for chunk in chunks[: self._bounds.page_chunks]:
            size += len(chunk.data)
            if count and size > self._bounds.page_size:
                break
            count += 1
        return count

    def _new_index(self) -> int:
        self._head.next_index += 1
        return self._head.next_index - 1

    def drop_oldest(self) -> None:
        """Drop the oldest pages while there is more than may be kept."""
        runs = self._head.runs
        pages = [(run, page) for run in runs for page in run.pages]
        chunks = sum(page.count for _, page in pages)
        size = sum(page.size for _, page in pages)
        kept = len(pages)
        for run, page in pages[:-1]:
            if chunks <= self._bounds.chunks and size <= self._bounds.size and kept <= _MAX_PAGES:
                break
            chunks, size, kept = chunks - page.count, size - page.size, kept - 1
            run.pages.remove(page)
            self._deleted.append(page.index)
        self._head.runs = [run for run in runs if run.pages]

    def changes(self, codec: OutputCodec, now: int) -> list[DocumentChange]:
        task_id = self._batch.task_id
        changes = [codec.head_change(task_id, self._head, now + _LIVE_CHECK)]
        changes += [
            codec.page_change(page_key(task_id, index), page)
            for index, page in self._written.items()
            if index not in self._deleted
        ]
        # Also of a page that this step would have made: it may stand for one that was stored before.
        changes += [
            DocumentChange(OUTPUT_PAGE, page_key(task_id, index), ANY, None)
            for index in self._deleted
        ]
        return changes


# Reading


async def read(
    section: Section, codec: OutputCodec, task_id: str, query: OutputQuery
) -> OutputPage | None:
    """Some of the output of a task; None if there is no record of it."""
    # Read first: the output of a record that has ended is complete.
    record = await section.record(task_id)
    if record is None:
        return None
    is_ended = not record.is_live
    document = await section.document(OUTPUT, task_id)
    head = codec.head(document, record_name(record.newest_row))
    if head is None:
        return OutputPage(after=query.after, is_final=is_ended)
    chosen = _chosen_pages(head, query)
    keys = [page_key(task_id, page.index) for _, page in chosen[:_READ_PAGES]]
    found = await section.documents(OUTPUT_PAGE, keys) if keys else {}
    chunks: list[OutputChunk] = []
    after, least = query.after, _first_of_tail(chosen, query)
    lost = 0
    for (run, entry), key in zip(chosen, keys, strict=False):
        page = codec.page(found.get(key), run.token, entry.first)
        for number, chunk in _numbered(page):
            behind = after.number if after is not None and after.run == run.token else 0
            if number <= behind or (run.token, number) < least:
                continue
            made = decoded_chunk(chunk, run.token, run.attempt, number)
            missed, lost = number - behind - 1 + lost, 0
            chunks.append(msgspec.structs.replace(made, missed=missed, is_first=not behind))
            after = OutputPosition(run.token, number)
        if page is None:
            # It was dropped after the head was read: the reader goes on behind it.
            end = entry.first + entry.count - 1
            lost += end - (after.number if after is not None and after.run == run.token else 0)
            after = OutputPosition(run.token, end)
    has_more = len(chosen) > _READ_PAGES
    return OutputPage(
        chunks=chunks, after=after, has_more=has_more, is_final=is_ended and not has_more
    )


def _numbered(page: StoredPage | None) -> Iterable[tuple[int, StoredChunk]]:
    return () if page is None else enumerate(page.chunks, start=page.first)


def _chosen_pages(head: Head, query: OutputQuery) -> list[tuple[RunEntry, PageEntry]]:
    """The pages that have what the query asks for, in order."""
    after = query.after
    runs = head.runs if query.all_runs else head.runs[-1:]
    if after is not None:
        runs = [run for run in runs if run.token >= after.run]
    pages = [
        (run, page)
        for run in runs
        for page in run.pages
        if after is None or run.token > after.run or page.first + page.count - 1 > after.number
    ]
    if query.tail is None:
        return pages
    kept, count = 0, 0
    while kept < len(pages) and count < query.tail:
        kept += 1
        count += pages[-kept][1].count
    return pages[len(pages) - kept :]


def _first_of_tail(
    chosen: Sequence[tuple[RunEntry, PageEntry]], query: OutputQuery
) -> tuple[int, int]:
    """The run and the number of the first chunk to return."""
    if query.tail is None or not chosen:
        return (0, 0)
    run, page = chosen[0]
    surplus = sum(page.count for _, page in chosen) - query.tail
    return (run.token, page.first + max(0, surplus))


# Purges


async def due_heads(section: Section, limit: int) -> list[Document]:
    """The heads whose records are to be looked for again."""
    query = DocumentQuery(kind=OUTPUT, due_by=section.now, limit=limit)
    return await section.find_documents(query)


async def purged(
    section: Section, heads: Sequence[Document], is_of: Callable[[Document, Record], bool]
) -> list[DocumentChange]:
    """The deletion of the output that has no record any more; the rest is looked at again later.

    A head without data is too large to be read: it is damaged.
    """
    records = await section.load([head.key for head in heads])
    changes: list[DocumentChange] = []
    for head in heads:
        record = records.get(head.key)
        if head.data and record is not None and is_of(head, record):
            due = section.now + (_LIVE_CHECK if record.is_live else _ENDED_CHECK)
            if record.finished is not None and record.letter is None:
                due = min(due, record.finished.expires_at + 1)
            changes.append(DocumentChange(OUTPUT, head.key, head.data, head.data, due))
            continue
        changes.append(DocumentChange(OUTPUT, head.key, head.data or ANY, None))
        changes += await _deleted_pages(section, head.key)
    return changes


async def forgotten(
    section: Section, ids: Sequence[str], gone: Collection[str]
) -> list[DocumentChange]:
    """Have the next purge look for the records of these ids, which are deleted in this step.

    Of those that are `gone`, neither a record nor a dead letter is left: what is stored does not count any more.
    """
    found = await section.documents(OUTPUT, ids) if ids else {}
    return [
        DocumentChange(
            OUTPUT,
            key,
            head.data or ANY,
            _CLEARED if key in gone else head.data or _CLEARED,
            section.now,
        )
        for key, head in found.items()
    ]
