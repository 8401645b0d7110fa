"""Results, dead letters, checkpoints, progress, schedules and pauses in Redis, and all reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omniq.errors import DuplicateTask, QueueFull
from omniq.gate_rules import GateState
from omniq.models import DeadLetter, Progress, QueueStats, Schedule, WorkerInfo
from omniq.serialization import encode_internal, internal_decoder
from omniq.storage import row_rules
from omniq.storage.base import BaseStorage
from omniq.storage.inspection import DeadQuery, Scan, ScanQuery, TaskQuery
from omniq.storage.newest_by_id import scan_by_id
from omniq.storage.redis import encoding, queries
from omniq.storage.redis.encoding import STAMP_SIZE, stamp
from omniq.storage.redis.scripts import Scripts, raw
from omniq.storage.row_rules import Row

_decode_gate = internal_decoder(GateState)
_decode_progress = internal_decoder(Progress)


class RedisSideData(BaseStorage):
    """The verbs of `omniq.storage.side_data` and `omniq.storage.inspection`, each one script or command."""

    _scripts: Scripts

    def _now(self) -> int:
        """The time of the store's clock, as far as it is known here."""
        return self._clock.micros()

    async def _run(self, name: str, *arguments: Any) -> Any:
        self._check_open()
        return await self._scripts.run(name, *arguments)

    def _full(self) -> QueueFull:
        return QueueFull(self._max_pending or 0)

    # Retention

    async def _purge_results(self, before: int) -> int:
        return sum([await self._purge(stamp(before), letter) for letter in "sfc"])

    async def _purge_expired(self) -> int:
        return await self._purge("", "")

    async def _purge(self, before: str, letter: str) -> int:
        """Delete finished tasks in calls short enough not to hold up those of other clients."""
        purged, cursor = 0, b""
        while cursor != b"0":
            count, cursor = await self._run("purge_results", before, letter, cursor.decode() or "0")
            purged += count
        return purged

    async def _delete_task(self, task_id: str) -> bool:
        count, _ = await self._run("purge_results", task_id, "", "")
        return bool(count)

    # Dead letters

    async def _retry_dead(self, task_id: str, body: bytes | None, from_start: bool) -> bool:
        while True:
            found = await self._run("get_dead", task_id)
            if not found:
                return False
            encoded, _, record = found
            _, row = encoding.decode_dead(encoded, record)
            row_rules.retry_dead(row, self._now(), body=body)
            answer, *holder = await self._run(
                "retry_dead",
                raw(encoded),
                encoding.new_row(row),
                self._max_pending or 0,
                int(from_start),
            )
            match answer:
                case b"full":
                    raise self._full()
                case b"taken":
                    raise DuplicateTask(holder[0].decode())
                case b"done":
                    return True
                case b"gone":
                    return False

    async def delete_dead(self, task_id: str) -> bool:
        deleted: int = await self._run("delete_dead", [task_id], "")
        return deleted == 1

    async def _purge_dead(self, before: int) -> int:
        return await queries.purge_dead(self._run, stamp(before))

    async def _list_dead(self, query: DeadQuery) -> list[DeadLetter]:
        return await queries.list_dead(self._run, query)

    async def get_dead(self, task_id: str) -> DeadLetter | None:
        found = await self._run("get_dead", task_id)
        if not found:
            return None
        checkpoint = found[1][STAMP_SIZE:] if found[1] else None
        return msgspec.structs.replace(encoding.decode_dead_letter(found[0]), checkpoint=checkpoint)

    async def _find_dead_row(self, task_id: str) -> Row | None:
        found = await self._run("get_dead", task_id)
        return encoding.decode_dead(found[0], found[2])[1] if found else None

    # Checkpoints and progress

    async def _save_checkpoint(
        self, owner: str, task_id: str, token: int, checkpoint: bytes
    ) -> bool:
        saved: int = await self._run("save_checkpoint", owner, task_id, token, raw(checkpoint))
        return saved == 1

    async def load_checkpoint(self, task_id: str) -> bytes | None:
        found = await self._field("checkpoints", task_id)
        return None if found is None else found[STAMP_SIZE:]

    async def _purge_checkpoints(self, before: int) -> int:
        purged, cursor = 0, b""
        while cursor != b"0":
            count, cursor = await self._run(
                "purge_checkpoints", stamp(before), cursor.decode() or "0"
            )
            purged += count
        return purged

    async def _report_progress(self, owner: str, reports: Sequence[Progress]) -> None:
        encoded = [(each.task_id, each.token, raw(encode_internal(each))) for each in reports]
        await self._run("report_progress", owner, encoded)

    async def get_progress(self, task_id: str) -> Progress | None:
        found = await self._field("progress", task_id)
        return None if found is None else _decode_progress(found)

    # Schedules

    async def _put_schedule(self, schedule: Schedule) -> None:
        encoded = queries.encode_schedule(schedule, self._serializer)
        nonce = self._clock.new_id()
        await self._run("put_schedule", schedule.id, nonce, raw(encoded), schedule.version)

    async def get_schedule(self, schedule_id: str) -> Schedule | None:
        found = await self._field("schedules", schedule_id)
        return None if found is None else queries.decode_schedule(found, self._serializer)

    async def list_schedules(self) -> list[Schedule]:
        found = await self._fields("schedules")
        return queries.decode_schedules(found, self._serializer)

    async def delete_schedule(self, schedule_id: str) -> bool:
        deleted: int = await self._run("delete_schedule", schedule_id)
        return deleted == 1

    async def _fire_schedule(self, schedule: Schedule, advanced: Schedule, row: Row | None) -> bool:
        answer = await self._run(
            "fire_schedule",
            schedule.id,
            schedule.version,
            self._clock.new_id(),
            raw(queries.encode_schedule(advanced, self._serializer)),
            self._max_pending or 0,
            0 if row is None else encoding.new_row(row),
        )
        if answer == b"full":
            raise self._full()
        fired: bool = answer == b"done"
        return fired

    # Queues and gates

    async def _set_paused(self, queue: str, paused: bool) -> None:
        if paused:
            await self._scripts.command("SADD", self._scripts.key("paused"), queue)
        else:
            await self._run("resume_queue", queue)

    async def paused_queues(self) -> frozenset[str]:
        self._check_open()
        found = await self._scripts.command("SMEMBERS", self._scripts.key("paused"))
        return frozenset(queue.decode() for queue in found)

    async def gates(self) -> dict[str, GateState]:
        found = await self._fields("gates")
        return {key: _decode_gate(state) for key, state in found.items()}

    # Reading

    async def _field(self, key: str, field: str) -> bytes | None:
        self._check_open()
        found: bytes | None = await self._scripts.command("HGET", self._scripts.key(key), field)
        return found

    async def _fields(self, key: str) -> Mapping[str, bytes]:
        self._check_open()
        found = await self._scripts.command("HGETALL", self._scripts.key(key))
        return queries.hash_fields(found)

    async def _find_newest_result(self, task_id: str) -> bytes | None:
        return await self._field("newest", task_id)

    async def _list(self, query: TaskQuery) -> list[Row]:
        return await queries.list_rows(self._run, query)

    async def _scan(self, query: ScanQuery) -> Scan:
        async def read_backwards(before: str, limit: int) -> tuple[list[Row], str | None]:
            return await queries.read_backwards(self._run, query, before, limit)

        return await scan_by_id(query, read_backwards, self._list)

    async def count_waiting(self) -> int:
        """How many tasks wait for their next run. A pool calls this often: the counters are few."""
        counters = await self._fields("counts")
        return sum(
            queries.parse_count(count) for name, count in counters.items() if name[-1] in "pt"
        )

    async def stats(self) -> QueueStats:
        return queries.parse_stats(await self._run("stats"))

    async def workers(self) -> list[WorkerInfo]:
        return queries.parse_workers(*await self._run("workers"))

    async def _set_worker_paused(self, owner: str, paused: bool) -> bool:
        return bool(await self._run("pause_worker", owner, int(paused)))

    async def held_by(self, owner: str) -> dict[str, int]:
        return queries.parse_held(await self._run("held_by", owner))[0]
