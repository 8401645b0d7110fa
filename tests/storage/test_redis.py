"""What Redis adds to the contract: its keys, its scripts, its settings, its wake-ups."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from redis.asyncio import Redis

from omniq.clock import SYSTEM_CLOCK
from omniq.errors import (
    QueueFull,
    SettingsError,
    StorageCorrupt,
    StorageError,
    StorageRefused,
    StoreWentBack,
)
from omniq.models import BreakerRule, Limit, Progress, Schedule, TaskStatus
from omniq.outcomes import Failed, Released, Retried, Succeeded
from omniq.storage import open_storage, row_rules
from omniq.storage.backend import Changes, Section, Wanted
from omniq.storage.redis import RedisStorage, connection
from omniq.storage.redis.error_replies import ConnectionLost, ServerNotReady
from omniq.storage.redis.section import RedisSection
from omniq.storage.types import Claim
from omniq.testing.builders import a_result, a_task, an_error, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.fault_proxy import FaultProxy
from omniq.testing.servers import RedisServer
from tests.storage.emptied_gates import claimed_beside_an_emptied_gate

TIMEOUT = 5.0
"""Seconds after which a wait fails."""


@pytest.fixture(scope="module")
def server():
    """A server for this module alone, whose settings may be changed."""
    with RedisServer() as server:
        yield server


@pytest.fixture
async def admin(server):
    async with Redis.from_url(server.url) as admin:
        await admin.flushall()
        yield admin


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def storage(server, admin, clock):
    async with RedisStorage(server.url, prefix="p", clock=clock) as storage:
        yield storage


async def test_a_claim_sends_as_many_commands_among_two_thousand_queues_as_among_twenty(
    storage, admin
):
    async def commands_of_claims():
        await storage.reserve(1)
        await admin.config_resetstat()
        for _ in range(5):
            await storage.reserve(2)
        found = await admin.info("commandstats")
        return sum(each["calls"] for name, each in found.items() if "config" not in name)

    await storage.enqueue_many([a_task(f"a{each}", queue=f"a{each}") for each in range(20)])
    few = await commands_of_claims()
    more = [a_task(f"b{each}", queue=f"b{each}") for each in range(2_000)]
    await storage.enqueue_many(more)

    assert await commands_of_claims() <= few * 1.5


@pytest.mark.parametrize("verb", ["claim", "claim_by_rules", "renewal"])
async def test_a_lower_count_of_claims_shows_that_the_store_went_back(storage, admin, verb):
    await storage.renew()
    await storage.enqueue_many([a_task("a"), a_task("b"), a_task("c")])
    await storage.reserve(1)
    (task,) = await storage.reserve(1)
    # All rows stay, so that nothing else can show it.
    assert await admin.hincrby("{p}:2:workers", f"{storage.owner}#", -1) == 1
    # A dead letter is recorded by the rules, and so is what is claimed with it.
    dead = Failed(task.id, task.token, an_error())
    calls = {
        "renewal": storage.renew,
        "claim": partial(storage.reserve, 1),
        "claim_by_rules": partial(storage.record_and_reserve, [dead], 1),
    }
    with pytest.raises(StoreWentBack):
        await calls[verb]()

    assert (await storage.store_record()).epoch > 0
    assert await admin.hkeys("{p}:2:workers") == []


async def test_a_claim_whose_reply_was_lost_is_counted_and_no_sign_of_a_store_that_went_back(
    storage, admin
):
    await storage.enqueue_many([a_task("a"), a_task("b")])
    await storage.reserve(1)
    await admin.hincrby("{p}:2:workers", f"{storage.owner}#", 1)
    await storage.renew()
    await storage.reserve(1)

    assert storage._identity.claims == 3
    assert (await storage.store_record()).epoch == 0
    await storage.retire()
    assert await admin.hkeys("{p}:2:workers") == []


async def until(condition):
    """Poll until the condition holds."""
    async with asyncio.timeout(TIMEOUT):
        while not await condition():
            await SYSTEM_CLOCK.sleep(0.002)


async def use_every_verb(storage, clock, before_each_verb=None):
    """Use every verb, and end all tasks."""

    async def step():
        if before_each_verb is not None:
            await before_each_verb()

    gated = {
        "limits": (Limit(key="k/1", max_running=1), Limit(key="r", rate=9)),
        "breakers": (BreakerRule(name="b"),),
    }
    now = clock.now()
    calls = [
        lambda: storage.enqueue_many(
            [
                *some_tasks("abcdefgh", result_ttl=9),
                *some_tasks(["g1", "g2"], result_ttl=9, **gated),
                a_task("late", result_ttl=9, expires=now),
                a_task("delayed", result_ttl=9, eta=now + timedelta(seconds=1)),
                a_task("only", result_ttl=9, unique="key"),
                a_task("again", result_ttl=9, interval=1),
            ]
        ),
        lambda: storage.reserve(100),
        lambda: storage.save_checkpoint("a", 1, b"so far"),
        lambda: storage.report_progress([Progress(task_id="a", token=1, fraction=0.5)]),
        lambda: storage.cancel("g2"),
        lambda: storage.cancel("b"),
        lambda: storage.renew(),
        lambda: storage.mark_done("again", a_result(a_task("again"))),
        lambda: storage.record(
            [
                Retried("a", 1, an_error(), now),
                Failed("c", 1, an_error()),
                Released("d", 1),
                Succeeded("e", 1, a_result(a_task("e"))),
                Retried("f", 1, an_error()),
            ]
        ),
        lambda: storage.stats(),
        lambda: storage.list_tasks(),
        lambda: storage.list_dead(),
        lambda: storage.workers(),
        lambda: storage.gates(),
        lambda: storage.retry_dead("c"),
        lambda: storage.pause_queue("other"),
        lambda: storage.resume_queue("other"),
        lambda: storage.retire(),
        lambda: storage.put_schedule(Schedule(id="s", task=a_task("t"), interval=5.0)),
        lambda: storage.delete_schedule("s"),
        lambda: storage.give_back_abandoned(),
    ]
    for call in calls:
        await step()
        await call()
    clock.advance(5)
    await step()
    await storage.cancel("again")
    while tasks := await storage.reserve(3):
        await step()
        done = await storage.record([Succeeded(t.id, t.token, a_result(t)) for t in tasks])
        assert all(done)
    assert {t.status.is_final for t in await storage.list_tasks()} == {True}
    assert len(await storage.list_tasks()) == 14


# Keys


async def keys_of(admin):
    """The keys of the store; not those that are closed to older versions."""
    keys = [key.decode() async for key in admin.scan_iter(count=1000)]
    return sorted(key for key in keys if ":2:" in key or not key.startswith("{"))


LEFT = [
    "{p}:2:document_dues",
    "{p}:2:document_keys",
    "{p}:2:documents",
    "{p}:2:fences",
    "{p}:2:nonces",
    "{p}:2:sequence",
]
"""Keys that do not grow with the number of tasks, when the worker is gone."""


async def documents_of(admin):
    """The kinds of the documents that are stored."""
    return {name.decode().partition("/")[0] for name in await admin.hkeys("{p}:2:documents")}


async def test_all_keys_have_one_hash_tag(storage, admin, clock):
    await use_every_verb(storage, clock)
    keys = await keys_of(admin)

    assert len(keys) > 5
    assert all(key.startswith("{p}:") for key in keys)


async def test_after_all_results_expired_only_gates_and_the_worker_are_left(storage, admin, clock):
    await use_every_verb(storage, clock)
    clock.advance(10)
    assert await storage.purge_expired() == 14

    assert await keys_of(admin) == sorted([*LEFT, "{p}:2:leases", "{p}:2:workers"])
    await storage.retire()
    assert await keys_of(admin) == LEFT
    assert await documents_of(admin) == {"gate", "store"}


async def test_a_purge_leaves_nothing_of_the_tasks_it_deleted(storage, admin, clock):
    await use_every_verb(storage, clock)
    assert await storage.purge_results(clock.now() + timedelta(days=1)) == 14
    await storage.retire()

    assert await keys_of(admin) == LEFT
    assert await documents_of(admin) == {"gate", "store"}


async def test_a_dead_letter_retried_after_its_result_expired_is_not_purged(storage, clock):
    await storage.enqueue_many(some_tasks("ab", result_ttl=5.0))
    a, b = await storage.reserve(2)
    await storage.record([Failed("a", a.token, an_error()), Succeeded("b", b.token, a_result(b))])
    clock.advance(10)
    assert await storage.retry_dead("a")

    assert await storage.purge_results(clock.now() + timedelta(days=1)) == 1
    assert await storage.purge_expired() == 0
    assert [task.id for task in await storage.reserve(2)] == ["a"]


async def test_concurrent_purges_delete_all_and_only_what_finished_in_time(server, storage, clock):
    one = storage
    async with RedisStorage(server.url, prefix="p", clock=clock) as other:
        await one.enqueue_many([a_task(id=f"t{number:04}") for number in range(1_500)])
        for count in (1_200, 300):
            claimed = await one.reserve(count)
            await one.record([Succeeded(each.id, each.token, a_result(each)) for each in claimed])
            clock.advance(10)
        before = clock.now() - timedelta(seconds=15)
        await asyncio.gather(*(storage.purge_results(before) for storage in (one, other)))

        left = await one.list_tasks(limit=1_000)
        assert [task.id for task in left] == [f"t{number:04}" for number in range(1_200, 1_500)]
        assert await other.purge_results(before) == 0


async def test_a_cancelled_task_that_is_released_by_the_rules_is_not_claimed_again(storage):
    await storage.enqueue_many(some_tasks("ab"))
    (a,) = await storage.reserve(1)
    await storage.cancel("a")

    # The second outcome is of no claim, so that the rules record both.
    recorded, claimed = await storage.record_and_reserve(
        [Released("a", a.token), Released("other", 1)], 1
    )

    assert recorded == [True, False]
    assert [task.id for task in claimed] == ["b"]


async def test_with_result_ttl_zero_nothing_is_left_of_a_finished_task(storage, admin):
    await storage.enqueue_many(some_tasks("abc", result_ttl=0))
    a, b, c = await storage.reserve(3)
    await storage.record([Succeeded("a", a.token, a_result(a)), Released("b", b.token)])
    await storage.cancel("b")
    await storage.record([Failed("c", c.token, an_error())])
    await storage.delete_dead("c")
    await storage.retire()

    # None of them grows with the number of tasks.
    assert await keys_of(admin) == LEFT
    assert await documents_of(admin) == {"store"}
    assert await admin.ttl("{p}:2:nonces") > 0


@asynccontextmanager
async def commands_seen(server):
    """The commands that the server runs meanwhile, as lists of arguments; those of scripts marked."""
    seen: list[tuple[bool, list[str]]] = []
    async with Redis.from_url(server.url) as other, other.monitor() as monitor:

        async def watch():
            async for command in monitor.listen():
                words = command["command"].split(" ")
                if words == ["ECHO", "the-end"]:
                    return
                seen.append((command["client_type"] == "lua", words))

        watching = asyncio.create_task(watch())
        try:
            yield seen
        finally:
            await other.echo("the-end")
            await asyncio.wait_for(watching, TIMEOUT)


async def test_scripts_touch_only_declared_keys(server, admin, clock):
    async with (
        commands_seen(server) as seen,
        RedisStorage(server.url, prefix="p", clock=clock) as storage,
    ):
        await use_every_verb(storage, clock)
        clock.advance(10)
        await storage.purge_expired()
    declared: set[str] = set()
    touched = 0
    for by_script, words in seen:
        if words[0].upper() == "EVALSHA":
            declared = set(words[3 : 3 + int(words[2])])
        elif by_script and words[0] not in ("TIME", "PUBLISH"):
            touched += 1
            assert words[1] in declared, words[:2]
    assert touched > 200


# Scripts and the server


@pytest.mark.fault("F42")
async def test_the_server_may_drop_its_scripts_at_any_time(storage, admin, clock):
    await use_every_verb(storage, clock, before_each_verb=admin.script_flush)


@pytest.mark.timeout(120)
async def test_all_keys_of_a_store_are_in_one_slot_of_a_cluster(clock):
    with RedisServer(options={"cluster-enabled": "yes"}) as node:
        async with Redis.from_url(node.url) as admin:
            await admin.execute_command("CLUSTER", "ADDSLOTS", *range(16384))

            async def is_ready():
                return (await admin.execute_command("CLUSTER INFO"))["cluster_state"] == "ok"

            await until(is_ready)
        async with RedisStorage(node.url, clock=clock) as storage:
            await use_every_verb(storage, clock)
            assert ("cluster", "yes", "ok") in await storage.server_report()


async def test_a_valkey_url_opens_a_redis_store(server, admin):
    url = server.url.replace("redis:", "valkey:")
    async with open_storage(f"{url}?prefix=p&max_pending=1") as storage:
        await storage.enqueue(a_task("a"))
        with pytest.raises(QueueFull):
            await storage.enqueue(a_task("b"))


@pytest.mark.parametrize(
    ("appendonly", "appendfsync", "durability"),
    [("no", "always", "none"), ("yes", "everysec", "os"), ("yes", "no", "os"), ("yes", "always", "power")],
)  # fmt: skip
async def test_durability_is_that_of_the_servers_settings(
    server, admin, appendonly, appendfsync, durability
):
    await admin.config_set("appendfsync", appendfsync)
    await admin.config_set("appendonly", appendonly)
    try:
        async with RedisStorage(server.url) as storage:
            assert storage.capabilities.durability == durability
            report = {
                name: (value, verdict) for name, value, verdict in await storage.server_report()
            }
    finally:
        await admin.config_set("appendonly", "no")

    assert report["appendonly"][0] == appendonly
    assert report["appendfsync"][0] == appendfsync
    assert report["appendonly"][1].startswith("ok" if appendonly == "yes" else "warn: ")
    assert report["appendfsync"][1].startswith("ok" if appendfsync == "always" else "warn: ")
    assert report["maxmemory-policy"] == ("noeviction", "ok")


@pytest.fixture
async def evicting(admin):
    await admin.config_set("maxmemory-policy", "allkeys-lru")
    yield
    await admin.config_set("maxmemory-policy", "noeviction")


@pytest.mark.usefixtures("evicting")
@pytest.mark.fault("F40")
async def test_a_server_that_evicts_keys_is_refused(server, admin):
    with pytest.raises(StorageRefused, match="CONFIG SET maxmemory-policy noeviction"):
        await RedisStorage(server.url).open()


@pytest.mark.usefixtures("evicting")
async def test_an_evicting_server_is_refused_for_a_user_who_may_not_read_its_configuration(
    server, admin
):
    await admin.acl_setuser(
        "app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-config"]
    )
    url = server.url.replace(f":{server.password}@", "app:pw@")

    with pytest.raises(StorageRefused, match="noeviction"):
        await RedisStorage(url).open()


async def test_a_user_who_may_not_read_the_configuration_can_use_the_store(server, admin, clock):
    await admin.execute_command(
        "ACL SETUSER one reset on >pw ~{p}:* resetchannels &{p}:* +@all -config"
    )
    url = server.url.replace(f":{server.password}@", "one:pw@")
    async with RedisStorage(url, prefix="p", clock=clock) as storage:
        await use_every_verb(storage, clock)
    with pytest.raises(StorageRefused, match="begin with the prefix"):
        async with RedisStorage(url, prefix="q", clock=clock) as storage:
            await storage.enqueue(a_task("a"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda url: url.replace("/0", "/9999"), "name a database"),
        (lambda url: re.sub(":[^:@]*@", ":wrong@", url), "right user and password"),
        (lambda url: re.sub(":[^:@]*@", "", url), "give a user and password"),
    ],
)
async def test_permanent_errors_are_refused_with_the_next_step(server, change, what):
    with pytest.raises(StorageRefused, match=what) as refused:
        await RedisStorage(change(server.url)).open()
    assert server.password not in str(refused.value)


async def test_keys_of_another_program_are_not_touched(server, admin):
    await admin.set("{p}:2:tasks", "not ours")
    async with RedisStorage(server.url, prefix="p") as storage:
        with pytest.raises(StorageRefused, match="prefix="):
            await storage.enqueue(a_task("a"))

    assert await admin.get("{p}:2:tasks") == b"not ours"


@pytest.mark.parametrize("prefix", ["", "a{b}", "a b", "x" * 101])
def test_a_prefix_that_would_break_the_hash_tag_is_refused(prefix):
    with pytest.raises(SettingsError, match="prefix"):
        RedisStorage("redis://localhost", prefix=prefix)


async def test_an_unreachable_server_is_reported_at_once():
    with pytest.raises(StorageError, match="Redis at redis://localhost:1"):
        await RedisStorage("redis://localhost:1").open()


@pytest.mark.fault("F40")
async def test_when_memory_is_full_enqueues_are_refused_and_running_tasks_can_finish(
    storage, admin
):
    await storage.enqueue_many(some_tasks("ab"))
    (task,) = await storage.reserve(1)
    await admin.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueFull):
            await storage.enqueue(a_task("c"))
        await storage.renew()
        done = Succeeded(task.id, task.token, a_result(task))
        recorded, claimed = await storage.record_and_reserve([done], 1)
    finally:
        await admin.config_set("maxmemory", 0)

    assert recorded == [True]
    assert [task.id for task in claimed] == ["b"]
    assert len(await storage.list_tasks()) == 2


@pytest.mark.fault("F41")
async def test_a_record_that_was_deleted_by_hand_does_not_block_claims(storage, admin):
    await storage.enqueue_many(some_tasks("ab"))
    await admin.hdel("{p}:2:tasks", "a")

    assert [task.id for task in await storage.reserve(2)] == ["b"]
    assert [task.id for task in await storage.list_tasks()] == ["b"]


@pytest.mark.fault("F41")
async def test_a_store_that_was_emptied_by_hand_accepts_tasks_again(storage, admin):
    await storage.enqueue(a_task("a"))
    (task,) = await storage.reserve(1)
    await admin.flushall()

    assert await storage.record([Released("a", task.token)]) == [False]
    await storage.enqueue(a_task("b"))
    storage._change_owner(storage.owner)
    assert [task.id for task in await storage.reserve(1)] == ["b"]


async def test_an_outcome_that_left_only_a_dead_letter_is_known_to_be_recorded(storage):
    await storage.enqueue(a_task("a", result_ttl=0))
    (task,) = await storage.reserve(1)
    failed = Failed("a", task.token, an_error())
    late = Succeeded("a", task.token, a_result(task))

    assert await storage.record([failed, late]) == [True, True]
    assert await storage.record([failed]) == [True]
    assert len(await storage.list_dead()) == 1


# The connection


async def test_a_unix_socket_can_be_used(tmp_path, clock):
    place = tmp_path / "redis.sock"
    with RedisServer(options={"unixsocket": str(place), "unixsocketperm": "777"}) as server:
        async with RedisStorage(f"unix://:{server.password}@{place}", clock=clock) as storage:
            await use_every_verb(storage, clock)


async def test_the_database_and_the_client_name_of_the_url_are_used(server, admin):
    url = server.url.removesuffix("/0")
    async with RedisStorage(f"{url}/3?client_name=shop") as storage:
        await storage.enqueue(a_task("a"))
        client = next(each for each in await admin.client_list() if each["name"] == "shop")

    assert client["db"] == "3"
    assert await keys_of(admin) == []


async def test_concurrent_calls_share_a_connection_and_each_gets_its_reply(storage, admin):
    before = len(await admin.client_list())
    tasks = some_tasks(map(str, range(50)))
    await storage.enqueue_many(tasks)

    found = await asyncio.gather(*(storage.get_task(task.id) for task in tasks))

    assert [task and task.id for task in found] == [task.id for task in tasks]
    assert len(await admin.client_list()) <= before


async def test_the_reply_to_a_cancelled_call_is_not_given_to_another_call(storage):
    await storage.enqueue_many(some_tasks("ab"))
    given_up = asyncio.ensure_future(storage.get_task("a"))
    await asyncio.sleep(0)
    given_up.cancel()

    found = await storage.get_task("b")

    assert given_up.cancelled()
    assert (found and found.id) == "b"


async def test_a_connection_that_is_closed_between_calls_is_opened_again(storage, admin):
    await storage.enqueue(a_task("a"))
    for client in await admin.client_list():
        if client["name"].startswith("omniq-"):
            await admin.client_kill(client["addr"])

    assert await storage.get_task("a") is not None


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StorageError, "is this a Redis server"),
        (b"-DENIED Redis is running in protected mode\r\n", StorageRefused, "protected mode.*set"),
        (b"-ERR max number of clients reached\r\n", ServerNotReady, "number of clients"),
        (b"-ERR invalid password\r\n", StorageRefused, "the right user and password"),
        (b"-ERR unknown command 'AUTH', with args: 'canary'\r\n", StorageRefused, "args: '"),
    ],
)
@pytest.mark.parametrize("user", [":canary@", "me:canary@"])
async def test_an_unexpected_reply_to_the_handshake_is_reported(reply, error, message, user):
    async def answer(reader, writer):
        await reader.read(1)
        writer.write(reply)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(error, match=message) as refused:
            async with RedisStorage(f"redis://{user}127.0.0.1:{port}"):
                pass

    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
async def test_an_impossible_host_name_is_refused(host):
    with pytest.raises(StorageError):
        async with RedisStorage(f"redis://{host}"):
            pass


async def test_calls_do_not_wait_for_the_attempts_of_other_calls_to_reach_a_silent_server(
    monkeypatch,
):
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(connection, "_CONNECT_WAIT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = connection.ServerConnection(
            f"redis://127.0.0.1:{listener.getsockname()[1]}", name="n"
        )
        calls = [silent.command("PING") for _ in range(100)]
        async with asyncio.timeout(TIMEOUT - 1):
            answers = await asyncio.gather(*calls, return_exceptions=True)
        await silent.close()

    assert all(isinstance(answer, ConnectionLost) and not answer.was_sent for answer in answers)


@pytest.mark.slow
async def test_the_error_of_a_server_without_tls_mentions_tls(server):
    url = server.url.replace("redis://", "rediss://")
    with pytest.raises(StorageError, match=r"within 5 s; does it speak TLS\?"):
        async with RedisStorage(url):
            pass


# Order and size


async def test_priorities_and_times_of_any_size_are_ordered_exactly(storage, clock):
    far = datetime(9999, 12, 31, 23, 59, 59, 999990, tzinfo=UTC)
    tasks = [
        a_task("lowest", priority=-(2**63)),
        a_task("low", priority=-(2**63) + 1),
        a_task("high", priority=2**63 - 2),
        a_task("highest", priority=2**63 - 1),
        a_task("f2", eta=far + timedelta(microseconds=2)),
        a_task("f1", eta=far + timedelta(microseconds=1)),
        a_task("old", eta=datetime(1, 1, 1, 0, 0, 1, tzinfo=UTC)),
        a_task("older", eta=datetime(1, 1, 1, tzinfo=UTC)),
    ]
    await storage.enqueue_many(tasks)

    due = [task.id for task in await storage.reserve(8)]
    assert due == ["highest", "high", "older", "old", "low", "lowest"]
    assert [task.id for task in await storage.reserve(8, far + timedelta(microseconds=5))] == [
        "f1",
        "f2",
    ]


@pytest.mark.timeout(120)
async def test_more_tasks_than_one_command_can_carry_are_enqueued_claimed_and_recorded(
    storage, clock
):
    ids = [f"t{number:05}" for number in range(5_000)]
    await storage.enqueue_many(some_tasks(ids, eta=clock.now() + timedelta(seconds=1)))
    clock.advance(1)
    tasks = await storage.reserve(5_000)
    done = await storage.record([Succeeded(t.id, t.token, a_result(t)) for t in tasks])

    assert [task.id for task in tasks] == ids
    assert all(done)
    assert len(await storage.list_tasks(limit=10_000)) == 5_000


@pytest.mark.timeout(120)
async def test_many_expired_and_many_blocked_tasks_do_not_hide_claimable_tasks(storage, clock):
    limits = (Limit(key="k", max_running=1),)
    await storage.enqueue_many(some_tasks([f"e{n:03}" for n in range(450)], expires=clock.now()))
    await storage.enqueue_many(some_tasks([f"g{n:04}" for n in range(2_500)], limits=limits))
    await storage.enqueue(a_task("free", priority=-1))

    assert [task.id for task in await storage.reserve(5)] == ["g0000", "free"]


# Wake-ups


@pytest.fixture
async def two(server, admin):
    """Two owners of one store, on the system clock."""
    async with RedisStorage(server.url) as one, RedisStorage(server.url) as other:
        yield one, other


async def wait_as_a_pool_does(storage, queues=None):
    """Claim, and wait for work, until a task is claimed."""
    while not (tasks := await storage.reserve(5, queues=queues)):
        await storage.wait_for_work(60)
    return [task.id for task in tasks]


async def until_it_waits(admin, storage):
    await until(lambda: admin.hexists("{omniq}:2:idle", storage._backend.channel))


async def test_a_task_enqueued_by_another_storage_ends_the_wait_for_work(two, admin):
    one, other = two
    waiting = asyncio.create_task(wait_as_a_pool_does(one))
    await until_it_waits(admin, one)
    await other.enqueue(a_task("a"))

    assert await asyncio.wait_for(waiting, TIMEOUT) == ["a"]


async def test_a_task_of_another_queue_does_not_wake_the_worker(two, admin):
    one, other = two
    waiting = asyncio.create_task(wait_as_a_pool_does(one, queues=["mail"]))
    await until_it_waits(admin, one)
    await other.enqueue(a_task("a"))
    assert await admin.hexists("{omniq}:2:idle", one._backend.channel)
    await other.enqueue(a_task("b", queue="mail"))

    assert await asyncio.wait_for(waiting, TIMEOUT) == ["b"]


async def test_a_delayed_task_of_another_storage_is_claimed_when_it_comes_due(two, admin):
    one, other = two
    waiting = asyncio.create_task(wait_as_a_pool_does(one))
    await until_it_waits(admin, one)
    await other.enqueue(a_task("later", eta=datetime.now(UTC) + timedelta(seconds=50)))
    await other.enqueue(a_task("soon", eta=datetime.now(UTC) + timedelta(seconds=0.1)))

    assert await asyncio.wait_for(waiting, TIMEOUT) == ["soon"]


async def test_a_task_that_another_storage_releases_ends_the_wait(two, admin):
    one, other = two
    await other.enqueue(a_task("a"))
    (task,) = await other.reserve(1)
    waiting = asyncio.create_task(wait_as_a_pool_does(one))
    await until_it_waits(admin, one)
    await other.record([Released("a", task.token)])

    assert await asyncio.wait_for(waiting, TIMEOUT) == ["a"]


async def test_room_in_a_gate_made_by_another_storage_ends_the_wait(two, admin):
    one, other = two
    await other.enqueue_many(some_tasks("ab", limits=(Limit(key="k", max_running=1),)))
    (task,) = await other.reserve(1)
    waiting = asyncio.create_task(wait_as_a_pool_does(one))
    await until_it_waits(admin, one)
    await other.record([Succeeded("a", task.token, a_result(task))])

    assert await asyncio.wait_for(waiting, TIMEOUT) == ["b"]


async def test_no_notification_is_sent_while_no_storage_waits(two, server):
    one, other = two
    async with commands_seen(server) as seen:
        await one.enqueue(a_task("a"))
        await other.mark_done("a", a_result((await other.reserve(1))[0]))

    assert not any(words[0] == "PUBLISH" for _, words in seen)


async def test_the_end_of_a_task_is_notified_to_another_storage_that_awaits_it(two, admin):
    one, other = two
    await other.enqueue(a_task("a"))
    waiting = asyncio.create_task(one.wait_for_result("a"))
    await until(lambda: admin.sismember("{omniq}:2:awaited", "a"))
    with one._local_wakeups.listen_for_result("a") as pushed:
        await other.mark_done("a", a_result((await other.reserve(1))[0], 7))
        await asyncio.wait_for(pushed, TIMEOUT)

    result = await asyncio.wait_for(waiting, TIMEOUT)
    assert result is not None
    assert result.result == 7
    assert await admin.exists("{omniq}:2:awaited") == 0


# Damage


async def test_a_damaged_counter_is_reported_with_what_to_do(server, admin):
    advice = "a counter of the store is damaged: restore the store from a backup"
    async with RedisStorage(server.url) as storage:
        await admin.set("{omniq}:2:sequence", "nan")
        with pytest.raises(StorageCorrupt, match=advice):
            await storage.enqueue(a_task("a"))
        await admin.delete("{omniq}:2:sequence")
        await admin.hset("{omniq}:2:counts", "default/p", "nan")
        for call in (storage.enqueue_many(some_tasks("ab")), storage.stats()):
            with pytest.raises(StorageCorrupt, match=advice):
                await call
        await admin.delete("{omniq}:2:counts")


# Lost replies


@pytest.fixture
async def cut_off(server, admin):
    """A proxy, a storage that connects through it, and one that connects directly."""
    async with (
        FaultProxy(server.url) as proxy,
        RedisStorage(proxy.url) as storage,
        RedisStorage(server.url) as beside,
    ):
        yield proxy, storage, beside


async def test_a_repeated_enqueue_of_a_task_that_ran_and_left_no_record_enqueues_nothing(
    cut_off, admin
):
    proxy, storage, beside = cut_off
    task = a_task("a", result_ttl=0)
    await storage.enqueue(a_task("warm"))
    proxy.cut("before_reply")
    enqueuing = asyncio.create_task(storage.enqueue(task))
    await until(lambda: beside.get_task("a"))
    # The reply was cut: the call is repeated, before or after this.
    for claimed in await beside.reserve(5):
        await beside.mark_done(claimed.id, a_result(claimed))

    assert await asyncio.wait_for(enqueuing, TIMEOUT) == "a"
    assert await beside.reserve(5) == []


async def test_a_claim_is_made_once_also_when_the_server_had_dropped_its_script(cut_off, admin):
    proxy, storage, beside = cut_off
    assert await storage.reserve(1) == []
    await beside.enqueue_many(some_tasks("ab"))
    await admin.script_flush()
    # Unknown, loaded, done: the third reply is that of the claim.
    proxy.cut("before_reply", at=3)

    claimed = await storage.reserve(1)

    assert proxy.cancel_cuts()
    assert [task.id for task in claimed] == ["a"]
    waiting = await beside.get_task("b")
    assert (waiting and waiting.status) is TaskStatus.PENDING


async def test_a_claim_whose_reply_was_lost_is_notified_of_more_tasks(cut_off, admin):
    proxy, storage, beside = cut_off
    # Loads the script, and begins the subscription.
    assert await storage.reserve(1) == []
    await storage.wait_for_work(1)
    await beside.enqueue(a_task("a"))
    proxy.cut("before_reply")

    claimed = await storage.reserve(2)

    assert proxy.cancel_cuts()
    assert [task.id for task in claimed] == ["a"]
    assert await admin.hexists("{omniq}:2:idle", storage._backend.channel)


@pytest.mark.parametrize("where", ["before_request", "before_reply", "after_reply"])
async def test_a_call_that_is_not_idempotent_takes_effect_once(cut_off, where):
    proxy, storage, beside = cut_off
    await storage.enqueue_many(some_tasks("abc", result_ttl=0))
    await storage.put_schedule(Schedule(id="s", task=a_task("t"), interval=5.0))
    schedule = await storage.get_schedule("s")
    assert schedule is not None
    a, b, c = await storage.reserve(3)
    await storage.record([Failed("b", b.token, an_error()), Failed("c", c.token, an_error())])

    proxy.cut(where)
    assert await storage.record([Succeeded("a", a.token, a_result(a))]) == [True]
    proxy.cut(where)
    assert await storage.retry_dead("b")
    proxy.cut(where)
    assert await storage.delete_dead("c")
    proxy.cut(where)
    assert await storage.cancel("b")
    proxy.cut(where)
    assert await storage.fire_schedule(schedule, schedule, a_task("d"))
    proxy.cut(where)
    assert await storage.delete_schedule("s")
    proxy.cancel_cuts()
    assert [task.id for task in await beside.list_tasks()] == ["d"]
    assert await beside.list_dead() == []


async def test_a_claim_whose_reply_was_lost_does_not_get_what_others_took_first(cut_off):
    proxy, storage, beside = cut_off
    await storage.enqueue_many(some_tasks("ab"))
    await storage.renew()

    async def claim(section: Section) -> frozenset[str]:
        await section.begin(storage.owner, (), Claim(limit=2, now=None, queues=None, claim_id=""))
        rows = await section.candidates(Wanted(due_by=section.now), None, 2)
        assert [task.id for task in await beside.reserve(1)] == ["a"]
        for row in rows:
            row_rules.claim(row, storage.owner, section.now, section.epoch)
        proxy.cut("before_reply")
        return await section.write(Changes(claimed=rows))

    assert await storage._backend.transact(claim, claims_as=storage.owner) == {"a"}
    assert proxy.cancel_cuts()
    held = await storage.renew()
    assert set(held.held) == {"b"}


async def test_a_task_is_not_parked_under_a_gate_that_others_empty_meanwhile(
    storage, server, clock, monkeypatch
):
    """Nothing would offer the task again."""
    # A section can be overtaken, a script cannot.
    storage._backend.fast_path = None
    async with RedisStorage(server.url, prefix="p", clock=clock) as another:
        claimed = await claimed_beside_an_emptied_gate(storage, another, RedisSection, monkeypatch)

        assert claimed == ["c"]
