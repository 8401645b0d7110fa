"""Who is played against whom, with which settings, and what each of them promises.

Settings are given to the adapters from here and printed from here, so that the page cannot say
anything else than what was played. `returns_after` is what a queue's own documentation or its
settings say, never what was measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environments import environment

DEFAULT, SAFE = "as it comes", "set for safety"


@dataclass(frozen=True)
class Profile:
    """`returns_after`: seconds until a dead worker's task is run again; None where it is not."""

    name: str
    returns_after: float | None
    settings: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A queue, the stores it is played on, its packages, and in words what it says of itself."""

    name: str
    adapter: str
    stores: tuple[str, ...]
    requirements: tuple[str, ...]
    promise: str
    remark: str
    profiles: tuple[Profile, ...]

    def python(self) -> Path:
        """An interpreter that has it; the one that runs this has omniq."""
        if not self.requirements:
            return Path(sys.executable)
        return environment(self.adapter, list(self.requirements))


PEERS = (
    Peer(
        "omniq",
        "omniq",
        ("SQLite", "PostgreSQL", "Redis"),
        (),
        "at least once, one outcome",
        "A claim is a lease of the whole worker. `lease` is half a minute unless set. A task that was "
        "running in three workers when they died (`max_crashes`) is a dead letter, and kept.",
        (Profile(DEFAULT, 31), Profile(SAFE, 6, {"lease": 5})),
    ),
    Peer(
        "arq",
        "arq",
        ("Redis",),
        ("arq==0.28.0",),
        "at least once",
        "A job stays in the queue until it is finished, marked as in progress for `job_timeout` "
        "and ten seconds more. The mark is not renewed, so that the timeout has to be longer than "
        "the longest job, and is the time that a lost one waits.",
        (Profile(DEFAULT, 310), Profile(SAFE, 15, {"job_timeout": 5})),
    ),
    Peer(
        "Celery",
        "celery",
        ("Redis",),
        ("celery[redis]==5.7.0",),
        "at most once; at least once with `task_acks_late`",
        "By default a task is acknowledged just before it runs, so that what was begun is never begun "
        "again: it is rather lost, by design, and only what was fetched and not begun comes back. "
        "With late acknowledgement all of it does. The Redis transport gives back what was not "
        "acknowledged within `visibility_timeout` (an hour unless set), which has to be longer than "
        "the longest task. It takes a message from the list first and notes it as not acknowledged "
        "next, so that one whose worker dies in between is lost with either setting. On RabbitMQ, "
        "which is not played here, a broken connection gives everything back at once.",
        (
            Profile(DEFAULT, 3600),
            Profile(
                SAFE,
                7,
                {
                    "task_acks_late": True,
                    "task_reject_on_worker_lost": True,
                    "worker_prefetch_multiplier": 1,
                    "broker_transport_options": {
                        "visibility_timeout": 5,
                        "unacked_restore_interval": 1,
                        "unacked_restore_throttle": 1,
                        "unacked_mutex_expire": 10,
                    },
                },
            ),
        ),
    ),
    Peer(
        "Dramatiq",
        "dramatiq",
        ("Redis",),
        ("dramatiq[redis]==2.2.1",),
        "at least once",
        "A worker process that has not been heard of for `heartbeat_timeout` is dead, and what it "
        "had is put back by the next command that happens to do maintenance, one in a thousand "
        "unless set. RabbitMQ, its other broker, is not played here.",
        (
            Profile(DEFAULT, 60),
            Profile(SAFE, 6, {"heartbeat_timeout": 5000, "maintenance_chance": 100_000}),
        ),
    ),
    Peer(
        "Huey",
        "huey",
        ("Redis",),
        ("huey==3.5.4", "redis==8.1.0"),
        "at most once",
        "A task leaves the queue when it is taken. Its guide to deployment says so: what SIGKILL "
        "interrupts is lost, by design, and there is no setting for it.",
        (Profile(DEFAULT, None),),
    ),
    Peer(
        "PgQueuer",
        "pgqueuer",
        ("PostgreSQL",),
        ("pgqueuer[asyncpg]==1.6.0",),
        "at least once",
        "Each job has a heartbeat; one that is older than `heartbeat_timeout` is taken again.",
        (
            Profile(DEFAULT, 60),
            Profile(SAFE, 6, {"heartbeat_timeout": 5, "dequeue_timeout": 1}),
        ),
    ),
    Peer(
        "Procrastinate",
        "procrastinate",
        ("PostgreSQL",),
        ("procrastinate==3.10.0", "psycopg[binary]==3.3.8"),
        "at most once; at least once with its recipe for stalled jobs",
        "What a dead worker was doing stays marked as being done, and can be listed; its guide to "
        "production has a periodic task that puts such jobs back.",
        (
            Profile(DEFAULT, None),
            Profile(
                SAFE,
                11,
                {
                    "periodic retry_stalled_jobs": "* * * * * */5",
                    "seconds_since_heartbeat": 5,
                    "update_heartbeat_interval": 1,
                    "stalled_worker_timeout": 5,
                },
            ),
        ),
    ),
    Peer(
        "RQ",
        "rq",
        ("Redis",),
        ("rq==2.12.0",),
        "at most once; at least once with `Retry`",
        "What a dead worker was doing becomes a failed job, kept in the FailedJobRegistry, by design; "
        "with `Retry` it is put back instead. Both happen when a worker cleans up, not before a "
        "minute has passed, which cannot be set, and only if no worker dies while it cleans up: "
        "its lock stays for a quarter of an hour.",
        (
            Profile(DEFAULT, None),
            Profile(
                SAFE,
                76,
                {
                    "Retry(max)": 3,
                    "job_monitoring_interval": 1,
                    "maintenance_interval": 10,
                    "worker_ttl": 20,
                },
            ),
        ),
    ),
    Peer(
        "SAQ",
        "saq",
        ("Redis",),
        ("saq[redis]==0.26.4", "typing_extensions==4.16.0"),
        "at most once; at least once with `retries`",
        "A sweeper looks for jobs that have run for longer than their `timeout`; with `retries` they "
        "are put back, otherwise they end as aborted, and are kept. It waits up to five seconds for "
        "each of them, one after the other, so that many take long; and may take a job for stuck "
        "that has just been fetched. `timers.sweep` is left at its minute: with twenty seconds sweeps "
        "overlapped, and 28 jobs ran twice in a round like this one.",
        (
            Profile(DEFAULT, None),
            Profile(SAFE, 65, {"timeout": 5, "retries": 5}),
        ),
    ),
    Peer(
        "Taskiq",
        "taskiq",
        ("Redis",),
        ("taskiq==0.13.0", "taskiq-redis==1.2.4"),
        "at least once, with its stream broker",
        "`RedisStreamBroker` acknowledges (`ListQueueBroker` does not, and is not played); what was "
        "not acknowledged within "
        "`idle_timeout` (ten minutes unless set) is taken again, when there is other work. A worker "
        "that dies while it looks for such tasks leaves a lock for ever, unless "
        "`unacknowledged_lock_timeout` is set.",
        (
            Profile(DEFAULT, 600),
            Profile(
                SAFE, 6, {"idle_timeout": 5000, "unacknowledged_lock_timeout": 5, "xread_count": 4}
            ),
        ),
    ),
)
