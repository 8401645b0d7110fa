"""The queues that are compared, their settings, and what each of them guarantees.

The adapters and the page both read the settings from here, so the page always shows the settings
of the rounds. `returns_after` comes from a queue's documentation or settings, never from a
measurement.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environments import environment

DEFAULT, SAFE = "default", "safest settings"


@dataclass(frozen=True)
class Profile:
    """`returns_after`: seconds until a dead worker's task runs again; None if it does not."""

    name: str
    returns_after: float | None
    settings: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A queue, the stores it is tested on, its packages, and its guarantee and remarks as text."""

    name: str
    adapter: str
    stores: tuple[str, ...]
    requirements: tuple[str, ...]
    guarantee: str
    remark: str
    profiles: tuple[Profile, ...]

    def python(self) -> Path:
        """Return an interpreter with the queue installed; for omniq, the current one."""
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
        "The lease belongs to the whole worker. `lease` is 30 seconds by default. A task that was running "
        "in three workers when they died (`max_crashes`) becomes a dead letter, and stays stored.",
        (Profile(DEFAULT, 31), Profile(SAFE, 6, {"lease": 5})),
    ),
    Peer(
        "arq",
        "arq",
        ("Redis",),
        ("arq==0.28.0",),
        "at least once",
        "A job stays in the queue until it is finished, marked as in progress for `job_timeout` "
        "plus ten seconds. The mark is not renewed, so the timeout has to be longer than the "
        "longest job, and a lost job waits for that time.",
        (Profile(DEFAULT, 310), Profile(SAFE, 15, {"job_timeout": 5})),
    ),
    Peer(
        "Celery",
        "celery",
        ("Redis",),
        ("celery[redis]==5.7.0",),
        "at most once; at least once with `task_acks_late`",
        "By default a task is acknowledged just before it runs, so a task that has started never starts "
        "again: it is lost instead, by design, and only tasks that were fetched and not started "
        "return. With late acknowledgement all of them return. The Redis transport returns messages "
        "that were not acknowledged within `visibility_timeout` (an hour by default), which has to "
        "be longer than the longest task. It removes a message from the list first and then notes "
        "it as not acknowledged, so a message whose worker dies in between is lost with either "
        "setting. On RabbitMQ, which is not tested here, a broken connection returns all messages "
        "at once.",
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
        "A worker process without a heartbeat for `heartbeat_timeout` is dead. The next command that "
        "does maintenance, by default one in a thousand, returns its messages to the queue. "
        "RabbitMQ, its other broker, is not tested here.",
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
        "A task leaves the queue when a worker takes it. The deployment guide says so: a task that "
        "SIGKILL interrupts is lost, by design, and no setting changes it.",
        (Profile(DEFAULT, None),),
    ),
    Peer(
        "PgQueuer",
        "pgqueuer",
        ("PostgreSQL",),
        ("pgqueuer[asyncpg]==1.6.0",),
        "at least once",
        "Each job has a heartbeat; a job whose heartbeat is older than `heartbeat_timeout` is claimed "
        "again.",
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
        "A dead worker's jobs stay marked as running, and can be listed. The production guide has a "
        "periodic task that returns such jobs to the queue.",
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
        "A dead worker's job becomes a failed job in the FailedJobRegistry, by design; with `Retry` it "
        "returns to the queue instead. Both happen when a worker cleans up, at least a minute later, "
        "which cannot be changed, and only if no worker dies while it cleans up: its lock stays for "
        "15 minutes.",
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
        "A sweep finds jobs that have run for longer than their `timeout`; with `retries` they return "
        "to the queue, otherwise they end as aborted, and stay stored. It waits up to five seconds "
        "for each of them, one after the other, which is slow for many jobs; and it may treat a job as "
        "stuck that was just fetched. `timers.sweep` keeps its default of a minute: with twenty "
        "seconds sweeps overlapped, and 28 jobs ran twice in a round like this one.",
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
        "`RedisStreamBroker` acknowledges (`ListQueueBroker` does not, and is not tested). Tasks that "
        "were not acknowledged within `idle_timeout` (ten minutes by default) are claimed again, "
        "when there are other tasks. A worker that dies while it searches for such tasks leaves a "
        "lock for ever, unless `unacknowledged_lock_timeout` is set.",
        (
            Profile(DEFAULT, 600),
            Profile(
                SAFE, 6, {"idle_timeout": 5000, "unacknowledged_lock_timeout": 5, "xread_count": 4}
            ),
        ),
    ),
)
