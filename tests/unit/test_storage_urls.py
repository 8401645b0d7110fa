"""The options of a storage URL are settings too: the URL decides, and a wrong combination is an error."""

from __future__ import annotations

import pytest

from omniq import AsyncTaskQueue, QueueFull, Settings, SettingsError, task
from omniq.storage import open_storage

POSTGRES = "postgresql://localhost/app"
REDIS = "redis://localhost/0"


@task
def work() -> None:
    """Never run."""


def test_options_of_the_url_are_settings_of_the_storage():
    storage = open_storage(
        f"{POSTGRES}?schema=jobs&pool_size=3&poll_only=true&max_pending=7&lease=9"
    )

    settings = storage.settings
    assert (settings.schema, settings.pool_size, settings.poll_only) == ("jobs", 3, True)
    assert (settings.max_pending, settings.lease, storage.max_pending) == (7, 9.0, 7)
    assert settings.sources["schema"].startswith("storage URL postgresql://localhost/app")


@pytest.mark.parametrize(
    ("url", "name", "text", "value"),
    [
        ("memory://", "max_pending", "5", 5),
        (POSTGRES, "schema", "jobs", "jobs"),
        (POSTGRES, "poll_only", "true", True),
        (POSTGRES, "pool_size", "4", 4),
        (REDIS, "prefix", "jobs", "jobs"),
    ],
)
def test_each_option_can_come_from_the_environment_and_the_url_decides(
    monkeypatch, url, name, text, value
):
    monkeypatch.setenv("OMNIQ_URL", url)
    monkeypatch.setenv(f"OMNIQ_{name.upper()}", text)
    from_environment = open_storage()
    other = {"max_pending": "9", "poll_only": "false", "pool_size": "9"}.get(name, "other")
    with_url = open_storage(f"{url}?{name}={other}")

    assert getattr(from_environment.settings, name) == value
    assert getattr(with_url.settings, name) == type(value)(
        {"false": False}.get(other, other)  # bool("false") would be true.
    )


@pytest.mark.parametrize(("server", "name"), [("postgres", "schema"), ("redis", "prefix")])
async def test_the_schema_and_the_prefix_of_the_settings_reach_the_server(request, server, name):
    url = request.getfixturevalue(f"{server}_url")
    address, _, query = url.partition("?")
    chosen = query.removeprefix(f"{name}=")
    async with AsyncTaskQueue(address, settings=Settings(**{name: chosen})) as queue:
        handle = await queue.enqueue(work)

    async with AsyncTaskQueue(url) as other:
        assert await other.get_task(handle.id) is not None


async def test_the_bound_of_the_settings_refuses_the_next_task(monkeypatch):
    monkeypatch.setenv("OMNIQ_MAX_PENDING", "2")
    async with AsyncTaskQueue("memory://") as queue:
        await queue.enqueue_many([(work,), (work,)])

        with pytest.raises(QueueFull, match="2 tasks are waiting"):
            await queue.enqueue(work)


@pytest.mark.parametrize(
    ("url", "name", "text", "kind"),
    [
        (REDIS, "schema", "jobs", "postgresql"),
        ("sqlite:///tasks.db", "prefix", "jobs", "redis"),
        ("memory://", "pool_size", "3", "postgresql"),
        ("file:tasks", "poll_only", "true", "postgresql"),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_setting_of_another_kind_of_storage_is_refused(
    monkeypatch, url, name, text, kind, is_named
):
    """Also when the URL of the settings is passed on, as `omniq worker` does."""
    monkeypatch.setenv("OMNIQ_URL", url)
    monkeypatch.setenv(f"OMNIQ_{name.upper()}", text)

    with pytest.raises(SettingsError) as caught:
        open_storage(url if is_named else None)

    assert f"{name}=" in str(caught.value)
    assert f"OMNIQ_{name.upper()}" in str(caught.value)
    assert f"only {kind}:// has this setting" in str(caught.value)
    assert url in str(caught.value)


def test_a_program_that_names_its_url_ignores_what_is_for_another_storage(monkeypatch):
    monkeypatch.setenv("OMNIQ_URL", POSTGRES)
    monkeypatch.setenv("OMNIQ_SCHEMA", "jobs")

    for memory in (
        open_storage("memory://"),
        open_storage(settings=Settings.load(url="memory://")),
    ):
        assert memory.capabilities.name == "memory"
        assert (memory.settings.schema, memory.settings.sources["schema"]) == ("omniq", "default")
    with pytest.raises(SettingsError, match=r"schema=jobs \(argument\): only postgresql://"):
        open_storage("memory://", settings=Settings(schema="jobs"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://?max_pending=0", "max_pending"),
        ("memory://?max_pending=many", "max_pending"),
        (f"{POSTGRES}?poll_only=perhaps", "poll_only"),
        (f"{POSTGRES}?pool_size=0", "pool_size"),
        (f"{REDIS}?prefix=%7Bx%7D", "prefix"),
        ("memory://?schema=jobs", "unknown option 'schema'; known: durability, lease"),
        ("sqlite:///x.db?max_pendin=1", "unknown option 'max_pendin'"),
    ],
)
def test_a_wrong_option_of_a_url_is_named(url, message):
    with pytest.raises(SettingsError, match="storage URL") as caught:
        open_storage(url)

    assert message in str(caught.value)
