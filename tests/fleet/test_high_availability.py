"""The servers of the guide "High availability", with the settings that it shows: the primary is killed while tasks wait."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from omniq import Settings, TaskQueue
from omniq.storage.redis.primaries import slot_of
from omniq.testing.redis_groups import RedisCluster, SentinelGroup
from omniq.testing.server_programs import ServerMissing
from omniq.testing.standby import PostgresPair
from tests.fleet.fleet_tasks import note

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "high-availability.md"
TASKS = 10

FailOver = Callable[[], None]


def block_of(title: str) -> str:
    """The lines of the guide's block with that title."""
    found = re.search(rf"^```text\n# {re.escape(title)}\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    assert found, f"{GUIDE} has no block {title!r}"
    return found[1]


def settings_of(title: str) -> dict[str, str]:
    """The settings of a block, by name."""
    lines = [re.split(r" = | ", line, maxsplit=1) for line in block_of(title).splitlines()]
    return {name: value.strip("'") for name, value in lines}


@contextmanager
def sentinels() -> Iterator[tuple[str, FailOver]]:
    after = re.search(r"down-after-milliseconds shop (\d+)", block_of("sentinel.conf"))
    assert after
    options = settings_of("redis.conf")
    with SentinelGroup(replicas=2, down_after=int(after[1]) / 1000, options=options) as group:

        def fail_over() -> None:
            # The guide says so: a failover can lose what the replicas do not have yet.
            group.await_replicas()
            group.primary().kill()

        yield group.url, fail_over


@contextmanager
def cluster() -> Iterator[tuple[str, FailOver]]:
    with RedisCluster(replicas=1, options=settings_of("redis.conf of a cluster")) as group:

        def fail_over() -> None:
            group.await_replicas()
            group.owner_of(slot_of("omniq")).kill()

        yield group.url, fail_over


@contextmanager
def standby() -> Iterator[tuple[str, FailOver]]:
    with PostgresPair(options=settings_of("postgresql.conf")) as pair:

        def fail_over() -> None:
            pair.primary.kill()
            pair.promote()
            pair.add_standby()

        yield pair.url, fail_over


@pytest.mark.deep
@pytest.mark.timeout(180)
@pytest.mark.fault("F31")
@pytest.mark.parametrize("recipe", [sentinels, cluster, standby])
def test_tasks_go_on_after_the_failover_of_each_recipe(recipe, tmp_path):
    try:
        servers = ExitStack()
        url, fail_over = servers.enter_context(recipe())
    except ServerMissing as missing:
        pytest.skip(str(missing))
    with servers, TaskQueue(url, settings=Settings(reconnect_timeout=60)) as queue:
        handles = [
            queue.enqueue(note, str(tmp_path), f"before {number}") for number in range(TASKS)
        ]
        fail_over()
        handles += [
            queue.enqueue(note, str(tmp_path), f"after {number}") for number in range(TASKS)
        ]
        with queue.worker(poll_interval=0.2) as pool:
            pool.run_until_empty()

        assert [handle.result() for handle in handles] == [
            f"{when} {number}" for when in ("before", "after") for number in range(TASKS)
        ]
