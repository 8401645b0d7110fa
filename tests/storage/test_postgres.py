"""Tests of the PostgreSQL backend alone: wake-ups, migrations, index use, and lost replies."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import asyncpg
import psycopg
import pytest

from omniq.clock import SYSTEM_CLOCK, to_micros
from omniq.errors import (
    InvalidTask,
    LeaseLost,
    QueueFull,
    SettingsError,
    StorageError,
    StorageRefused,
)
from omniq.gate_rules import FOREVER, GateState, gates_of
from omniq.models import (
    Attempt,
    DeadLetter,
    Limit,
    Progress,
    Runnable,
    Schedule,
    TaskResult,
    TaskStatus,
)
from omniq.outcomes import Released, Retried, Succeeded
from omniq.serialization import MsgspecSerializer, encode_internal
from omniq.settings import Settings
from omniq.storage import open_storage, row_rules
from omniq.storage.backend import Changes, DocumentQuery, Section, Wanted, Work
from omniq.storage.inspection import TaskQuery
from omniq.storage.postgres import (
    PostgresStorage,
    encoding,
    migrations,
    statements,
    vacuum,
    wakeups,
)
from omniq.storage.postgres.enqueue import PART_SIZE
from omniq.storage.postgres.migrations import NEWEST
from omniq.storage.postgres.section import PostgresSection
from omniq.storage.types import Claim
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import claim_one, ids
from omniq.testing.fault_proxy import FaultProxy
from tests.cli.in_process import run_command
from tests.storage.emptied_gates import claimed_beside_an_emptied_gate
from tests.storage.limit_games import use_rules
from tests.storage.postgres_stores import Schema

pytestmark = pytest.mark.timeout(120)

PATIENCE = 30.0
"""Seconds of real time after which a wait for an event fails."""

LARGE = [f"n{number}" for number in range(2 * PART_SIZE + 1)]
"""The ids of a batch that is sent in three parts."""


@pytest.fixture(scope="module")
def module_schema(postgres_server_url: str) -> Iterator[Schema]:
    schema = Schema(postgres_server_url)
    yield schema
    schema.drop()


@pytest.fixture
def schema(module_schema: Schema) -> Schema:
    module_schema.wipe()
    return module_schema


def success(task):
    return Succeeded(task.id, task.token, a_result(task))


async def test_an_enqueue_waits_for_no_transaction_of_a_caller_that_enqueues_below_a_bound(
    postgres_url, postgres_server_url
):
    async with (
        open_storage(f"{postgres_url}&max_pending=2") as caller,
        open_storage(f"{postgres_url}&max_pending=2") as other,
    ):
        connection = await asyncpg.connect(postgres_server_url)
        transaction = connection.transaction()
        await transaction.start()
        await caller.enqueue_within(connection, [a_task("a"), a_task("b")])
        with pytest.raises(QueueFull):
            await caller.enqueue_within(connection, [a_task("c")])
        # What the open transaction holds is not counted yet.
        await asyncio.wait_for(other.enqueue(a_task("d")), 20)
        await transaction.commit()
        await connection.close()

        assert await other.count_waiting() == 3
        with pytest.raises(QueueFull):
            await other.enqueue(a_task("e"))


# Setting up


@pytest.mark.deep
@pytest.mark.fault("F98")
def test_many_processes_may_set_up_a_database_at_the_same_time(postgres_url):
    script = (
        "import asyncio, sys\n"
        "from omniq.storage import open_storage\n"
        "async def main():\n"
        "    async with open_storage(sys.argv[1]) as storage:\n"
        "        await storage.stats()\n"
        "asyncio.run(main())\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, postgres_url], stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    failures = [process.communicate()[1] for process in started]

    assert [process.returncode for process in started] == [0] * 8, failures


async def test_an_existing_empty_schema_is_set_up_too(postgres_url, postgres_server_url):
    name = postgres_url.rpartition("=")[2]
    administrator = await asyncpg.connect(postgres_server_url)
    await administrator.execute(f"CREATE SCHEMA {name}")
    await administrator.close()

    async with open_storage(postgres_url) as storage:
        assert await storage.list_tasks() == []


async def test_a_newer_schema_is_refused_with_what_to_do(postgres_url):
    async with open_storage(postgres_url) as storage:
        assert isinstance(storage, PostgresStorage)
        insert = "INSERT INTO {schema}.versions (version, oldest) VALUES (99, 99)"
        await storage._backend.statements.fetch(insert)

    for refused in (storage.open(), storage.upgrade_schema()):
        with pytest.raises(StorageRefused, match=r"version 99.*use a newer omniq"):
            await refused


async def test_a_newer_schema_that_only_adds_is_used(postgres_url):
    async with open_storage(postgres_url) as storage:
        assert isinstance(storage, PostgresStorage)
        await storage._backend.statements.fetch("INSERT INTO {schema}.versions VALUES (99)")

    async with storage:
        await storage.enqueue(a_task("a"))

        assert ids(await storage.reserve(1)) == ["a"]
        assert await storage.check_schema() == 99


# Each is a better match than the function or operator of PostgreSQL that omniq means.
PLANTED = """
CREATE FUNCTION public.caught() RETURNS text LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'a planted function was called'; END $$;
CREATE FUNCTION public.hashtextextended(text, int) RETURNS bigint
    LANGUAGE sql AS 'SELECT public.caught()::bigint';
CREATE FUNCTION public.cardinality(text[]) RETURNS int LANGUAGE sql AS 'SELECT public.caught()::int';
CREATE FUNCTION public.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS 'SELECT public.caught()';
CREATE FUNCTION public.array_to_string(text[], text) RETURNS text
    LANGUAGE sql AS 'SELECT public.caught()';
CREATE FUNCTION public.format(text, regprocedure) RETURNS text
    LANGUAGE sql AS 'SELECT public.caught()';
CREATE FUNCTION public.times(numeric, int) RETURNS numeric
    LANGUAGE sql AS 'SELECT public.caught()::numeric';
