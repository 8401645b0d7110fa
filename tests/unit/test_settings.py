"""Settings are merged once, validated once, and a bad value names its source."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from datetime import timedelta
from pathlib import Path

import pytest

from omniq.errors import SettingsError
from omniq.retry import ExponentialBackoff, LinearBackoff
from omniq.settings import Settings
from omniq.text.masking import mask_url

NAMES = [field.name for field in fields(Settings) if field.init]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(f"OMNIQ_{name.upper()}", raising=False)
    return tmp_path


def test_the_defaults_are_those_that_are_documented():
    settings = Settings()

    assert {name: getattr(settings, name) for name in NAMES} == {
        "url": None,
        "concurrency": 10,
        "modules": (),
        "poll_interval": 1.0,
        "lease": 30.0,
        "default_timeout": 300.0,
        "default_max_retries": 3,
        "max_crashes": 3,
        "base_retry_delay": 1.0,
        "retry": None,
        "queues": None,
        "result_ttl": 86400.0,
        "serializer": "msgspec",
        "signing_key": None,
        "encryption_key": None,
        "old_keys": None,
        "durability": "power",
        "log_level": "INFO",
        "log_format": "text",
        "log_tracebacks": True,
        "log_error_messages": True,
        "base_dir": Path(".omniq"),
        "shutdown_timeout": 30.0,
        "max_payload": 1048576,
        "max_output_chunks": 10_000,
        "max_output_bytes": 1_048_576,
        "errors": None,
        "lifespan": None,
        "middleware": (),
        "start_timeout": 60.0,
        "max_tasks_per_child": None,
        "max_memory_per_child": None,
        "child_memory_limit": None,
        "child_process_limit": None,
        "child_file_limit": None,
        "unknown_function_timeout": None,
        "root_opens_any_store": False,
        "require_key": False,
        "max_pending": None,
        "schema": "omniq",
        "poll_only": False,
        "pool_size": 10,
        "prefix": "omniq",
        "call_timeout": None,
        "reconnect_timeout": None,
        "stalled_after": 10.0,
        "stuck_grace": 10.0,
        "endless_after": 3600.0,
        "app_version": None,
    }


def test_load_returns_the_defaults_without_environment_and_files():
    settings = Settings.load()

    assert settings == Settings()
    assert set(settings.sources.values()) == {"default"}


def test_argument_beats_environment_beats_omniq_toml_beats_pyproject(folder, monkeypatch):
    (folder / "pyproject.toml").write_text(
        "[tool.omniq]\nlease = 1\npoll_interval = 1\nmax_crashes = 1\nconcurrency = 7\n"
    )
    (folder / "omniq.toml").write_text("lease = 2\npoll_interval = 2\nmax_crashes = 2\n")
    monkeypatch.setenv("OMNIQ_LEASE", "3")
    monkeypatch.setenv("OMNIQ_POLL_INTERVAL", "3")
    settings = Settings.load(lease=4)

    assert (settings.lease, settings.poll_interval) == (4.0, 3.0)
    assert (settings.max_crashes, settings.concurrency) == (2, 7)
    assert settings.sources["lease"] == "argument"
    assert settings.sources["poll_interval"] == "OMNIQ_POLL_INTERVAL"
    assert settings.sources["max_crashes"] == "omniq.toml"
    assert settings.sources["concurrency"] == "pyproject.toml"
    assert settings.sources["durability"] == "default"


def test_a_value_that_equals_its_default_still_has_its_source(monkeypatch):
    monkeypatch.setenv("OMNIQ_LEASE", "30")

    assert Settings.load().sources["lease"] == "OMNIQ_LEASE"
    assert Settings.load(lease=30).sources["lease"] == "argument"


def test_the_constructor_uses_only_its_arguments(folder, monkeypatch):
    (folder / "omniq.toml").write_text("lease = 2\n")
    monkeypatch.setenv("OMNIQ_POLL_INTERVAL", "3")
    settings = Settings(max_crashes=9)

    assert (settings.lease, settings.poll_interval) == (30.0, 1.0)
    assert settings.sources["max_crashes"] == "argument"
    assert settings.sources["lease"] == "default"


@pytest.mark.parametrize("text", ["none", "None", " NONE "])
def test_none_disables_the_default_timeout_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("OMNIQ_DEFAULT_TIMEOUT", text)

    assert Settings.load().default_timeout is None


def test_none_disables_the_default_timeout_in_toml_and_as_an_argument(folder):
    (folder / "omniq.toml").write_text('default_timeout = "none"\n')

    assert Settings.load().default_timeout is None
    assert Settings.load(default_timeout=None).sources["default_timeout"] == "argument"
    assert Settings(default_timeout=None).default_timeout is None


def test_an_argument_of_none_counts_as_not_given(monkeypatch):
    monkeypatch.setenv("OMNIQ_URL", "memory://")

    assert Settings.load(url=None, lease=None).url == "memory://"


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("OMNIQ_LEASE", " ")

    assert Settings.load().sources["lease"] == "default"


def test_every_setting_can_come_from_the_environment(monkeypatch):
    texts = {
        "url": "memory://",
        "serializer": "CLOUDPICKLE",
        "signing_key": "secret",
        "encryption_key": "secret",
        "old_keys": "older oldest",
        "durability": "os",
        "log_level": "debug",
        "log_format": "JSON",
        "log_tracebacks": "0",
        "log_error_messages": "False",
        "base_dir": "elsewhere",
        "modules": "app.tasks, shop",
        "errors": "app.tasks.RULES",
        "lifespan": "app.tasks.lifespan",
        "middleware": "app.mw.one, app.mw.two",
        "retry": "linear(step=5s, cap=1m)",
        "queues": '{"mail": {"retry": "10s, 30s"}}',
        "root_opens_any_store": "True",
        "require_key": "true",
        "poll_only": "true",
        "max_output_bytes": "70000",
        "child_memory_limit": "70000000",
        "child_file_limit": "64",
    }
    for name in NAMES:
        monkeypatch.setenv(f"OMNIQ_{name.upper()}", texts.get(name, "17"))
    settings = Settings.load()

    assert all(settings.sources[name] == f"OMNIQ_{name.upper()}" for name in NAMES)
    assert (settings.max_payload, settings.lease) == (17, 17.0)
    assert (settings.serializer, settings.log_level) == ("cloudpickle", "DEBUG")
    assert settings.log_format == "json"
    assert (settings.log_tracebacks, settings.log_error_messages) == (False, False)
    assert settings.base_dir == Path("elsewhere")
    assert settings.retries_of("web") == (17, LinearBackoff(5.0, 60.0))
    assert settings.retries_of("mail") == (2, (10.0, 30.0))
    assert settings.modules == ("app.tasks", "shop")
    assert settings.lifespan == "app.tasks.lifespan"
    assert settings.middleware == ("app.mw.one", "app.mw.two")


def test_a_queue_may_have_its_own_retries_in_a_file(folder):
    (folder / "pyproject.toml").write_text(
        "[tool.omniq]\nretry = [1, '2s', 4.5]\n"
        "[tool.omniq.queues.mail]\nretry = 'exponential(base=2, cap=1h)'\n"
        "[tool.omniq.queues.web]\nmax_retries = 0\n"
    )
    settings = Settings.load()

    assert settings.retries_of("default") == (3, (1.0, 2.0, 4.5))
    assert settings.retries_of("mail") == (3, ExponentialBackoff(base=2.0, cap=3600.0))
    assert settings.retries_of("web") == (0, (1.0, 2.0, 4.5))
    assert settings.sources["queues"] == "pyproject.toml"
    assert settings.shown()["retry"] == "1, 2, 4.5"
    assert settings.shown()["queues"] == (
        '{"mail": {"retry": "exponential(base=2, jitter=0.1, cap=3600)"}, "web": {"max_retries": 0}}'
    )
    # As it reaches the processes of a worker, and as another process reads what is shown.
    assert Settings(**settings.as_data()) == settings
    assert Settings(retry=settings.shown()["retry"]).retry == settings.retry


def test_a_list_of_delays_and_another_number_of_retries_contradict_each_other(monkeypatch):
    assert Settings(retry=[1, 2, 3, 4]).retries_of("default")[0] == 4
    with pytest.raises(SettingsError, match="contradict each other"):
        Settings(retry=[1, 2], default_max_retries=5)
    monkeypatch.setenv("OMNIQ_DEFAULT_MAX_RETRIES", "3")
    with pytest.raises(SettingsError, match="contradict each other"):
        Settings.load(retry=[1, 2])


def test_durations_may_be_timedeltas():
    assert Settings.load(lease=timedelta(minutes=1)).lease == 60.0


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("url", ""),
        ("url", "no-scheme"),
        ("url", 5),
        ("concurrency", 0),
        ("retry", []),
        ("retry", [1, -1]),
        ("retry", [1, "x"]),
        ("retry", "soon"),
        ("retry", "linear(step=-1)"),
        ("retry", "linear(stp=1)"),
        ("retry", "linear(1)"),
        ("retry", "exponential(jitter=2)"),
        ("retry", 5),
        ("queues", {"mail": 5}),
        ("queues", {"mail": {"retries": 5}}),
        ("queues", {"mail": {"max_retries": -1}}),
        ("queues", {"mail": {"ageing": 0}}),
        ("queues", {"mail": {"ageing": float("nan")}}),
        ("queues", {"mail": {"ageing": "soon"}}),
        ("queues", {"mail": {"retry": [1, 2], "max_retries": 3}}),
        ("queues", {"no name": {"max_retries": 3}}),
        ("queues", ["mail"]),
        ("max_pending", 0),
        ("max_pending", "many"),
        ("schema", ""),
        ("prefix", "a b"),
        ("prefix", "x" * 101),
        ("poll_only", 1),
        ("pool_size", 0),
        ("call_timeout", 0),
        ("reconnect_timeout", 0),
        ("stalled_after", 0),
        ("stuck_grace", -1),
        ("modules", "app.tasks"),
        ("modules", ["app/tasks"]),
        ("modules", ["app", ""]),
        ("concurrency", 1.0),
        ("concurrency", True),
        ("poll_interval", 0),
        ("lease", 0),
        ("lease", -1),
        ("lease", math.nan),
        ("lease", math.inf),
        ("lease", 10**400),
        ("lease", "30"),
        ("lease", False),
        ("lease", timedelta(0)),
        ("default_timeout", 0),
        ("default_timeout", "never"),
        ("default_max_retries", -1),
        ("max_crashes", 0),
        ("base_retry_delay", -0.1),
        ("result_ttl", -1),
        ("serializer", "pickle"),
        ("signing_key", ""),
        ("durability", "none"),
        ("log_level", "LOUD"),
        ("base_dir", ""),
        ("base_dir", 3),
        ("shutdown_timeout", -1),
        ("max_payload", 0),
        ("max_payload", 2**63),
    ],
)
def test_a_bad_argument_is_refused_by_name(name, bad):
    with pytest.raises(SettingsError, match=rf"^{name}=.*: expected "):
        Settings(**{name: bad})
    with pytest.raises(SettingsError, match=rf"^{name}=.*: expected "):
        Settings.load(**{name: bad})


def test_a_bad_variable_is_named_with_its_value(monkeypatch):
    monkeypatch.setenv("OMNIQ_LEASE", "abc")

    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert str(caught.value) == "OMNIQ_LEASE=abc: expected a number of seconds, greater than 0"


def test_a_bad_value_in_a_file_is_named_with_its_file(folder):
    (folder / "omniq.toml").write_text('lease = "abc"\n')

    with pytest.raises(SettingsError) as caught:
        Settings.load()
    expected = "omniq.toml: lease = 'abc': expected a number of seconds, greater than 0"
    assert str(caught.value) == expected


def test_a_bad_value_is_refused_even_where_a_better_source_hides_it(folder):
    (folder / "omniq.toml").write_text("lease = -1\n")

    with pytest.raises(SettingsError, match=r"omniq\.toml"):
        Settings.load(lease=5)


@pytest.mark.parametrize(
    ("file", "text"), [("omniq.toml", "leese = 1"), ("pyproject.toml", "[tool.omniq]\nleese = 1")]
)
def test_an_unknown_key_suggests_the_nearest_name(folder, file, text):
    (folder / file).write_text(text)

    with pytest.raises(SettingsError, match=rf"{file}.*'leese'; did you mean lease\?"):
        Settings.load()


def test_an_unknown_argument_suggests_the_nearest_name():
    with pytest.raises(SettingsError, match="did you mean concurrency"):
        Settings.load(concurency=None)


def test_an_unknown_name_without_a_match_lists_all_settings():
    with pytest.raises(SettingsError, match="the settings are url, concurrency"):
        Settings.load(zzz=1)


def test_a_pyproject_without_omniq_is_ignored(folder):
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.other]\nlease = 0\n')

    assert Settings.load() == Settings()


@pytest.mark.parametrize("text", ["lease = ", "\x00", "tool = 3\n[tool.omniq]"])
def test_a_malformed_toml_file_is_named(folder, text):
    (folder / "omniq.toml").write_text(text)

    with pytest.raises(SettingsError, match=r"^omniq\.toml cannot be read"):
        Settings.load()


def test_tool_omniq_must_be_a_table(folder):
    (folder / "pyproject.toml").write_text("[tool]\nomniq = 3\n")

    with pytest.raises(SettingsError, match=r"tool\.omniq must be a table"):
        Settings.load()


def test_cloudpickle_needs_a_signing_key():
    with pytest.raises(SettingsError, match="OMNIQ_SIGNING_KEY"):
        Settings(serializer="cloudpickle")

    assert Settings(serializer="cloudpickle", signing_key="k").serializer == "cloudpickle"


def test_no_secret_is_shown():
    settings = Settings(url="redis://me:hunter2@host/0?token=hunter3", signing_key="hunter4")

    assert "hunter" not in repr(settings)
    assert "redis://me:***@host/0?token=***" in repr(settings)


@pytest.mark.parametrize(
    ("name", "bad"), [("signing_key", b"hunter2"), ("url", b"x://u:hunter2@h")]
)
def test_no_secret_is_shown_in_an_error(name, bad):
    with pytest.raises(SettingsError) as caught:
        Settings.load(**{name: bad})

    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory://"),
        ("sqlite:///a.db?durability=os", "sqlite:///a.db?durability=os"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:p@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql://u:p@q/r@host/db", "postgresql://u:***@host/db"),
        ("postgresql:///db?user=u&password=p", "postgresql:///db?user=u&password=***"),
    ],
)
def test_a_masked_url_hides_the_password_and_nothing_else(url, shown):
    assert mask_url(url) == shown


def test_settings_are_frozen_and_compare_by_value():
    settings = Settings(lease=5)

    with pytest.raises(FrozenInstanceError):
        settings.lease = 6  # type: ignore[misc]  # that it cannot be set is the point
    assert settings == Settings.load(lease=5)
    assert hash(settings) == hash(Settings(lease=5))
    assert replace(settings, max_crashes=1).lease == 5


def test_settings_can_be_pickled():
    settings = Settings.load(lease=5)
    copy = pickle.loads(pickle.dumps(settings))

    assert copy == settings
    assert copy.sources == settings.sources
