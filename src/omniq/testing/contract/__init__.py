"""The contract suite: the promises of every storage backend, as tests that any backend can run.

Each test names the promises it checks (`E2`, `C4`, …). They are numbered in the docstrings of
`omniq.storage.base`, `omniq.storage.side_data` and `omniq.storage.inspection`. The test file of a
backend defines one fixture, `open_another`, which opens owners on one store, and inherits the tests
(`asyncio_mode = "auto"`):

    class TestMine(StorageContract):
        @pytest.fixture
        async def open_another(self, clock, tmp_path):
            def make(**options):  # any of settings, max_pending, serializer
                return MyStorage(tmp_path / "store", clock=clock, **options)

            async with opener(make) as open_another:
                yield open_another

The class may add tests; replacing one raises `TypeError`. Where backends differ, a test reads
`capabilities`. A backend with transactions defines a second fixture, `user_connection` (see
`UserConnection`).

- `lifecycle`: opening and closing.
- `enqueue`: which tasks are stored and which are refused.
- `conflicts`: what an enqueue does when its unique key is held.
- `values`: arguments and results are returned unchanged.
- `claim`: which tasks a claim returns.
- `order`: the order of claimed tasks.
- `record`: what an outcome changes.
- `verbs`: the eight single-task verbs.
- `lease`: leases, recovery and paused workers.
- `incarnation`: stores that went back to an earlier state.
- `cancel`: cancellation in every status.
- `change`: another priority, queue or eta of a waiting task.
- `reading`: lookups, lists, scans, counts and histories.
- `retention`: how long records are stored, and purges.
- `dead_letters`: listing, retrying and deleting dead letters.
- `pending_hooks`: calls of `on_dead` that are recorded until they are made.
- `checkpoints`: the data that a task resumes from.
- `progress`: progress reports of running tasks.
- `outputs`: what running tasks log and stream, for its readers.
- `schedules`: storing and firing schedules.
- `run_history`: counts of runs by minute and hour, versions, ended workers.
- `fairness`: keys that take turns, and ageing.
- `shares`: the shares of keys over random calls.
- `sequences`: tasks that run one at a time, in order.
- `limits`: limits that count units and can be changed, and pauses with an end.
- `dependencies`: tasks that wait for others.
- `groups`: groups and flows, which end, are cancelled and retried as a whole.
- `suspension`: running tasks that wait for others and hold nothing.
- `queues_and_gates`: paused queues, limits, rates and circuit breakers.
- `waiting`: waits for work and for results.
- `transactions`: the user's transactions and those of tasks.
- `_suite`: fixtures and helpers that all parts share.
"""

from __future__ import annotations

from omniq.testing.contract._suite import ContractPart, OpenAnother, opener, promise
from omniq.testing.contract.cancel import CancelContract
from omniq.testing.contract.change import ChangeContract
from omniq.testing.contract.checkpoints import CheckpointContract
from omniq.testing.contract.claim import ClaimContract
from omniq.testing.contract.conflicts import ConflictContract
from omniq.testing.contract.dead_letters import DeadLetterContract
from omniq.testing.contract.dependencies import DependencyContract
from omniq.testing.contract.enqueue import EnqueueContract
from omniq.testing.contract.fairness import FairnessContract
from omniq.testing.contract.groups import GroupContract
from omniq.testing.contract.incarnation import IncarnationContract
from omniq.testing.contract.lease import LeaseContract
from omniq.testing.contract.lifecycle import LifecycleContract
from omniq.testing.contract.limits import LimitContract
from omniq.testing.contract.order import OrderContract
from omniq.testing.contract.outputs import OutputContract
from omniq.testing.contract.pending_hooks import PendingHookContract
from omniq.testing.contract.progress import ProgressContract
from omniq.testing.contract.queues_and_gates import GateContract
from omniq.testing.contract.reading import ReadingContract
from omniq.testing.contract.record import RecordContract
from omniq.testing.contract.retention import RetentionContract
from omniq.testing.contract.run_history import RunHistoryContract
from omniq.testing.contract.schedules import ScheduleContract
from omniq.testing.contract.sequences import SequenceContract
from omniq.testing.contract.shares import ShareContract
from omniq.testing.contract.suspension import SuspensionContract
from omniq.testing.contract.transactions import TransactionContract, UserConnection
from omniq.testing.contract.values import ValueContract
from omniq.testing.contract.verbs import VerbContract
from omniq.testing.contract.waiting import WaitingContract


class StorageContract(
    LifecycleContract,
    EnqueueContract,
    ConflictContract,
    ValueContract,
    ClaimContract,
    OrderContract,
    FairnessContract,
    RecordContract,
    VerbContract,
    LeaseContract,
    IncarnationContract,
    CancelContract,
    ChangeContract,
    ReadingContract,
    RetentionContract,
    DeadLetterContract,
    PendingHookContract,
    CheckpointContract,
    ProgressContract,
    OutputContract,
    ScheduleContract,
    RunHistoryContract,
    GateContract,
    LimitContract,
    DependencyContract,
    SuspensionContract,
    GroupContract,
    SequenceContract,
    ShareContract,
    WaitingContract,
    TransactionContract,
):
    """All parts of the contract."""


__all__ = [
    "CancelContract",
    "ChangeContract",
    "CheckpointContract",
    "ClaimContract",
    "ConflictContract",
    "ContractPart",
    "DeadLetterContract",
    "DependencyContract",
    "EnqueueContract",
    "FairnessContract",
    "GateContract",
    "GroupContract",
    "IncarnationContract",
    "LeaseContract",
    "LifecycleContract",
    "LimitContract",
    "OpenAnother",
    "OrderContract",
    "OutputContract",
    "PendingHookContract",
    "ProgressContract",
    "ReadingContract",
    "RecordContract",
    "RetentionContract",
    "RunHistoryContract",
    "ScheduleContract",
    "SequenceContract",
    "ShareContract",
    "StorageContract",
    "SuspensionContract",
    "TransactionContract",
    "UserConnection",
    "ValueContract",
    "VerbContract",
    "WaitingContract",
    "opener",
    "promise",
]