CREATE OPERATOR public.* (LEFTARG = numeric, RIGHTARG = int, FUNCTION = public.times);
CREATE FUNCTION public.joined(text, bigint) RETURNS text LANGUAGE sql AS 'SELECT public.caught()';
CREATE OPERATOR public.|| (LEFTARG = text, RIGHTARG = bigint, FUNCTION = public.joined);
"""


@pytest.mark.parametrize("poll_only", [False, True], ids=["sessions", "pooler"])
async def test_functions_that_others_have_created_in_public_are_not_called(
    postgres_database, poll_only
):
    administrator = await asyncpg.connect(postgres_database)
    await administrator.execute(PLANTED)
    planted = PostgresStorage(postgres_database, poll_only=poll_only)
    await planted.upgrade_schema()
    async with planted as storage, PostgresStorage(postgres_database) as other:
        waiting = asyncio.create_task(other.wait_for_work(PATIENCE))
        limits = [Limit(key="k", max_running=1)]
        await storage.enqueue_many([*some_tasks("abc", limits=limits), a_task("d", unique="u")])
        await waiting
        first = await storage.reserve(5)
        recorded, _ = await storage.record_and_reserve([success(task) for task in first], 5)
        await storage.give_back_abandoned()
        await storage.cancel("b")
        async with administrator.transaction():
            await storage.enqueue_within(administrator, [a_task("e", unique="u")])
        await storage.purge_dead(SYSTEM_CLOCK.now())

        assert recorded == [True, True]
        assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 2
        assert len(await storage.list_tasks()) == 5
        assert storage.schema_sql().startswith(
            "BEGIN;\nSET LOCAL search_path = pg_catalog, pg_temp;"
        )
    # They would be called without that: this is what the test would see.
    with pytest.raises(asyncpg.RaiseError, match="planted"):
        await administrator.fetchval("SELECT hashtextextended('a', 0)")
    await administrator.close()


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(signing_key="the-key-of-this-store"),
        Settings(encryption_key="the-key-of-this-store"),
    ],
    ids=["plain", "signed", "encrypted"],
)
async def test_a_unique_key_is_held_in_a_transaction_of_the_caller_too(postgres_database, settings):
    """With a key, a holder must be verified, so that its body is read on the caller's connection."""
    connection = await asyncpg.connect(postgres_database)
    async with PostgresStorage(postgres_database, settings=settings) as storage:
        await storage.enqueue(a_task("a", unique="u"))
        async with connection.transaction():
            tasks = [a_task("b", unique="u"), a_task("c", unique="v")]
            assert await storage.enqueue_within(connection, tasks) == ["a", "c"]
        assert ids(await storage.reserve(5)) == ["a", "c"]
    await connection.close()


async def test_a_transaction_that_cannot_see_the_holder_of_a_unique_key_is_refused(
    postgres_database,
):
    connection = await asyncpg.connect(postgres_database)
    async with PostgresStorage(postgres_database) as storage:
        transaction = connection.transaction(isolation="repeatable_read")
        await transaction.start()
        await connection.fetchval("SELECT count(*) FROM pg_class")
        await storage.enqueue(a_task("a", unique="u"))
        with pytest.raises(StorageError, match="roll it back, and begin it again"):
            await storage.enqueue_within(connection, [a_task("b", unique="u")])
        await transaction.rollback()
        async with connection.transaction(isolation="repeatable_read"):
            assert await storage.enqueue_within(connection, [a_task("b", unique="u")]) == ["a"]
    await connection.close()


async def test_the_printed_sql_sets_up_what_opening_sets_up(postgres_database):
    theirs = open_storage(f"{postgres_database}?schema=theirs")
    assert isinstance(theirs, PostgresStorage)
    administrator = await asyncpg.connect(postgres_database)
    await administrator.execute(theirs.schema_sql())

    async def shape(name):
        found = await administrator.fetch(
            "SELECT replace(indexdef, $1, '') FROM pg_indexes WHERE schemaname = $1 "
            "UNION SELECT proname || replace(pg_get_function_arguments(oid), $1, '') FROM pg_proc "
            "WHERE pronamespace = $1::regnamespace",
            name,
        )
        return {text for (text,) in found}

    async with theirs, open_storage(f"{postgres_database}?schema=ours"):
        assert await shape("theirs") == await shape("ours")
    await administrator.close()


@pytest.mark.parametrize("name", ["Jobs", "a-b", "1st", 'x"y', "", "n" * 49])
def test_a_bad_schema_name_is_refused(name):
    with pytest.raises(SettingsError, match="schema"):
        PostgresStorage("postgresql://localhost/none", schema=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/no_such_database"}, "does not exist"),
        ({"netloc": "omniq:wrong@"}, "password"),
    ],
)
@pytest.mark.fault("F43")
async def test_an_error_that_retrying_cannot_fix_is_refused(postgres_server_url, change, message):
    from urllib.parse import urlsplit

    parts = urlsplit(postgres_server_url)
    if "netloc" in change:
        if parts.password is None:
            pytest.skip("this server requires no password")
        change = {"netloc": f"{parts.username}:wrong@{parts.hostname}:{parts.port}"}
    with pytest.raises(StorageRefused, match=message) as refused:
        await PostgresStorage(parts._replace(**change).geturl()).open()

    assert parts.password is None or parts.password not in str(refused.value)


def test_the_migrations_are_numbered_without_gaps_or_repeats():
    numbers = [name[:4] for name in statements.migrations()]

    assert numbers == [f"{number:04}" for number in range(1, migrations.NEWEST + 1)]


VERSION_3 = """
INSERT INTO {schema}.live (
    rank, due, visible, created_at, attempts, token, result_ttl, crashes, place, status, repeats,
    id, nonce, queue, func_path, owner, unique_key, parked, lot, gates, body
) VALUES
    (~0, 1, 0, 1, 0, 0, 9000000, 0, 0, 0, false, 'plain', 'n', 'q', 'f.g', NULL, 'u', NULL, NULL, NULL, ''),
    (~5, 2, 0, 1, 1, 3, 9000000, 1, 1, 2, false, 'suspect', 'n', 'q', 'f.g', NULL, NULL, NULL, NULL, NULL, ''),
    (~0, 3, 9e15, 1, 0, 0, 9000000, 0, 2, 0, true, 'later', 'n', 'q', 'f.g', NULL, NULL, NULL, NULL, NULL, ''),
    (~0, 4, 0, 1, 0, 1, 9000000, 0, 4, 1, false, 'held', 'n', 'q', 'f.g', 'gone', NULL, NULL, NULL, {gates}, ''),
    (~0, 5, 0, 1, 0, 0, 9000000, 0, 3, 0, false, 'parked', 'n', 'q', 'f.g', NULL, NULL, {key}, '0/q/' || {key},
        {gates}, ''),
    (~0, 6, 0, 1, 0, 0, 9000000, 0, 5, 0, false, 'gated', 'n', 'q', 'f.g', NULL, NULL, NULL, NULL, {gates}, '');
INSERT INTO {schema}.finished VALUES
    (9, ~0, 1, 0, 1, 2, 3, 3, 7, 9000000, NULL, 0, 1, 3, false, false, 'done', 'n', 'q', 'f.g', NULL, NULL,
        NULL, '', 8, 9e15, {result});
INSERT INTO {schema}.dead VALUES
    (8, ~0, 1, 0, 1, 2, 3, 3, 7, 9000000, NULL, 0, 1, 4, false, false, 'buried', 'n', 'q', 'f.g', NULL, NULL,
        {history}, '', 8, 'bad', {letter});
INSERT INTO {schema}.newest VALUES ('later', {result});
INSERT INTO {schema}.progress VALUES ('held', {progress});
INSERT INTO {schema}.checkpoints VALUES ('held', 5, 'saved');
INSERT INTO {schema}.schedules VALUES ('daily', 7, {schedule}, {task});
INSERT INTO {schema}.paused VALUES ('stopped');
INSERT INTO {schema}.gates VALUES
    ({key}, {forever}, {state}), ('rate:idle:1', 0, {idle}), ('rate:used:1', 0, {used});
"""
"""What a store of version 3 may hold."""


