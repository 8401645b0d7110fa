"""What a Redis server allows: few rights, disabled commands, passwords that change while workers run."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from omniq import AsyncTaskQueue, Settings
from omniq.errors import StorageError, StorageRefused
from omniq.storage import open_storage
from omniq.storage.redis import RedisStorage
from omniq.testing.builders import a_task
from omniq.testing.clock import ManualClock
from omniq.testing.redis_groups import RedisCluster, SentinelGroup, ask
from omniq.testing.servers import RedisServer
from tests.storage.test_redis import use_every_verb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/omniq/storage/redis"
GUIDE = (ROOT / "docs/guides/security.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


@pytest.fixture
async def admin(server):
    async with Redis.from_url(server.url) as admin:
        await admin.flushall()
        yield admin


def rights(prefix: str = "omniq") -> list[str]:
    """The rights of the guide, as the arguments of ACL SETUSER behind the name."""
    found = re.search(r"^ACL SETUSER omniq (.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("{omniq}", f"{{{prefix}}}").split()


def url_of(server: RedisServer, user: str) -> str:
    return server.url.replace(f":{server.password}@", f"{user}@")


def used_commands() -> set[str]:
    """The commands that scripts and the connection send, as the sources have them."""
    lua = "".join(path.read_text("utf-8") for path in SOURCES.rglob("*.lua"))
    names = set(re.findall(r"redis\.p?call\('(\w+)'", lua))
    names |= set(re.findall(r"'(Z[A-Z]+)'", lua))
    python = "".join(path.read_text("utf-8") for path in SOURCES.glob("*.py"))
    names |= set(re.findall(r'(?:pack|command|send|ask)\(\s*(?:node, )?"([A-Z]+)"', python))
    return {name.lower() for name in names}


def test_the_rights_in_the_guide_are_the_commands_that_are_used():
    allowed = {each[1:] for each in rights() if each.startswith("+")}
    optional = {"config|get", "info", "client|setname", "role"}

    assert {name.partition("|")[0] for name in allowed - optional} >= used_commands() - {
        # Of Sentinels, whose users have other rights.
        "sentinel",
        # Allowed for everyone, or sent by choice.
        *("auth", "select", "config", "info", "client", "role"),
    }
    assert {name.partition("|")[0] for name in allowed} <= {
        *used_commands(),
        *("config", "info", "client", "select"),
    }


async def test_a_user_with_the_rights_of_the_guide_can_do_everything(server, admin):
    await admin.execute_command("ACL", "SETUSER", "least", *rights("p"))
    clock = ManualClock()
    async with RedisStorage(url_of(server, "least:password"), prefix="p", clock=clock) as storage:
        await use_every_verb(storage, clock)
        await storage._backend.read_clock()
        assert storage.capabilities.durability == "none"


async def test_the_walk_of_a_task_with_the_rights_of_the_guide(server, admin):
    await admin.execute_command("ACL", "SETUSER", "walker", *rights())
    # The tests before this one were refused on purpose.
    await admin.acl_log_reset()
    url = url_of(server, "walker:password")
    async with AsyncTaskQueue(url, settings=Settings(poll_interval=0.5)) as queue:
        async with queue.worker(concurrency=2):
            handle = await queue.enqueue("tests.faults.fault_tasks.append", "/dev/null", 1)
            await handle.result(timeout=30)
            later = await queue.options(delay=0.3).enqueue(
                "tests.faults.fault_tasks.append", "/dev/null", 2
            )
            await later.result(timeout=30)
        assert await queue.get_result(handle.id) is not None
        assert (await admin.acl_log()) == []


@pytest.mark.parametrize("command", ["evalsha", "script", "hset", "time"])
async def test_a_right_that_is_missing_is_named(server, admin, command):
    user = f"no-{command.partition('|')[0]}"
    await admin.execute_command("ACL", "SETUSER", user, *rights("p"), f"-{command}")
    # Or they would be there from other tests.
    await admin.script_flush()

    async def use() -> None:
        async with RedisStorage(url_of(server, f"{user}:password"), prefix="p") as storage:
            await storage._backend.read_clock()
            await use_every_verb(storage, ManualClock())

    with pytest.raises(StorageRefused, match=r"ACL SETUSER|Restrict server users") as refused:
        await use()
    assert "password" not in str(refused.value)


@pytest.mark.parametrize("command", ["EVALSHA", "SCRIPT"])
async def test_a_server_whose_scripts_are_disabled_is_refused(command):
    with (
        RedisServer(options={"rename-command": f"{command} hidden"}) as disabled,
        pytest.raises(StorageRefused, match=f"needs the command {command}"),
    ):
        await open_storage(disabled.url).open()


async def test_without_info_and_config_a_store_works_and_doctor_says_that_it_does_not_know():
    renamed = {"rename-command": "INFO hidden-info --rename-command CONFIG hidden-config"}
    with RedisServer(options=renamed) as server:
        async with RedisStorage(server.url) as storage:
            await storage.enqueue(a_task("a"))
            found = {
                name: (value, verdict) for name, value, verdict in await storage.server_report()
            }

    assert found["maxmemory-policy"][0] == "unknown"
    assert found["maxmemory-policy"][1] != "ok"


async def test_doctor_says_what_a_failover_would_lose():
    with SentinelGroup() as group:
        async with RedisStorage(group.url) as storage:
            before = {
                name: (value, verdict) for name, value, verdict in await storage.server_report()
            }
            ask(group.primary(), "CONFIG", "SET", "min-replicas-to-write", "1")
            after = {
                name: (value, verdict) for name, value, verdict in await storage.server_report()
            }

    assert before["replicas"][0] == "1"
    assert before["min-replicas-to-write"][1].startswith("warn: ")
    assert after["min-replicas-to-write"] == ("1", "ok")


# Passwords


async def test_a_password_that_changes_is_read_again_without_a_restart(server, admin, tmp_path):
    file = tmp_path / "password"
    file.write_text("first")
    user = ("ACL", "SETUSER", "rotating")
    await admin.execute_command(*user, "reset", "on", ">first", "~*", "&*", "+@all")
    url = f"{url_of(server, 'rotating')}?password_file={file}"
    async with open_storage(url) as storage:
        await storage.enqueue(a_task("a"))
        file.write_text("second\n")
        await admin.execute_command(*user, ">second", "<first")
        await admin.execute_command("CLIENT", "KILL", "USER", "rotating")
        await storage.enqueue(a_task("b"))

        assert [task.id for task in await storage.reserve(5)] == ["a", "b"]


@pytest.mark.fault("F32")
async def test_a_store_that_has_worked_waits_for_a_password_that_is_refused(server, admin):
    user = ("ACL", "SETUSER", "waiting")
    await admin.execute_command(*user, "reset", "on", ">pw", "~*", "&*", "+@all")
    async with open_storage(url_of(server, "waiting:pw")) as storage:
        await storage.enqueue(a_task("a"))
        await admin.execute_command(*user, ">other", "<pw")
        await admin.execute_command("CLIENT", "KILL", "USER", "waiting")
        call = asyncio.create_task(storage.enqueue(a_task("b")))
        done, _ = await asyncio.wait([call], timeout=1.0)
        await admin.execute_command(*user, ">pw", "<other")
        await asyncio.wait_for(call, 15)

        assert not done
        assert [task.id for task in await storage.reserve(5)] == ["a", "b"]
    with pytest.raises(StorageRefused, match="right user and password"):
        await open_storage(url_of(server, "waiting:wrong")).open()


async def test_a_worker_lives_on_while_its_password_is_refused(server, admin):
    user = ("ACL", "SETUSER", "living")
    await admin.execute_command(*user, "reset", "on", ">pw", "~*", "&*", "+@all")
    settings = Settings(lease=5.0, poll_interval=0.2)
    async with (
        AsyncTaskQueue(url_of(server, "living:pw"), settings=settings) as queue,
        queue.worker(concurrency=2) as pool,
    ):
        first = await queue.enqueue("tests.faults.fault_tasks.append", "/dev/null", 1)
        await first.result(timeout=30)
        await admin.execute_command(*user, ">other", "<pw")
        await admin.execute_command("CLIENT", "KILL", "USER", "living")
        with pytest.raises(StorageError, match="right user and password"):
            await queue.get_result(first.id)
        assert pool.running
        await admin.execute_command(*user, ">pw", "<other")
        second = await queue.enqueue("tests.faults.fault_tasks.append", "/dev/null", 2)
        await second.result(timeout=60)


# Clusters


async def test_the_rights_of_the_guide_suffice_in_a_cluster():
    with RedisCluster() as cluster:
        for server in cluster.servers:
            ask(server, "ACL", "SETUSER", "least", *rights())
        url = cluster.url.replace(f":{cluster.servers[0].password}@", "least:password@")
        clock = ManualClock()
        async with RedisStorage(url, clock=clock) as storage:
            await use_every_verb(storage, clock)
