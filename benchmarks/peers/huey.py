"""Huey: one process with 4 threads; on SQLite and files polling every 10 ms instead of every 100."""

from __future__ import annotations

from huey import FileHuey, RedisHuey, SqliteHuey

from benchmarks.run_context import FOLDER, STORE, URL, exec_module, record_start

PACKAGES = ["huey", "redis", "hiredis"]
STORES = ["redis", "redis-always", "sqlite-power", "file-os"]
KEEPS = "nothing"

match STORE.partition("-")[0]:
    case "redis":
        huey = RedisHuey("bench", url=URL)
    case "sqlite":
        # The defaults: WAL, synchronous FULL.
        huey = SqliteHuey("bench", filename=str(FOLDER / "huey.db"))
    case _:
        huey = FileHuey("bench", path=str(FOLDER / "huey"))


@huey.task()
def noop(number: int) -> None:
    record_start(number)


def open() -> None:
    """Do nothing: it connects when it is used."""


def close() -> None:
    huey.storage.close()


def one(number: int) -> None:
    noop(number)


def work() -> None:
    polling = [] if STORE.startswith("redis") else ["-d", "0.01", "-m", "0.01"]
    threads = ["-k", "thread", "-w", 4]
    exec_module("huey.bin.huey_consumer", f"{__name__}.huey", "-q", "-n", *threads, *polling)