_STARTED = 1_700_000_000_000_000
_NEXT_AT = datetime(2026, 1, 2, tzinfo=UTC)


def _version_3(schema):
    """The SQL of a store of version 3 with tasks in every state."""
    task = a_task("t", args=(1,))
    (gate,) = gates_of(a_task(limits=[Limit(key="k", max_running=1)]))
    now = SYSTEM_CLOCK.now()
    attempt = Attempt(
        number=1,
        token=3,
        owner="gone",
        started_at=now,
        finished_at=now,
        outcome="failed",
        error=an_error(),
    )
    letter = DeadLetter(
        task_id="buried",
        func_path="f.g",
        failure_reason="bad",
        attempt_count=2,
        first_failure=now,
        last_failure=now,
        error_details="boom",
        queue="q",
    )
    values = {
        "gates": encode_internal((gate,)),
        "state": encode_internal(GateState(holders=[("held", 1)], wake_at=FOREVER)),
        "idle": encode_internal(GateState()),
        "used": encode_internal(GateState(starts=[_STARTED])),
        "history": encode_internal((attempt,)),
        "letter": encode_internal(letter),
        "result": MsgspecSerializer().encode_result(
            TaskResult(task_id="later", status=TaskStatus.SUCCESS)
        ),
        "progress": encode_internal(Progress(task_id="held", token=1, fraction=0.5)),
        "schedule": encode_internal(
            Schedule(id="daily", task=a_task("t"), interval=60.0, next_at=_NEXT_AT)
        ),
        "task": MsgspecSerializer().encode_task(task),
    }
    literals = {name: f"'\\x{data.hex()}'::bytea" for name, data in values.items()}
    rows = VERSION_3.format(schema=f'"{schema}"', key=f"'{gate.key}'", forever=FOREVER, **literals)
    names = statements.migrations()[:3]
    return "".join(
        (
            f'CREATE SCHEMA "{schema}"; ',
            f'CREATE TABLE "{schema}".versions (version int PRIMARY KEY); ',
            *(statements.migration(schema, name) for name in names),
            f'INSERT INTO "{schema}".versions VALUES (1), (2), (3);',
            rows,
        )
    )


async def test_a_store_of_version_3_is_refused_until_it_is_upgraded_and_loses_nothing(postgres_url):
    storage = open_storage(postgres_url)
    assert isinstance(storage, PostgresStorage)
    administrator = await asyncpg.connect(storage._target.url)
    await administrator.execute(_version_3(storage._target.schema))
    await administrator.close()

    with pytest.raises(StorageRefused, match=r"at version 3.*run 'omniq schema upgrade'"):
        await storage.open()
    assert await storage.upgrade_schema() == (3, migrations.NEWEST)
    async with storage:
        found = {row.id: row for row in (await storage._engine.page(TaskQuery()))}
        (schedule,) = await storage.list_schedules()
        letter = await storage.get_dead("buried")
        history = await storage.history("buried")
        newest = await storage.get_result("later")
        progress = await storage.get_progress("held")
        gates = await storage.gates()

        assert sorted(found) == ["done", "gated", "held", "later", "parked", "plain", "suspect"]
        assert [found["suspect"].priority, found["suspect"].attempts, found["suspect"].crashes] == [
            5,
            1,
            1,
        ]
        assert (found["plain"].nonce, found["plain"].result_ttl) == ("n", 9_000_000)
        assert found["later"].repeats
        (limit,) = found["gated"].gates
        # A state that says nothing is not retained, and that of a rate limit is deleted some day.
        assert set(gates) == {limit.key, "rate:used:1"}
        dues: dict[str, int | None] = {}
        for kind in ("gate", "schedule"):
            dues |= await storage._backend.transact(_dues_of(kind))
        assert dues["daily"] == to_micros(_NEXT_AT)
        assert (dues["rate:used:1"] or 0) > _STARTED
        assert (schedule.id, schedule.version, schedule.task.args) == ("daily", 7, (1,))
        assert letter is not None
        assert [attempt.outcome for attempt in history] == ["failed"]
        assert newest is not None
        assert newest.status is TaskStatus.SUCCESS
        assert progress is not None
        assert progress.fraction == 0.5
        assert await storage.load_checkpoint("held") == b"saved"
        assert await storage.paused_queues() == {"stopped"}
        assert await storage.enqueue(a_task("second", unique="u")) == "plain"
        assert gates[limit.key].has_parked
        assert [back.task_id for back in await storage.give_back_abandoned()] == ["held"]


def _dues_of(kind: str) -> Work[dict[str, int | None]]:
    async def read(section: Section) -> dict[str, int | None]:
        found = await section.find_documents(DocumentQuery(kind=kind))
        return {document.key: document.due for document in found}

    return read


async def test_an_upgraded_store_is_refused_by_an_older_omniq(postgres_url, monkeypatch):
    async with open_storage(postgres_url) as storage:
        assert isinstance(storage, PostgresStorage)
    monkeypatch.setattr(migrations, "NEWEST", 3)

    with pytest.raises(StorageRefused, match=rf"version {NEWEST}.*use a newer omniq"):
        await storage.open()


async def test_a_worker_of_version_4_that_still_runs_can_claim_nothing(postgres_url):
    """It would claim tasks, and then could not read the reply, which has fewer columns now."""
    async with open_storage(postgres_url) as storage:
        assert isinstance(storage, PostgresStorage)
        call = "SELECT * FROM {schema}.record_and_claim($1, $2, $3, $4, $5, $6, $7, $8)"
        with pytest.raises(StorageError, match=r"record_and_claim.* does not exist"):
            await storage._backend.statements.fetch(call, *[None] * 8)


@pytest.mark.parametrize("given", [[], ["a"], ["a", "b"], ["NULL", ""], ['a "b', "\\", "{c,d}"]])
async def test_ids_arrive_as_they_were_sent(schema, given):
    async with schema.new_storage() as storage:
        sql = "SELECT {schema}.ids_of($1)"
        ((found,),) = await storage._backend.statements.fetch(sql, encoding.id_array(given))

        assert found == given


