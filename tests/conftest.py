"""Real servers for every test that asks for one."""

import gc
import signal
from collections.abc import Generator

import pytest
from hypothesis import strategies

from omniq.testing.server_programs import ServerMissing

pytest_plugins = ["omniq.testing.plugin"]


def pytest_configure() -> None:
    # A caller may ignore signals: nohup ignores SIGHUP, and a shell without job control starts
    # background commands with SIGINT and SIGQUIT ignored. Programs inherit that, and would not stop
    # when a test signals them. They start with the default action if this process has a handler.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else _ignore)


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
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("deep_on")
        if marker and isinstance(item, pytest.Function):
            backends = set(marker.args)
            if backends & set(item.callspec.id.split("-")):
                item.add_marker(pytest.mark.deep)
    # Files with slow tests first: begun last, they would keep one process busy while the others wait.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _ignore(_number: int, _frame: object) -> None:
    """Keep this process alive, as its caller asked for."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    yield from _skipped_without_its_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield from _skipped_without_its_server()


def _skipped_without_its_server() -> Generator[None]:
    try:
        yield
    except ServerMissing as missing:
        pytest.skip(str(missing))


def pytest_collection_finish() -> None:
    # The first time on a Python, Hypothesis makes tables of all characters: on a busy machine that
    # takes longer than the test may that happens to be the first to want them.
    strategies.text().validate()
