"""Real servers for every test that asks for one."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings, strategies

from omniq import log
from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import base_folder

pytest_plugins = ["omniq.testing.plugin"]

TESTS = Path(__file__).parent

DEEP_ON_SERVERS = {"acceptance", "faults", "schedules", "security", "serialization", "worker"}
"""Folders whose tests run on servers only in `make deep`, unless they are marked with `on_servers`."""

LONGEST_FILES = (
    "storage/test_postgres_contract.py",
    "fleet/test_failover.py",
    "acceptance/test_worker_command.py",
    "worker/test_processes.py",
    "storage/test_postgres.py",
    "docs/test_guides.py",
    "storage/test_postgres_limits.py",
    "storage/test_s3_contract.py",
    "worker/test_enqueue_from_tasks.py",
    "worker/test_steps.py",
    "storage/test_nats_contract.py",
    "security/test_closed_by_default.py",
    "cli/test_screen.py",
    "storage/test_sqlite_contract.py",
    "fleet/test_servers.py",
    "acceptance/test_development.py",
    "storage/test_file_contract.py",
    "worker/test_lifespan.py",
    "fleet/test_cut_connections.py",
    "worker/test_worker_end_to_end.py",
    "log/test_worker_log.py",
    "storage/test_redis_sentinel.py",
    "docs/test_examples.py",
    "security/test_places.py",
    "worker/test_hostile_code.py",
    "worker/test_resources.py",
    "acceptance/test_worker_requests.py",
    "worker/test_leases.py",
    "faults/test_poison.py",
    "worker/test_flows.py",
    "storage/test_redis_access.py",
    "storage/test_redis.py",
    "storage/test_redis_contract.py",
    "fleet/test_wrong_clocks.py",
    "worker/test_pool.py",
    "properties/test_state_machine_on_servers.py",
    "worker/test_output.py",
    "storage/test_enqueues_together.py",
    "integrations/test_prometheus.py",
    "storage/test_s3.py",
    "security/test_door.py",
    "worker/test_error_rules.py",
    "acceptance/test_declared_schedules.py",
    "storage/test_nats.py",
    "fleet/test_doctor.py",
    "worker/test_refused_outcomes.py",
    "cli/test_control.py",
    "worker/test_unguarded_modules.py",
    "serialization/test_workers.py",
    "storage/test_redis_limits.py",
    "worker/test_names.py",
    "integrations/test_web_frameworks.py",
    "fleet/test_refusals.py",
    "fleet/test_deaths.py",
    "faults/test_bad_servers.py",
    "cli/test_stats.py",
    "cli/test_edges.py",
    "faults/test_worker_signals.py",
    "integrations/test_sentry.py",
    "security/test_sealed_rows.py",
)
"""Those that take longest in `make test`, longest first (`--durations=0` shows what each test takes)."""


def pytest_configure(config: pytest.Config) -> None:
    # A caller may ignore signals: nohup ignores SIGHUP, and a shell without job control starts
    # background commands with SIGINT and SIGQUIT ignored. Programs inherit that, and would not stop
    # when a test signals them. They start with the default action if this process has a handler.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else _ignore)
    # How long an example takes depends on what else the machine does.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("any_speed", deadline=None, suppress_health_check=slow)
    settings.load_profile("any_speed")
    # Dozens of tests start a PostgreSQL of their own, and making a cluster takes longer than a copy.
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="omniq-clusters-", dir=base_folder())
        Path(folder).chmod(0o711)
        os.environ["OMNIQ_TEST_POSTGRES_TEMPLATES"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    # Ten thousand tests are a million objects that live as long as the run. Without this the garbage
    # collector visits all of them again and again, here and in every test.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[object] | None:
    marks = getattr(obj, "pytestmark", ()) if name.lower().startswith("test") else ()
    is_deep = any(mark.name == "deep" for mark in marks)
    return [] if is_deep and makes_no_deep_tests(collector.config) else None


def makes_no_deep_tests(config: pytest.Config) -> bool:
    """Whether deep tests are not even collected: a third of all, which each process would only deselect."""
    return bool(config.getoption("markexpr") == "not deep")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and _deep_parameters(item) & set(callspec.id.split("-")):
            item.add_marker(pytest.mark.deep)
    # Begun last, a long file would keep one process busy while the others wait.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    first = {TESTS / name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: first.get(item.path, len(first) + (item.path not in slow)))
    if config.getoption("markexpr") == "deep":
        items[:] = _with_long_tests_first(items, config)


def _deep_parameters(item: pytest.Item) -> set[str]:
    """A test with one of these in its id is deep."""
    marker = item.get_closest_marker("deep_on")
    parameters = set(marker.args) if marker else set()
    if item.path.parent.name in DEEP_ON_SERVERS and not item.get_closest_marker("on_servers"):
        parameters |= {"postgres", "redis", "nats", "s3"}
    return parameters


def _with_long_tests_first(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """The deep tests in an order in which each process begins with its share of the long ones.

    Under `--dist worksteal` each process begins with a part of the list, and later takes tests from the
    ends of the other parts.
    """
    deep = [item for item in items if item.get_closest_marker("deep")]
    seconds = {item: _timeout_of(item) for item in deep}
    long = sorted((item for item in deep if seconds[item]), key=lambda item: -seconds[item])
    short = [item for item in deep if not seconds[item]]
    parts = getattr(config, "workerinput", {}).get("workercount", 1)
    size = -(-len(short) // parts)
    ordered = [
        item
        for part in range(parts)
        for item in (*long[part::parts], *short[part * size : (part + 1) * size])
    ]
    # The marker expression deselects the others.
    return ordered + [item for item in items if item not in seconds]


def _timeout_of(item: pytest.Item) -> float:
    """The timeout that the test asks for: it says how long it may be. 0 without one."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker and marker.args else 0.0


def _ignore(_number: int, _frame: object) -> None:
    """Keep this process alive, as its caller asked for."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    yield from _skipped_without_its_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from _skipped_without_its_server()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    # A command that a test calls in this process opens the console, which the next test would write to.
    if log.is_enabled():
        log.disable()


def _skipped_without_its_server() -> Generator[None]:
    try:
        yield
    except ServerMissing as missing:
        pytest.skip(str(missing))


def pytest_collection_finish() -> None:
    # The first time on a Python, Hypothesis makes tables of all characters: on a busy machine that
    # takes longer than the test may that happens to be the first to want them.
    strategies.text().validate()