async def test_ids_that_a_worker_of_version_5_sends_are_understood(schema):
    async with schema.new_storage() as storage:
        sql = "SELECT {schema}.ids_of($1)"
        ((found,),) = await storage._backend.statements.fetch(sql, ["a", "b"])

        assert found == ["a", "b"]


def test_the_schema_commands_set_up_check_and_print(postgres_url, capsys):
    assert _omniq(capsys, "schema", "check", url=postgres_url) == (1, "", "is not set up")
    assert _omniq(capsys, "schema", "install", url=postgres_url) == (
        0,
        f"set up at version {NEWEST}\n",
        "",
    )
    assert _omniq(capsys, "schema", "upgrade", url=postgres_url) == (
        0,
        f"is at version {NEWEST}\nno key is set: schedules and checkpoints are stored without a seal\n",
        "",
    )
    assert _omniq(capsys, "schema", "check", url=postgres_url) == (0, f"version {NEWEST}\n", "")
    assert _omniq(capsys, "schema", "check", "--json", url=postgres_url) == (
        0,
        f'{{"version": {NEWEST}}}\n',
        "",
    )
    assert _omniq(capsys, "schema", "install", "--json", url=postgres_url) == (
        0,
        f'{{"before": {NEWEST}, "after": {NEWEST}}}\n',
        "",
    )
    code, sql, _ = _omniq(capsys, "schema", "sql", url=postgres_url)
    assert code == 0
    assert sql.startswith("BEGIN;")
    assert f'CREATE TABLE "{postgres_url.rpartition("=")[2]}".live' in sql
    assert _omniq(capsys, "schema", "sql", url="memory://") == (
        2,
        "",
        "only postgresql:// has a schema",
    )


def _omniq(capsys, *arguments, url):
    """The exit code, the standard output, and the middle of the error line."""
    done = run_command(capsys, *arguments, "--url", url)
    (*_, error) = ("", *done.err.splitlines())
    return done.code, done.out, error.rpartition(": ")[2].partition(";")[0]


# Indexes


async def test_the_fast_path_does_no_sequential_scan(schema):
    async with schema.new_storage() as storage:
        later = SYSTEM_CLOCK.now() + timedelta(hours=1)
        await storage.enqueue_many([a_task(eta=later) for _ in range(2000)])
        await storage.enqueue_many([a_task() for _ in range(2000)])
        outcomes: list[Succeeded] = []
        before = await _sequential_scans(storage)
        for _ in range(15):
            _, claimed = await storage.record_and_reserve(outcomes, 50)
            outcomes = [success(task) for task in claimed]
        await storage.renew()
        await storage.enqueue_many([a_task(unique=f"k{n}") for n in range(10)])

        assert await _sequential_scans(storage) == before


async def test_the_rule_path_does_no_sequential_scan_either(schema):
    async with schema.new_storage() as storage:
        await storage.enqueue_many([a_task() for _ in range(2000)])
        await storage.enqueue_many([a_task(queue=f"q{n % 3}", expires=_past()) for n in range(60)])
        before = await _sequential_scans(storage)
        while claimed := await storage.reserve(50):
            await storage.record([success(task) for task in claimed])

        assert await _sequential_scans(storage) == before
        assert (await storage.stats()).by_status[TaskStatus.CANCELLED] == 60


@pytest.mark.parametrize("by_rules", [False, True])
async def test_a_claim_reads_as_much_among_two_thousand_queues_as_among_twenty(schema, by_rules):
    async with schema.new_storage() as storage:

        async def lookups_of_claims():
            await storage.reserve(1)
            before = await _index_reads(storage)
            for _ in range(5):
                claimed = await storage.reserve(2)
                assert len(claimed) == 2
            return await _index_reads(storage) - before

        # A task with a gate is claimed by the rules.
        limits = [Limit(key="cpu", max_running=1_000)] if by_rules else []
        await storage.enqueue_many(
            [a_task(queue=f"a{each}", limits=limits) for each in range(20)] + some_tasks("xyz")
        )
        few = await lookups_of_claims()
        await storage.enqueue_many(
            [a_task(queue=f"b{each}", limits=limits) for each in range(2_000)]
        )

        assert await lookups_of_claims() <= few * 1.5


@pytest.mark.parametrize("functions", [4, 40])
async def test_a_claim_gets_what_its_owner_can_run_and_nothing_else(schema, functions):
    draw = random.Random(functions)
    modules = ["a", "a.b", "a0", "ab", "b.c", "c"]
    names = [f"{draw.choice(modules)}.f{number}" for number in range(functions)]
    queues = ["default", "q", "r"]
    tasks = [a_task(func_path=name, queue=queue) for name in names for queue in queues]
    async with schema.new_storage() as storage:
        await storage.enqueue_many(tasks)

        for _ in range(15):
            runnable = Runnable(
                modules=tuple(draw.sample(modules, draw.randrange(4))),
                names=frozenset(draw.sample([*names, "0.none", "z.none"], draw.randrange(6))),
                excluded=frozenset(draw.sample(names, draw.randrange(4))),
            )
            asked = draw.choice([None, ["q"], ["default", "r"]])
            claimed = await storage.reserve(len(tasks), queues=asked, runnable=runnable)
            wanted = [task for task in tasks if runnable.accepts(task.func_path)]
            await storage.record([Released(task.id, task.token) for task in claimed])

            assert set(ids(claimed)) == {
                task.id for task in wanted if asked is None or task.queue in asked
            }


async def test_a_claim_reads_as_much_for_fifty_modules_as_for_those_that_have_tasks(schema):
    others = some_tasks("abcdefgh", func_path="other.task", priority=1)
    async with schema.new_storage() as storage:

        async def lookups_of_claims(*modules):
            await storage.reserve(1, runnable=Runnable(modules=modules))
            before = await _index_reads(storage)
            for _ in range(5):
                assert len(await storage.reserve(2, runnable=Runnable(modules=modules))) == 2
            return await _index_reads(storage) - before

        plain = [a_task(func_path=f"m{each}.run") for each in (10, 30) for _ in range(20)]
        await storage.enqueue_many([*others, *plain])
        few = await lookups_of_claims("m10", "m30")

        assert await lookups_of_claims(*[f"m{each}" for each in range(50)]) <= few * 1.5


async def test_both_writers_have_the_same_planner_settings(schema):
    async with schema.new_storage() as storage:
        for writer in (storage._backend.writer, storage._backend.second_writer):
            assert await writer.run(lambda db: db.fetchval("SHOW enable_seqscan")) == "off"


async def test_a_vacuum_runs_after_many_claims(schema, monkeypatch):
    monkeypatch.setattr(vacuum, "CLAIMS_PER_VACUUM", 100)
    async with schema.new_storage() as storage:
        await storage.enqueue_many([a_task() for _ in range(150)])
        before = _vacuums(schema)
        await storage.reserve(99)
        assert storage._backend.vacuum._claims == 99
        await storage.reserve(1)
        assert storage._backend.vacuum._running is not None
        await storage._backend.vacuum._running

        assert _vacuums(schema) == before + 1


