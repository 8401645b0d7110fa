"""A shop that stores its orders and its tasks in one SQLite file, in the same transactions.

    python examples/transactional_outbox.py

An order and the task that ships it are committed together, or neither is. The task books
the parcel in the transaction that completes the task, so that a parcel is booked once, even if the
worker crashes. All files are temporary.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from omniq import TaskContext, TaskQueue, task

TABLES = """
CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL);
CREATE TABLE parcels (order_id INTEGER NOT NULL, item TEXT NOT NULL);
"""


@task
def ship(ctx: TaskContext, order_id: int, item: str) -> None:
    """Book the parcel; the booking and the completion of the task are one commit."""
    with ctx.transaction() as connection:
        connection.execute("INSERT INTO parcels VALUES (?, ?)", (order_id, item))
        ctx.result = f"parcel with {item}"
    raise ConnectionError("the printer is out of paper")  # no effect: the task is complete


def place_order(queue: TaskQueue, connection: sqlite3.Connection, item: str) -> None:
    """Store the order and the task that ships it, both or neither."""
    with connection:
        (order_id,) = connection.execute(
            "INSERT INTO orders (item) VALUES (?) RETURNING id", (item,)
        ).fetchone()
        queue.options(connection=connection).enqueue(ship, order_id, item)
        if item == "dodo":
            raise LookupError("out of stock, and extinct")


def main(folder: Path) -> None:
    path = folder / "shop.db"
    with TaskQueue(f"sqlite:///{path}") as queue, closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
        for item in ("lamp", "dodo", "chair"):
            try:
                place_order(queue, connection, item)
                print(f"ordered  {item}")
            except LookupError as error:
                print(f"refused  {item}: {error}")
        queue.worker(concurrency=4).run_until_empty()
        for line in queue.list_tasks():
            print(f"task     {line.status.value}: {queue.handle(line.id).result()}")
        for order_id, item in connection.execute("SELECT * FROM parcels ORDER BY order_id"):
            print(f"parcel   for order {order_id}: {item}")
        orders, parcels = (
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("orders", "parcels")
        )
        print(f"{orders} orders, {parcels} parcels")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="omniq-shop-") as temporary:
        main(Path(temporary))
