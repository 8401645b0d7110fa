"""The Lua scripts and Python agree on the parts of a place, and every script is complete."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from omniq.models import TaskStatus
from omniq.storage.redis import encoding
from omniq.storage.redis.encoding import LUA_CONSTANTS, SLICES
from omniq.storage.redis.scripts import compose, script, uses
from omniq.storage.row_rules import Row

LUA = resources.files("omniq.storage.redis").joinpath("lua")
LIBRARY = LUA.joinpath("lib")
VERBS = sorted(
    each.name.removesuffix(".lua") for each in LUA.iterdir() if each.name.endswith(".lua")
)
PARTS = sorted(each.name.removesuffix(".lua") for each in LIBRARY.iterdir())


def test_the_parts_of_a_place_are_where_their_names_say():
    row = Row(
        id="a",
        seq=7,
        queue="q",
        priority=3,
        func_path="m.f",
        due=20,
        turn=10,
        visible=30,
        created_at=1,
        status=TaskStatus.RETRYING,
        cancel_requested=True,
        attached=True,
        crashes=2,
        expires=40,
        token=5,
        owner="me",
        started_at=9,
    )
    place = encoding.place_of(row)
    parts = {name: place[part] for name, part in SLICES.items() if name not in ("ORDER", "FIXED")}

    assert parts == {
        "KIND": "h",
        "STATUS": "t",
        "CANCELLED": "1",
        "ATTACHED": "1",
        "SUSPECT": "1",
        "GATED": "0",
        "EXPIRING": "1",
        "PRIORITY": f"{2**63 - 1 - 3:020d}",
        "TURN": encoding.stamp(10),
        "SEQ": f"{7:016d}",
        "DUE": encoding.stamp(20),
        "VISIBLE": encoding.stamp(30),
    }
    assert place[SLICES["ORDER"]] == encoding.order_text(row.order)
    assert place[SLICES["FIXED"].stop :] == f"5/q/m.f/{encoding.stamp(40)}/me/9/"


def test_lua_counts_the_parts_from_one():
    assert LUA_CONSTANTS["KIND"] == 1
    assert LUA_CONSTANTS["ORDER_FIRST"] == SLICES["PRIORITY"].start + 1
    assert LUA_CONSTANTS["ORDER_LAST"] == SLICES["SEQ"].stop


def test_keys_and_parts_of_a_place_become_numbers():
    composed = compose(
        "redis.call('HSET', KEYS.b, KEYS.a, string.sub(x, TURN_FIRST, TURN_LAST), KEYS.b)"
    )

    assert composed.keys == ("b", "a")
    assert composed.text == "redis.call('HSET', KEYS[1], KEYS[2], string.sub(x, 28, 45), KEYS[1])"


@pytest.mark.parametrize("name", VERBS)
def test_a_script_defines_everything_that_it_uses(name):
    text = re.sub(r"--.*|'[^'\n]*'", "", script(name).text)
    for part in PARTS:
        source = LIBRARY.joinpath(f"{part}.lua").read_text("utf-8")
        for function in re.findall(r"^local function (\w+)", source, re.MULTILINE):
            if re.search(rf"(?<![\w.:`]){function}\(", text):
                assert f"local function {function}(" in text, f"uses {part}"
    for constant in set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", text)) - {"KEYS", "ARGV"}:
        assert re.search(rf"local [A-Z_, ]*\b{constant}\b[A-Z_, ]* =", text), constant


def test_every_part_is_used():
    sources = [LUA.joinpath(f"{name}.lua").read_text("utf-8") for name in VERBS]
    used = {part for source in sources for part in uses(source)}

    assert used == set(PARTS)


@pytest.mark.parametrize("key", ["plain", "a/b", "50%", "%2F", "a%2Fb/%25", "ä/ö", "/"])
def test_the_name_of_a_gate_has_no_slash_and_gives_back_its_key(key):
    row = Row(
        id="a",
        queue="q",
        priority=0,
        func_path="m.f",
        due=0,
        turn=0,
        visible=0,
        created_at=0,
        parked=key,
    )

    assert "/" not in encoding.gate_name(key)
    place = encoding.place_of(row).encode()
    assert encoding.read_row("a", place, encoding.record_of(row), b"") == row