async def test_a_user_without_the_right_to_vacuum_can_still_work(schema, monkeypatch):
    monkeypatch.setattr(vacuum, "CLAIMS_PER_VACUUM", 1)
    name, password = f"guest_{schema.name}", "guest"
    everything = f'ON ALL {{}} IN SCHEMA "{schema.name}" TO {name}'
    schema.execute(
        f"CREATE ROLE {name} LOGIN PASSWORD '{password}'; "
        f'GRANT USAGE ON SCHEMA "{schema.name}" TO {name}; '
        f"GRANT SELECT, INSERT, UPDATE, DELETE {everything.format('TABLES')}; "
        f"GRANT USAGE {everything.format('SEQUENCES')}"
    )
    address = schema.url.rpartition("@")[2]
    before = _vacuums(schema)
    guest = PostgresStorage(f"postgresql://{name}:{password}@{address}", schema=schema.name)
    async with guest as storage:
        await storage.enqueue_many([a_task() for _ in range(10)])
        while claimed := await storage.reserve(2):
            await storage.record([success(task) for task in claimed])
            assert storage._backend.vacuum._running is not None
            await storage._backend.vacuum._running

        assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 10
        assert _vacuums(schema) == before


def _vacuums(schema):
    return schema.value(
        "SELECT pg_stat_get_vacuum_count('{schema}.live'::regclass) FROM pg_stat_clear_snapshot()"
    )


def _past():
    return SYSTEM_CLOCK.now() - timedelta(seconds=1)


async def _sequential_scans(storage):
    """The number of sequential scans of each table of tasks, by this storage's writer and all others."""
    await storage._backend.statements.fetch("SELECT pg_stat_force_next_flush()")
    sql = (
        "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE schemaname = $1 "
        "AND relname IN ('live', 'finished', 'dead') ORDER BY relname"
    )
    return [
        tuple(line) for line in await storage._backend.reader.fetch(sql, storage._target.schema)
    ]


async def _index_reads(storage):
    """How often all connections of the server have looked into an index of tasks, and how many entries they read."""
    for writer in (storage._backend.writer, storage._backend.second_writer):
        await writer.run(lambda db: db.execute("SELECT pg_stat_force_next_flush()"))
    sql = (
        "SELECT sum(idx_scan + idx_tup_read)::int FROM pg_stat_user_indexes "
        "WHERE schemaname = $1 AND relname = 'live'"
    )
    ((count,),) = await storage._backend.reader.fetch(sql, storage._target.schema)
    return count


# Wake-ups


async def channel_of(connection, schema):
    return await connection.fetchval(f'SELECT name FROM "{schema.name}".channel')


class Listener:
    """Records all notifications of a store."""

    def __init__(self, schema):
        self.schema = schema
        self.messages = []

    async def __aenter__(self):
        self.connection = await asyncpg.connect(self.schema.url)
        channel = await channel_of(self.connection, self.schema)
        await self.connection.add_listener(
            channel, lambda *received: self.messages.append(received[3])
        )
        return self

    async def __aexit__(self, *_):
        await self.connection.close()

    async def received(self):
        """All messages sent so far."""
        # Notifications sent before this statement arrive before its reply.
        await self.connection.execute("SELECT 1")
        return self.messages


async def until_awaited(storage, topic="work", is_awaited=True):
    """Return when a storage waits for notifications of the topic, or when none does any more."""
    async with asyncio.timeout(PATIENCE):
        while await storage._backend.reader.call("is_awaited", topic) != [(is_awaited,)]:
            pass


async def test_no_notification_is_sent_while_no_storage_waits(schema):
    async with schema.new_storage() as storage, Listener(schema) as listener:
        await storage.enqueue_many(some_tasks("abc"))
        await storage.record([success(task) for task in await storage.reserve(3)])

        assert await listener.received() == []


async def test_a_released_task_ends_the_wait_of_other_workers(schema):
    async with schema.new_storage() as waiting, schema.new_storage() as storage:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        await waiting.renew()
        assert await waiting.reserve(5) == []
        waiter = asyncio.create_task(waiting.wait_for_work(3600))
        await until_awaited(storage)
        # It looks once more, a moment after it began to wait.
        await asyncio.sleep(0.1)
        await storage.record([Released(task.id, task.token)])
        await asyncio.wait_for(waiter, PATIENCE)

        assert [each.id for each in await waiting.reserve(5)] == ["a"]


async def test_a_batch_sends_one_notification_which_ends_the_wait(schema):
    async with (
        schema.new_storage() as waiting,
        schema.new_storage() as storage,
        Listener(schema) as listener,
    ):
        await waiting.renew()
        assert await waiting.reserve(5) == []
        waiter = asyncio.create_task(waiting.wait_for_work(3600))
        await until_awaited(storage)
        await storage.enqueue_many([a_task() for _ in range(50)])
        await asyncio.wait_for(waiter, PATIENCE)

        assert await listener.received() == ["w0"]
        assert len(await waiting.reserve(50)) == 50


async def test_a_worker_whose_claims_are_always_full_is_not_notified(schema):
    async with (
        schema.new_storage() as busy,
        schema.new_storage() as storage,
        Listener(schema) as listener,
    ):
        assert await busy.reserve(1) == []
        waiter = asyncio.create_task(busy.wait_for_work(3600))
        await until_awaited(storage)
        await storage.enqueue_many([a_task() for _ in range(30)])
        await asyncio.wait_for(waiter, PATIENCE)
        for _ in range(10):
            await busy.reserve(2)
        await until_awaited(storage, is_awaited=False)
        await storage.enqueue(a_task())

        assert await listener.received() == ["w0"]


async def test_a_delayed_task_of_another_process_ends_the_wait_when_it_is_due(schema):
    async with schema.new_storage() as waiting, schema.new_storage() as storage:
        assert await waiting.reserve(1) == []
        waiter = asyncio.create_task(waiting.wait_for_work(3600))
        await until_awaited(storage)
        eta = SYSTEM_CLOCK.now() + timedelta(seconds=0.3)
        await storage.enqueue(a_task("a", eta=eta))
        await asyncio.wait_for(waiter, PATIENCE)

        assert ids(await waiting.reserve(1)) == ["a"]
        assert SYSTEM_CLOCK.now() >= eta


