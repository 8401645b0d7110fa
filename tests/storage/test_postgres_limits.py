"""The limits that the function `record_outcomes_and_claim` applies are those of the rules, in random games."""

from __future__ import annotations

from functools import partial

import asyncpg
import msgspec
import pytest

from omniq.gate_rules import GateState
from omniq.models import Limit
from omniq.serialization import encode_internal
from omniq.testing.builders import a_result, some_tasks
from omniq.testing.clock import ManualClock
from omniq.testing.contract._suite import ids
from tests.storage.limit_games import play
from tests.storage.postgres_stores import Schema

ONE = (Limit(key="k", max_running=1),)


@pytest.fixture(scope="module")
def _schemas(postgres_server_url):
    schemas = {name: Schema(postgres_server_url) for name in ("fast", "rules")}
    yield schemas
    for schema in schemas.values():
        schema.drop()


@pytest.fixture
def schemas(_schemas):
    """Two empty stores, by their names in a game."""
    for schema in _schemas.values():
        schema.wipe()
    return _schemas


def new_storage(schemas, name, clock):
    return schemas[name].new_storage(clock=clock)


@pytest.mark.parametrize("seed", range(5))
async def test_the_function_applies_limits_as_the_rules_do(schemas, seed):
    await play(seed, partial(new_storage, schemas))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5, 105))
async def test_the_function_applies_limits_as_the_rules_do_in_many_games(schemas, seed):
    await play(seed, partial(new_storage, schemas))
