"""Real servers for every test that asks for one."""

from hypothesis import strategies

pytest_plugins = ["omniq.testing.plugin"]


def pytest_collection_finish() -> None:
    # The first time on a Python, Hypothesis makes tables of all characters: on a busy machine that
    # takes longer than the test may that happens to be the first to want them.
    strategies.text().validate()