async def test_a_claim_by_the_rules_also_finds_when_the_next_task_is_due(schema):
    limited = a_task("a", limits=[Limit(key="k", max_running=1)])
    async with schema.new_storage() as storage:
        eta = SYSTEM_CLOCK.now() + timedelta(seconds=1.0)
        await storage.enqueue_many([limited, a_task("b", eta=eta)])
        (claimed,) = await storage.reserve(1)

        # The outcome of a limited task is recorded by the rules, and so the claim is made by them.
        assert await storage.record_and_reserve([success(claimed)], 1) == ([True], [])
        await asyncio.wait_for(storage.wait_for_work(3600), PATIENCE)
        assert SYSTEM_CLOCK.now() >= eta
        assert ids(await storage.reserve(1)) == ["b"]


async def test_the_end_of_a_task_is_notified_to_a_storage_that_waits_for_its_result(schema):
    async with (
        schema.new_storage() as waiting,
        schema.new_storage() as storage,
        Listener(schema) as listener,
    ):
        await storage.enqueue_many(some_tasks("ab"))
        a, b = await storage.reserve(2)
        await storage.record([success(b)])
        waiter = asyncio.create_task(waiting.wait_for_result("a"))
        await until_awaited(storage, "results")
        await storage.record([success(a)])
        result = await asyncio.wait_for(waiter, PATIENCE)

        assert result is not None
        assert result.status is TaskStatus.SUCCESS
        assert await listener.received() == ["ra"]


async def test_after_many_waits_for_results_one_task_releases_their_lock(schema, monkeypatch):
    monkeypatch.setattr(wakeups, "_RESULTS_LOCK_SECONDS", 0.05)
    async with schema.new_storage() as storage:
        waits = storage._backend.wakeups
        for _ in range(5):
            async with waits.awaiting_result("a") as is_notified:
                assert is_notified

        assert len(waits._background) == 1
        await until_awaited(storage, "results", is_awaited=False)


async def test_a_cancellation_reaches_a_worker_that_listens(schema):
    async with schema.new_storage() as worker, schema.new_storage() as storage:
        await storage.enqueue(a_task("a"))
        assert ids(await worker.reserve(2)) == ["a"]
        cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        worker.on_cancel(cancelled.set_result)
        waiter = asyncio.create_task(worker.wait_for_work(3600))
        await until_awaited(storage)
        await storage.cancel("a")

        assert await asyncio.wait_for(cancelled, PATIENCE) == "a"
        waiter.cancel()


@pytest.mark.security("S40")
async def test_a_notification_of_a_cancellation_is_looked_up_before_it_is_believed(schema):
    async with schema.new_storage() as worker, schema.new_storage() as storage:
        await storage.enqueue_many(some_tasks("abc"))
        assert len(await worker.reserve(4)) == 3
        cancelled: list[str] = []
        last: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker.on_cancel(cancelled.append)
        worker.on_cancel(lambda task_id: last.set_result(None) if task_id == "c" else None)
        waiter = asyncio.create_task(worker.wait_for_work(3600))
        await until_awaited(storage)
        connection = await asyncpg.connect(schema.url)
        channel = await channel_of(connection, schema)
        for message in (
            "ca",
            "cb",
            "c",
            "w",
            "wx",
            f"w{'9' * 5_000}",
            "w-1",
            "r",
            "?",
            "c" * 7_000,
        ):
            await connection.execute("SELECT pg_notify($1, $2)", channel, message)
        await connection.close()
        await storage.cancel("c")
        await asyncio.wait_for(last, PATIENCE)

        assert cancelled == ["c"]
        assert not waiter.done()
        waiter.cancel()


@pytest.mark.security("S40")
async def test_a_flood_of_notifications_costs_few_lookups(schema):
    async with schema.new_storage() as worker, schema.new_storage() as storage:
        await storage.enqueue(a_task("a"))
        assert ids(await worker.reserve(2)) == ["a"]
        cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        worker.on_cancel(cancelled.set_result)
        waiter = asyncio.create_task(worker.wait_for_work(3600))
        await until_awaited(storage)
        wakeups, lookups, has_begun = worker._backend.wakeups, [], asyncio.Event()
        fetch_row = wakeups._listener.fetch_row

        async def counted(sql, *parameters):
            if "cancel_requested" in sql:
                lookups.append(parameters[0])
                has_begun.set()
            return await fetch_row(sql, *parameters)

        wakeups._listener.fetch_row = counted
        connection = await asyncpg.connect(schema.url)
        channel = await channel_of(connection, schema)
        sql = "SELECT pg_notify($1, 'c' || n) FROM generate_series(1, 20000) AS n"
        await connection.execute(sql, channel)
        await connection.close()
        async with asyncio.timeout(PATIENCE):
            await has_begun.wait()
            await wakeups._lookup
        await storage.cancel("a")
        await asyncio.wait_for(cancelled, PATIENCE)

        assert len(lookups) < 20
        assert max(map(len, lookups)) <= 1_000
        waiter.cancel()


