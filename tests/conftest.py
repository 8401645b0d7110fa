"""Real servers for every test that asks for one."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import strategies

from omniq import log
from omniq.testing.server_programs import ServerMissing
from omniq.testing.servers import base_folder

pytest_plugins = ["omniq.testing.plugin"]

TESTS = Path(__file__).parent

LONGEST_FILES = (
    "acceptance/test_worker_command.py",
    "security/test_closed_by_default.py",
    "properties/test_state_machine.py",
    "security/test_door.py",
    "security/test_dashboard.py",
    "storage/test_sqlite_contract.py",
    "fleet/test_doctor.py",
    "simulation/test_seeds.py",
    "storage/test_file_contract.py",
    "worker/test_pool.py",
    "docs/test_guides.py",
    "security/test_places.py",
    "faults/test_transaction_kills.py",
    "fleet/test_servers.py",
    "browser/test_chromium.py",
    "security/test_terminal.py",
    "worker/test_unknown_functions.py",
    "fleet/test_wrong_clocks.py",
    "storage/test_file_crashes.py",
    "schedules/test_handover.py",
    "security/test_names.py",
    "security/test_records.py",
    "storage/test_postgres.py",
    "storage/test_file_unwatched.py",
    "properties/test_state_machine_on_servers.py",
    "storage/test_log.py",
    "storage/test_postgres_contract.py",
    "storage/test_file.py",
    "security/test_transplants.py",
    "checkers/test_types.py",
    "worker/test_shutdown.py",
    "worker/test_leases.py",
    "fleet/test_refusals.py",
    "cli/test_edges.py",
    "integrations/test_web_frameworks.py",
    "fleet/test_drain.py",
    "security/test_fields.py",
    "cli/test_screen.py",
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
        marker = item.get_closest_marker("deep_on")
        callspec = getattr(item, "callspec", None)
        if marker and callspec and set(marker.args) & set(callspec.id.split("-")):
            item.add_marker(pytest.mark.deep)
    # Begun last, a long file would keep one process busy while the others wait.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    first = {TESTS / name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: first.get(item.path, len(first) + (item.path not in slow)))
    if config.getoption("markexpr") == "deep":
        items[:] = _with_long_tests_first(items, config)


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
