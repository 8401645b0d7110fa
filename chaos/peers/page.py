"""The page docs/reference/fault-comparison.md, generated from the recorded rounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from chaos.peers.fleet import CONCURRENCY, PATIENCE, WORKERS
from chaos.peers.record import Results, Row
from chaos.peers.registry import PEERS, Profile

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fault-comparison.md"

_HEAD = f"""# How queues behave when workers are killed

The same kills for other task queues and for omniq, counted in the same way. `make chaos-peers` writes this page from
`chaos/peers/results.json`, and a test compares both.

A producer enqueues twenty tasks a second, each of 20 to 400 ms, and records outside the storage which of them the queue has
acknowledged. {WORKERS} workers with {CONCURRENCY} tasks at a time run them; each run records its start and its end, also outside
the storage. One to two seconds after all workers have started tasks, all processes of one of them get SIGKILL at the same time, as when a
machine or a container fails, and a new worker replaces it. This repeats. After the last kill, the producer continues with two
tasks a second for as long as the queue's documentation says that it takes to return a dead worker's tasks (at most
{PATIENCE:.0f} s). Then the storage is read for tasks that it still holds.

An acknowledged task has finished, or is in one of these columns:

- **lost**: no trace of it is left;
- **failed**: the queue has given up on it, or will never continue it automatically, and has stored it for inspection;
- **later**: the storage holds it, and the queue will run it again automatically, but not within the time of the test.

**Ran twice** counts tasks with two or more complete runs. All queues that guarantee *at least once*, omniq included, may run a
task twice: a worker can die after the task has run and before that is recorded. **Back after** is the time from the kill to the
next start of a task that was running, median and maximum.
"""

_NOTES = """
## How to read it

- Losing a task is no defect in a queue that guarantees *at most once*: if a task must never run twice, it has to be dropped when
  the queue cannot know how far it got. The table below has the guarantee of each queue.
- *Default* is the queue as its documentation introduces it; only the number of concurrent tasks is set. *Safest settings* are the
  safest that its documentation describes, with the time after which a dead worker's tasks return set to about five seconds where
  possible. Five seconds are for this comparison; with some queues every task must then be shorter than that (see the remarks).
- One round has some dozens of interrupted runs. A zero says that it did not happen in this round, not that it cannot happen; small
  differences between queues mean nothing.
- Only workers were killed. Servers stayed up, with everything synced to disk. Celery and Dramatiq run on Redis, not on RabbitMQ.
- Twenty deaths in a minute are many. Queues that check for dead workers rarely do better when deaths are rare.
- These rounds are the second version of the test. In the first, workers were killed without waiting until all three had started
  tasks, with a load average of up to 9 on two cores. In 14 such rounds omniq lost nothing, but three times a task ran twice, two
  tasks became dead letters since three workers had died while running them, and in two rounds, often with only one live worker,
  tasks returned only after up to 17 and 36 s. Queues whose workers start slowly did worse for that reason alone, so those rounds
  were dropped for all queues.
- Every adapter is in `chaos/peers/adapters/`, at most a hundred lines. Corrections from people who know a queue better are welcome.
"""


def page(results: Results) -> str:
    """Return the whole page."""
    parts = [
        _HEAD,
        "## Results\n",
        *_table(results.rows),
        f"\n{results.machine}; {results.servers}; measured {_days(results.rows)}, on a machine shared with other programs.",
        _NOTES,
        "## Guarantees and settings\n",
        *_guarantees(results.rows),
    ]
    return "\n".join(parts)


def _table(rows: Iterable[Row]) -> Iterable[str]:
    yield (
        "| queue | on | | kills | acknowledged | interrupted runs | lost | failed | later | "
        "ran twice | back after, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        count = row.count
        counted = (count.lost, count.failed, count.held, count.ran_twice)
        yield (
            f"| {row.peer} | {row.store} | {row.profile} | {count.kills} | {count.acknowledged} | "
            f"{count.interrupted} | {' | '.join(map(_number, counted))} | {_times(row)} |"
        )


def _guarantees(rows: list[Row]) -> Iterable[str]:
    for peer in PEERS:
        versions = next((row.versions for row in rows if row.peer == peer.name), {})
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield f"### {peer.name}\n"
        yield f"{named}. Guarantee: {peer.guarantee}. {peer.remark}\n"
        yield "| | settings | returns a dead worker's tasks |"
        yield "|---|---|---|"
        for profile in peer.profiles:
            yield f"| {profile.name} | {_settings(profile)} | {_returns(profile)} |"
        yield ""


def _settings(profile: Profile) -> str:
    assignments = (f"`{name}={json.dumps(value)}`" for name, value in profile.settings.items())
    return ", ".join(assignments) or "none"


def _returns(profile: Profile) -> str:
    if profile.returns_after is None:
        return "no"
    return f"after {profile.returns_after:g} s"


def _times(row: Row) -> str:
    if row.count.recovery_p50 is None:
        return "–"
    return f"{row.count.recovery_p50:.1f} / {row.count.recovery_max:.1f}"


def _number(count: int) -> str:
    return f"**{count}**" if count else "0"


def _days(rows: Iterable[Row]) -> str:
    days = sorted({row.day for row in rows})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"


def table(rows: list[Row]) -> str:
    """Return the same table for a terminal."""
    cells = [
        [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        for line in _table(rows)
        if not line.startswith("|---")
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
