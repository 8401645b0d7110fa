"""`lua/lib/gates.lua` and `omniq.gate_rules` give the same states and answers for the same calls."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from redis import Redis

from omniq import gate_rules
from omniq.gate_rules import Gate, GateState
from omniq.serialization import internal_decoder
from omniq.storage.redis.scripts import compose, raw

MAIN = """
-- Make calls on one gate: { function, at, task, token, effect, size, span } each.
-- uses: request gates
-- request   3 gate, 4 calls
-- returns   for each its return value, and the state afterwards
local answer = {}
local key, kind = request[3][1], request[3][2]
for _, call in ipairs(request[4]) do
  local what, at, task, token, effect, size, span = unpack(call)
  local gate, state = { key, kind, size, span }, gate_state(key)
  local returned = ''
  if what == 'enter' then
    enter(gate, state, task, token, at)
  elseif what == 'leave' then
    leave(gate, state, task, token, effect, at, 'Why')
  elseif what == 'room' then
    returned = string.format('%.0f', room(gate, state, at))
  elseif what == 'ask_again_at' then
    returned = string.format('%.0f', ask_again_at(gate, state, at))
  elseif what == 'blocking' then
    returned = blocking({ gate }, at) and 'blocked' or ''
  end
  answer[#answer + 1] = returned
  answer[#answer + 1] = cmsgpack.pack(state)
end
return answer
"""

Call = tuple[str, int, str, int, Any, int, int]

_decode = internal_decoder(GateState)


def call_in_python(kind: Any, calls: list[Call]) -> list[tuple[str, GateState]]:
    state = GateState()
    seen = []
    for what, at, task, token, effect, size, span in calls:
        gate = Gate("k", kind, size, span)
        returned: object = ""
        match what:
            case "enter":
                gate_rules.enter(gate, state, task, token, at)
            case "leave":
                gate_rules.leave(gate, state, task, token, effect, at, "Why")
            case "room":
                returned = gate_rules.room(gate, state, at)
            case "ask_again_at":
                returned = gate_rules.ask_again_at(gate, state, at)
            case "blocking":
                returned = "blocked" if gate_rules.blocking((gate,), {"k": state}, at) else ""
        seen.append((str(returned), _decode(msgspec.msgpack.encode(state))))
    return seen


def random_calls(chance: random.Random) -> list[Call]:
    at = 1_700_000_000_000_000
    calls: list[Call] = []
    for _ in range(60):
        # Sometimes the clock is set back, by a little or by a lot.
        at += chance.choice((0, 1, 3, 10, 40, -2, -100))
        calls.append(
            (
                chance.choice(("enter", "enter", "leave", "leave", "room", "ask_again_at", "blocking")),
                at,
                chance.choice("ab"),
                chance.randint(1, 3),
                chance.choice(("success", "failure", "failure", "neither")),
                chance.choice((1, 2, 2, 3)),
                chance.choice((5, 20)),
            )
        )  # fmt: skip
    return calls


@pytest.mark.parametrize("kind", ["running", "rate", "breaker"])
def test_random_calls_give_the_same_states_and_answers(redis_server_url, kind):
    script = compose(MAIN)
    keys = [f"{{gates}}:{name}" for name in script.keys]
    with Redis.from_url(redis_server_url) as server:
        for seed in range(150):
            calls = random_calls(random.Random(seed))
            request = msgspec.msgpack.encode((1, 0, ("k", kind), calls))
            reply = server.eval(script.text, len(keys), *keys, request)

            in_lua = [
                (returned.decode(), _decode(state))
                for returned, state in zip(reply[::2], reply[1::2], strict=True)
            ]
            assert in_lua == call_in_python(kind, calls), f"seed {seed}"


@pytest.mark.parametrize("key", ["plain", "a/b", "50%", "%2F", "a%2Fb/%25", "ä/ö", "/"])
def test_the_name_of_a_gate_has_no_slash_and_gives_back_its_key(redis_server_url, key):
    script = compose(
        "-- uses: request gates\nlocal name = gate_name(request[3])\nreturn { name, gate_key(name) }"
    )
    keys = [f"{{gates}}:{name}" for name in script.keys]
    request = msgspec.msgpack.encode((1, 0, raw(key.encode())))
    with Redis.from_url(redis_server_url) as server:
        name, back = server.eval(script.text, len(keys), *keys, request)

    assert b"/" not in name
    assert back.decode() == key
