"""The contract suite: what every backend promises, as tests that any backend can run.

Each test names the promises it checks (`E2`, `C4`, …), which are numbered in the docstrings of
`omniq.storage.base` and `omniq.storage.inspection`. A backend's test file gives one fixture,
`open_another`, that opens owners on one store, and inherits everything (`asyncio_mode = "auto"`):

    class TestMine(StorageContract):
        @pytest.fixture
        async def open_another(self, clock, tmp_path):
            def make(**options):  # any of settings, max_pending, serializer
                return MyStorage(tmp_path / "store", clock=clock, **options)

            async with opener(make) as open_another:
                yield open_another

The class may add tests and may not replace one. Where backends differ, tests go by `capabilities`;
one that has transactions gives a second fixture, `user_connection` (see `UserConnection`).
"""

from __future__ import annotations

from omniq.testing.contract._suite import OpenAnother, Slice, opener, promise
from omniq.testing.contract.cancel import CancelContract
from omniq.testing.contract.checkpoints import CheckpointContract
from omniq.testing.contract.claim import ClaimContract
from omniq.testing.contract.dead_letters import DeadLetterContract
from omniq.testing.contract.enqueue import EnqueueContract
from omniq.testing.contract.lease import LeaseContract
from omniq.testing.contract.lifecycle import LifecycleContract
from omniq.testing.contract.order import OrderContract
from omniq.testing.contract.progress import ProgressContract
from omniq.testing.contract.queues_and_gates import GateContract
from omniq.testing.contract.reading import ReadingContract
from omniq.testing.contract.record import RecordContract
from omniq.testing.contract.retention import RetentionContract
from omniq.testing.contract.schedules import ScheduleContract
from omniq.testing.contract.transactions import TransactionContract, UserConnection
from omniq.testing.contract.values import ValueContract
from omniq.testing.contract.verbs import VerbContract
from omniq.testing.contract.waiting import WaitingContract


class StorageContract(
    LifecycleContract,
    EnqueueContract,
    ValueContract,
    ClaimContract,
    OrderContract,
    RecordContract,
    VerbContract,
    LeaseContract,
    CancelContract,
    ReadingContract,
    RetentionContract,
    DeadLetterContract,
    CheckpointContract,
    ProgressContract,
    ScheduleContract,
    GateContract,
    WaitingContract,
    TransactionContract,
):
    """Everything a backend promises."""


__all__ = [
    "CancelContract",
    "CheckpointContract",
    "ClaimContract",
    "DeadLetterContract",
    "EnqueueContract",
    "GateContract",
    "LeaseContract",
    "LifecycleContract",
    "OpenAnother",
    "OrderContract",
    "ProgressContract",
    "ReadingContract",
    "RecordContract",
    "RetentionContract",
    "ScheduleContract",
    "Slice",
    "StorageContract",
    "TransactionContract",
    "UserConnection",
    "ValueContract",
    "VerbContract",
    "WaitingContract",
    "opener",
    "promise",
]
