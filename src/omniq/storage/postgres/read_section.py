"""Read section: sections that only read. Reads of single tasks that arrive together are one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omniq.clock import Clock
from omniq.storage.backend import Document, Record
from omniq.storage.postgres.read_batcher import ReadBatcher
from omniq.storage.postgres.section import Fetch, PostgresSection
from omniq.storage.postgres.statements import SchemaNames

_DOCUMENTS = (
    "SELECT kind, key, data, due FROM {schema}.documents "
    "WHERE (kind, key) IN (SELECT * FROM unnest($1::text[], $2::text[]))"
)


class ReadBatchers:
    """The reads of records with their bodies, and of documents, of one backend."""

    def __init__(self, fetch: Fetch, names: SchemaNames, clock: Clock) -> None:
        self._fetch = fetch
        self._names = names
        self._clock = clock
        self.records: ReadBatcher[Record] = ReadBatcher(self._read_records)
        self.documents: ReadBatcher[Document] = ReadBatcher(self._read_documents)

    def section(self) -> ReadSection:
        """A section that only reads."""
        return ReadSection(self, self._fetch, self._names, self._clock)

    async def _read_records(self, ids: list[str]) -> dict[str, Record]:
        section = PostgresSection(self._fetch, self._names, self._clock)
        return await section.load(ids, bodies=True)

    async def _read_documents(self, names: list[str]) -> dict[str, Document]:
        pairs = [name.partition("/") for name in names]
        found = await self._fetch(
            self._names(_DOCUMENTS), [kind for kind, _, _ in pairs], [key for *_, key in pairs]
        )
        documents = [Document(*line) for line in found]
        return {f"{document.kind}/{document.key}": document for document in documents}


class ReadSection(PostgresSection):
    """A section that only reads."""

    def __init__(
        self, batchers: ReadBatchers, fetch: Fetch, names: SchemaNames, clock: Clock
    ) -> None:
        super().__init__(fetch, names, clock)
        self._batchers = batchers

    async def load(self, ids: Sequence[str], *, bodies: bool = False) -> dict[str, Record]:
        if len(ids) != 1:
            return await super().load(ids, bodies=bodies)
        found = await self._batchers.records.get(ids[0])
        return {} if found is None else {ids[0]: found}

    async def documents(self, kind: str, keys: Iterable[str]) -> dict[str, Document]:
        wanted = list(keys)
        if len(wanted) != 1:
            return await super().documents(kind, wanted)
        found = await self._batchers.documents.get(f"{kind}/{wanted[0]}")
        return {} if found is None else {found.key: found}
