"""No name can act as a part of a path, a statement or a script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from omniq.errors import InvalidTask, InvalidValue, OmniqError, SettingsError
from omniq.models import Limit, Schedule, TaskStatus
from omniq.storage import open_storage
from omniq.storage.base import BaseStorage
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.servers import RedisServer
from tests.security.conftest import raw_store_of
from tests.security.raw_stores import RawPostgresStore, RawRedisStore

BAD_IDS = [
    "", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "a\r\nb",
    "x" * 10_000, "x" * 129, "😀", "é", "ｘ", ".hidden", "a b", "a*", "a>", "a?", "a%2e", "a;b", "a'b",
    'a"b', "a`b", "$(id)", "a|b", "{a}", "a:b", "a\x7f", "a\u202eb", "a\u200b", "CON:", " a", "a ",
    "\ud800",
]  # fmt: skip

ODD_IDS = [
    "CON",
    "con",
    "NUL",
    "a.",
    "a..",
    "A",
    "a",
    "-",
    "--help",
    "-rf",
    "_",
    "x" * 128,
    "a.task",
    "0",
]


@pytest.mark.security("S06")
@pytest.mark.parametrize("bad", BAD_IDS, ids=range(len(BAD_IDS)))
async def test_an_id_that_could_be_a_path_or_code_is_refused_by_every_verb(bad, store_url):
    async with open_storage(store_url) as storage:
        with pytest.raises(InvalidTask):
            await storage.enqueue(a_task(bad))
        for ask in (storage.get_task, storage.get_result, storage.history, storage.retry_dead):
            with pytest.raises(InvalidTask):
                await ask(bad)
        with pytest.raises(InvalidValue):
            await storage.put_schedule(Schedule(id=bad, task=a_task(), interval=5.0))
        with pytest.raises(InvalidTask):
            await storage.enqueue(a_task(queue=bad))
        assert await storage.list_tasks() == []


@pytest.mark.security("S06")
async def test_unusual_ids_are_distinct_tasks_and_stay_inside_the_store(store_url, tmp_path):
    before = everything_outside(tmp_path)
    async with open_storage(store_url) as storage:
        await storage.enqueue_many(some_tasks(ODD_IDS))
        claimed = {task.id: task for task in await storage.reserve(100)}
        await storage.mark_done("CON", a_result(claimed["CON"], "upper"))
        await storage.mark_done("con", a_result(claimed["con"], "lower"))
        upper, lower = await storage.get_result("CON"), await storage.get_result("con")

    assert sorted(claimed) == sorted(ODD_IDS)
    assert (upper and upper.result, lower and lower.result) == ("upper", "lower")
    assert everything_outside(tmp_path) == before


def everything_outside(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.parent.iterdir()} | {
        path.name for path in tmp_path.iterdir() if not path.name.startswith("store")
    }


INJECTIONS = [
    "'", "''", '"', "';--", "' OR 1=1 --", "'; DROP TABLE omniq_live; --", '"; DROP SCHEMA public; --',
    "%", "_", "%%", "\\", "\\'", "%s", "%(x)s", ":id", "$1", "?", "?1", "{schema}", "{columns}", "{}",
    "\x00", "\r\n*1\r\n$8\r\nFLUSHALL\r\n", "\nFLUSHALL\n", "{tag}", "}{", "*", "[a-z]*", "x:y", "x/y",
    "redis.call('FLUSHALL')", "]] redis.call('FLUSHALL') --[[", "$.a", "$[*]", "->>", "NULL", "null",
    "a.b OR 1", "\\x27", "0x27", "'||pg_sleep(5)||'", "é' --", "ＯＲ", "\u2019",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.security("S09", "S10")
async def test_injections_stay_text_through_every_verb(store_url):
    """Each is stored as a value, matches only itself, and changes no other task."""
    async with open_storage(store_url) as storage:
        await storage.enqueue(a_task("witness"))
        for number, text in enumerate(INJECTIONS):
            await all_verbs_with(storage, f"t-{number}", text)
        found = await storage.get_task("witness")
        counted = await storage.stats()

    assert found is not None
    assert found.status is TaskStatus.PENDING
    assert sum(counted.by_status.values()) == len(INJECTIONS) + 1


async def all_verbs_with(storage: BaseStorage, task_id: str, text: str) -> None:
    now = storage.clock.now()
    # The one character that no key may have, since PostgreSQL cannot store it.
    key = text.replace("\0", "NUL")
    task = a_task(
        task_id,
        priority=5,
        args=(text, {text: text}),
        kwargs={text: text},
        metadata={text: text},
        unique=key,
        limits=(Limit(key=f"gate {key}", max_running=2),),
    )
    await storage.enqueue(task)
    same = await storage.enqueue_many([a_task(unique=task.unique)], nonce=key)
    assert same == [task_id], text
    (claimed,) = await storage.reserve(1, claim_id=key)
    assert (claimed.args, claimed.kwargs) == ((text, {text: text}), {text: text})
    await storage.save_checkpoint(task_id, claimed.token, text.encode())
    await storage.mark_failed(task_id, an_error(text, error_type=text or "E"), will_retry=False)
    for ask in (
        lambda: storage.list_tasks(queue=text),
        lambda: storage.list_tasks(func_path=text),
        lambda: storage.list_tasks(after=text, limit=1),
        lambda: storage.list_dead(func_path=text),
        lambda: storage.list_dead(reason=text),
        lambda: storage.list_dead(after=text, limit=1),
        lambda: storage.held_by(text),
    ):
        await refused_or(ask)
    assert await refused_or(lambda: storage.list_tasks(queue=text)) in ([], None)
    assert await refused_or(lambda: storage.list_tasks(func_path=text)) in ([], None)
    letter = await storage.get_dead(task_id)
    assert letter is not None
    assert text in letter.error_details
    await storage.purge_results(now - timedelta(days=1))
    await storage.gates()


async def refused_or(ask: Callable[[], Awaitable[object]]) -> object:
    try:
        return await ask()
    except OmniqError:
        return None


@pytest.mark.security("S09")
@pytest.mark.parametrize(
    "name", ["public; DROP", 'a"b', "a b", "A", "1a", "a" * 49, "a'b", "ü", "a.b"]
)
def test_an_invalid_schema_name_is_refused(name):
    with pytest.raises(SettingsError, match="schema"):
        open_storage(f"postgresql://u@127.0.0.1/db?schema={name}")


@pytest.mark.security("S10")
@pytest.mark.parametrize("prefix", ["a{b}", "a}b", "a\r\nb", "a b", "", "a" * 500])
def test_an_invalid_redis_prefix_is_refused(prefix):
    with pytest.raises(SettingsError, match="prefix"):
        open_storage(f"redis://127.0.0.1/0?prefix={prefix}")


@pytest.mark.security("S10")
async def test_every_key_in_redis_begins_with_the_prefix_of_its_store():
    # Its own server: other tests make keys in the shared one meanwhile.
    with RedisServer() as server:
        url = f"{server.url}?prefix=t_names"
        raw_store = raw_store_of(url)
        assert isinstance(raw_store, RawRedisStore)
        async with open_storage(url) as storage:
            for number, text in enumerate(INJECTIONS):
                await all_verbs_with(storage, f"t-{number}", text)
            made = set(raw_store.client.scan_iter(count=1000))
        raw_store.close()

    assert made
    assert all(key.startswith(b"{t_names}") for key in made)


@pytest.mark.security("S09")
async def test_only_the_schema_of_the_store_is_touched_in_postgresql(postgres_database):
    # Its own database: other tests create schemas in the shared one meanwhile.
    url = f"{postgres_database}?schema=t_names"
    raw_store = raw_store_of(url)
    assert isinstance(raw_store, RawPostgresStore)
    sql = (
        "SELECT count(*) FROM pg_tables WHERE schemaname NOT LIKE 't_%%' "
        "AND schemaname NOT IN ('pg_catalog', 'information_schema')"
    )
    before = raw_store._all(sql)
    async with open_storage(url) as storage:
        await all_verbs_with(storage, "a", "'; CREATE TABLE public.owned (); --")
    after = raw_store._all(sql)
    raw_store.close()

    assert after == before