@pytest.mark.security("S40")
async def test_a_user_without_rights_on_the_schema_does_not_learn_the_channel(schema):
    async with schema.new_storage() as worker:
        waiter = asyncio.create_task(worker.wait_for_work(3600))
        await until_awaited(worker)
        owner = await asyncpg.connect(schema.url)
        channel = await channel_of(owner, schema)
        role = f"{schema.name}_stranger"
        await owner.execute(f"CREATE ROLE {role}; SET ROLE {role}")
        try:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await channel_of(owner, schema)
            sources = await owner.fetch("SELECT prosrc FROM pg_proc")
            queries = await owner.fetch(
                "SELECT query FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            )
            comments = await owner.fetch("SELECT description FROM pg_description")
            defaults = await owner.fetch("SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef")
            shown = [text for (text,) in (*sources, *queries, *comments, *defaults) if text]
        finally:
            await owner.execute(f"RESET ROLE; DROP ROLE {role}")
            await owner.close()

        assert len(channel) > 30
        assert not [text for text in shown if channel in text]
        waiter.cancel()


@pytest.mark.fault("F44")
async def test_behind_a_pooler_everything_works_by_polling(schema):
    async with schema.new_storage(poll_only=True) as storage, schema.new_storage() as other:
        await other.enqueue_many([a_task(f"t{n}", priority=n) for n in range(5)])
        first, second = await storage.reserve(2)
        retry = storage.mark_failed(second.id, an_error(), will_retry=False)
        recorded, _ = await storage.record_and_reserve([success(first)], 1)
        await retry
        waiter = asyncio.create_task(storage.wait_for_work(0.05))
        await waiter
        waiting = asyncio.create_task(storage.wait_for_result("t0", timeout=0.05))
        sql = "SELECT {schema}.is_awaited('work') OR {schema}.is_awaited('results')"

        assert recorded == [True]
        assert await other._backend.reader.fetch(sql) == [(False,)]
        assert await waiting is None
        assert (await storage.stats()).dead == 1
        sql = "SELECT name FROM pg_prepared_statements"
        prepared = await storage._backend.statements.fetch(sql)
        assert prepared == []


async def test_a_large_batch_can_be_enqueued_behind_a_pooler(schema):
    async with schema.new_storage(poll_only=True) as storage:
        assert await storage.enqueue_many(some_tasks(LARGE)) == LARGE
        assert ids(await storage.reserve(len(LARGE))) == LARGE


# Lost connections and lost replies


@pytest.fixture
async def proxy(schema):
    async with FaultProxy(schema.url) as proxy:
        yield proxy


def behind(proxy, schema):
    return PostgresStorage(proxy.url, schema=schema.name)


@pytest.mark.fault("F03")
async def test_an_enqueue_whose_reply_was_lost_takes_effect_once(schema, proxy):
    async with behind(proxy, schema) as storage:
        await storage.enqueue(a_task("warm-up"))
        proxy.cut("before_reply")
        assert await storage.enqueue_many(some_tasks("ab")) == ["a", "b"]
        proxy.cut("before_request")
        assert await storage.enqueue(a_task("c")) == "c"

        assert proxy.counts.cuts == 2
        assert ids(await storage.list_tasks()) == ["a", "b", "c", "warm-up"]


async def test_an_enqueue_without_a_record_is_not_repeated_when_its_reply_was_lost(schema, proxy):
    async with behind(proxy, schema) as storage, schema.new_storage() as other:
        await storage.enqueue(a_task("warm-up"))
        proxy.cut("before_reply")
        with pytest.raises(StorageError):
            await storage.enqueue(a_task("a", result_ttl=0.0))

        assert ids(await other.list_tasks()) == ["a", "warm-up"]


REQUESTS = {"begin": 1, "first part": 2, "second part": 3, "last part": 4, "commit": 5}


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("where", ["before_request", "before_reply"])
@pytest.mark.fault("F03")
async def test_a_large_batch_whose_connection_was_lost_is_enqueued_once(
    schema, proxy, where, request_
):
    async with behind(proxy, schema) as storage:
        await storage.enqueue_many(some_tasks(f"warm-{name}" for name in LARGE))
        proxy.cut(where, REQUESTS[request_])
        assert await storage.enqueue_many(some_tasks(LARGE, priority=1)) == LARGE

        assert proxy.cancel_cuts()
        assert ids(await storage.reserve(len(LARGE))) == LARGE
        assert await storage.count_waiting() == len(LARGE)


@pytest.mark.parametrize(
    ("where", "enqueued"),
    [("before_request", []), ("before_reply", LARGE)],
    ids=["not done", "done"],
)
async def test_a_large_batch_without_records_is_not_repeated_when_its_commit_was_lost(
    schema, proxy, where, enqueued
):
    async with behind(proxy, schema) as storage, schema.new_storage() as other:
        await storage.enqueue_many(some_tasks(f"warm-{name}" for name in LARGE))
        proxy.cut(where, REQUESTS["commit"])
        with pytest.raises(StorageError):
            await storage.enqueue_many(some_tasks(LARGE, priority=1, result_ttl=0.0))

        claimed = ids(await other.reserve(len(LARGE)))
        assert [name for name in claimed if not name.startswith("warm-")] == enqueued


async def test_a_large_batch_with_a_bad_task_is_refused_even_when_its_connection_was_lost(
    schema, proxy
):
    async with behind(proxy, schema) as storage:
        await storage.enqueue_many(some_tasks(f"warm-{name}" for name in LARGE))
        proxy.cut("before_reply", REQUESTS["first part"])
        with pytest.raises(InvalidTask):
            # The bad task is found while the part before it is being sent.
            await storage.enqueue_many(
                [*some_tasks(LARGE[:PART_SIZE]), a_task("bad", max_retries=-1)]
            )

        assert await storage.count_waiting() == len(LARGE)


async def test_a_large_batch_is_rolled_back_when_its_caller_is_cancelled(schema, proxy):
    async with behind(proxy, schema) as storage:
        await storage.enqueue(a_task("before"))
        proxy.delay(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await storage.enqueue_many(some_tasks(LARGE))
        proxy.delay(0)

        assert await storage.count_waiting() == 1
        assert await storage.enqueue(a_task("after")) == "after"


async def test_a_claim_whose_reply_was_lost_gives_the_same_tasks_and_no_more(schema, proxy):
    async with behind(proxy, schema) as storage:
        await storage.enqueue_many(some_tasks("abcdef"))
        first = await storage.reserve(2)
        await storage.record_and_reserve([success(task) for task in first], 1)
        proxy.cut("before_reply")
        claimed = await storage.reserve(2)

        assert proxy.cancel_cuts()
        assert ids(claimed) == ["d", "e"]
        assert [task.token for task in claimed] == [1, 1]
        assert await storage.held_by(storage.owner) == {"c": 1, "d": 1, "e": 1}


@pytest.mark.parametrize("where", ["before_request", "before_reply"])
@pytest.mark.fault("F35")
async def test_a_record_and_claim_whose_connection_was_lost_takes_effect_once(schema, proxy, where):
    async with behind(proxy, schema) as storage:
        await storage.enqueue_many(some_tasks("abcdef"))
        first = await storage.reserve(2)
        outcomes = [success(first[0]), Released(first[1].id, first[1].token)]
        proxy.cut(where)
        recorded, claimed = await storage.record_and_reserve(outcomes, 2)

        assert proxy.cancel_cuts()
        assert recorded == [True, True]
        assert ids(claimed) == ["b", "c"]
        assert [task.token for task in claimed] == [2, 1]
        assert (await storage.stats()).by_status[TaskStatus.SUCCESS] == 1


async def test_a_step_of_a_named_claim_that_was_lost_is_not_taken_for_an_earlier_one(schema, proxy):
    async with behind(proxy, schema) as storage:
        await storage.enqueue_many(some_tasks("ab", limits=[Limit(key="k", max_running=9)]))
        await storage.renew()

        async def claim_next(section: Section) -> frozenset[str]:
            claim = Claim(limit=1, now=None, queues=None, claim_id="named")
            await section.begin(storage.owner, (), claim)
            rows = await section.candidates(Wanted(due_by=section.now), None, 1)
            row_rules.claim(rows[0], storage.owner, section.now)
            if rows[0].id == "b":
                proxy.cut("before_request")
            return await section.write(Changes(claimed=rows))

        for _ in "ab":
            assert await storage._backend.transact(claim_next, claims_as=storage.owner) == set()

        assert proxy.cancel_cuts()
        assert await storage.held_by(storage.owner) == {"a": 1, "b": 1}


@pytest.mark.fault("F22")
async def test_a_renewal_whose_reply_was_lost_is_repeated(schema, proxy):
    async with behind(proxy, schema) as storage:
        await storage.enqueue(a_task("a"))
        await storage.reserve(1)
        proxy.cut("before_reply")
        renewal = await storage.renew()

        assert renewal.held == {"a": 1}


async def test_a_call_waits_for_a_server_that_is_briefly_unavailable(schema, proxy):
    async with behind(proxy, schema) as storage:
        await storage.enqueue(a_task("a"))
        await proxy.refuse()
        call = asyncio.create_task(storage.enqueue(a_task("b")))
        done, _ = await asyncio.wait([call], timeout=0.1)
        assert not done
        await proxy.heal()

        assert await asyncio.wait_for(call, PATIENCE) == "b"


async def test_a_listener_whose_connection_was_cut_listens_again(schema, proxy):
    async with behind(proxy, schema) as waiting, schema.new_storage() as storage:
        assert await waiting.reserve(1) == []
        waiter = asyncio.create_task(waiting.wait_for_work(3600))
        await until_awaited(storage)
        proxy.cut_all()
        await until_awaited(storage, is_awaited=False)
        await until_awaited(storage)
        await storage.enqueue(a_task())
        await asyncio.wait_for(waiter, PATIENCE)

        assert len(await waiting.reserve(1)) == 1


@pytest.mark.parametrize(("where", "written"), [("before_request", 0), ("before_reply", 1)])
async def test_the_record_shows_whether_a_commit_whose_reply_was_lost_was_done(
    schema, proxy, monkeypatch, where, written
):
    schema.execute(f"CREATE TABLE {schema.name}.notes (note text)")
    async with behind(proxy, schema) as storage:
        await storage.enqueue(a_task("a"))
        task = await claim_one(storage)
        commit = storage._backend.task_transactions.commit

        async def commit_and_lose_the_reply(*arguments):
            proxy.cut(where)
            await commit(*arguments)

        monkeypatch.setattr(storage._backend.task_transactions, "commit", commit_and_lose_the_reply)

        async def pay():
            async with storage.transaction("a", 1, lambda: success(task)) as connection:
                await connection.execute(f"INSERT INTO {schema.name}.notes VALUES ('paid')")

        if written:
            await pay()
        else:
            with pytest.raises(StorageError):
                await pay()
        seen = await storage.get_task("a")

        assert proxy.cancel_cuts()
        assert schema.value("SELECT count(*) FROM {schema}.notes") == written
        assert seen is not None
        assert (seen.status is TaskStatus.SUCCESS) == bool(written)
    schema.execute(f"DROP TABLE {schema.name}.notes")


async def test_a_transaction_on_a_closed_connection_raises_a_storage_error(
    schema,
):
    async with schema.new_storage() as storage:
        await storage.enqueue_many(some_tasks("ab"))
        a, b = await storage.reserve(2)
        async with storage.transaction("a", a.token, lambda: success(a)) as connection:
            session = await connection.fetchval("SELECT pg_backend_pid()")
        # The driver has not noticed it when the connection is used again.
        schema.execute(f"SELECT pg_terminate_backend({session}, 5000)")

        with pytest.raises(StorageError):
            async with storage.transaction("b", b.token, lambda: success(b)):
                pass
        async with storage.transaction("b", b.token, lambda: success(b)):
            pass


async def test_a_fenced_owner_is_refused_and_continues_as_a_new_owner(schema):
    async with schema.new_storage() as lost, schema.new_storage() as other:
        await other.enqueue_many(some_tasks("ab"))
        task = await claim_one(lost)
        schema.execute(f"UPDATE {schema.name}.leases SET until = 0 WHERE owner = '{lost.owner}'")
        (back,) = await other.give_back_abandoned()

        assert (back.task_id, back.status) == ("a", TaskStatus.RETRYING)
        with pytest.raises(LeaseLost):
            await lost.record_and_reserve([success(task)], 1)
        assert ids(await lost.reserve(5)) == ["b", "a"]


async def test_a_first_lease_that_is_made_while_an_epoch_begins_ends_with_the_others(schema):
    async with schema.new_storage() as storage:
        async with await psycopg.AsyncConnection.connect(schema.url) as other:
            # The call of another owner, before its commit.
            sql = "SELECT {0}.renew('other', 60000000, '', 0, 0, NULL, NULL)"
            await other.execute(sql.format(schema.name).encode())
            raising = asyncio.create_task(storage.mark_restored())
            await asyncio.wait([raising], timeout=0.5)
            await other.commit()
        await raising

        assert schema.value("SELECT fenced FROM {schema}.leases WHERE owner = 'other'") is True


# Rows whose outcomes are recorded without reading them. An outcome of no claim has the rules record both.


async def test_a_cancelled_task_that_is_released_by_the_rules_is_not_claimed_again(schema):
    async with schema.new_storage() as storage:
        await storage.enqueue_many(some_tasks("ab"))
        a = await claim_one(storage)
        await storage.cancel("a")

        recorded, claimed = await storage.record_and_reserve(
            [Released("a", a.token), Released("other", 1)], 1
        )

        assert recorded == [True, False]
        assert ids(claimed) == ["b"]


async def test_a_failure_is_stored_also_if_the_task_expires_in_the_same_step(schema):
    clock = ManualClock()
    async with schema.new_storage(clock=clock) as storage:
        await storage.enqueue(a_task("a", expires=clock.now() + timedelta(seconds=5)))
        a = await claim_one(storage)
        clock.advance(10)
        failure = Retried("a", a.token, an_error(), eta=clock.now())

        recorded = await storage.record_and_reserve([failure, Released("other", 1)], 1)

        assert recorded == ([True, False], [])
        ended = await storage.get_task("a")
        assert ended is not None
        assert (ended.status, ended.attempts) == (TaskStatus.CANCELLED, 1)
        assert [attempt.outcome for attempt in await storage.history("a")] == ["failed"]


async def test_a_failure_is_stored_also_if_the_task_succeeds_in_the_same_step(schema):
    async with schema.new_storage() as storage:
        await storage.enqueue(a_task("a"))
        a = await claim_one(storage)
        failure = Retried("a", a.token, an_error(), eta=None)

        assert await storage.record([failure, success(a)]) == [True, True]

        ended = await storage.get_task("a")
        assert ended is not None
        assert (ended.status, ended.attempts) == (TaskStatus.SUCCESS, 1)
        assert [attempt.outcome for attempt in await storage.history("a")] == ["failed"]


async def test_a_task_is_not_parked_under_a_gate_that_others_empty_meanwhile(schema, monkeypatch):
    """Nothing would offer the task again."""
    url, name = schema.url, schema.name
    async with (
        PostgresStorage(url, schema=name) as storage,
        PostgresStorage(url, schema=name) as another,
    ):
        # A section can be overtaken, a function that locks the limits cannot.
        use_rules(storage)
        claimed = await claimed_beside_an_emptied_gate(
            storage, another, PostgresSection, monkeypatch
        )

        assert claimed == ["c"]
