"""A storage whose driver is not installed says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("url", "extra", "driver"),
    [
        ("postgresql://h/db", "postgres", "asyncpg"),
        ("redis://h", "redis", "hiredis"),
        ("s3://bucket/prefix", "s3", "obstore"),
        ("nats://h", "nats", "nats"),
    ],
)
def test_a_missing_driver_is_named_with_what_to_install(url, extra, driver):
    code = (
        f"import sys; sys.modules[{driver!r}] = None\n"
        f"from omniq.storage import open_storage\nopen_storage({url!r})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert f"SettingsError: this kind of storage is an extra: pip install 'omniq[{extra}]'" in (
        ran.stderr
    )
