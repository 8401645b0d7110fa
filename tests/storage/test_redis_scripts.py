"""The Lua scripts and Python agree on the parts of a place, and every script is complete."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from omniq.storage.redis.encoding import STAMP_SIZE, PlaceSlices
from omniq.storage.redis.scripts import compose, script

LUA = resources.files("omniq.storage.redis").joinpath("lua")
LIBRARY = LUA.joinpath("lib")
VERBS = sorted(
    each.name.removesuffix(".lua") for each in LUA.iterdir() if each.name.endswith(".lua")
)
PARTS = sorted(each.name.removesuffix(".lua") for each in LIBRARY.iterdir())


def lua_constants() -> dict[str, int]:
    source = LIBRARY.joinpath("places.lua").read_text("utf-8")
    found: dict[str, int] = {}
    for names, values in re.findall(r"^local ([A-Z_, ]+) = ([\d, ]+)", source, re.MULTILINE):
        found.update(zip(names.split(", "), map(int, values.split(", ")), strict=True))
    return found


def test_lua_and_python_have_the_same_positions_in_a_place():
    constants = lua_constants()

    assert constants == {
        "PRIORITY_LAST": PlaceSlices.PRIORITY.stop,
        "DUE_FIRST": PlaceSlices.DUE.start + 1,
        "DUE_LAST": PlaceSlices.DUE.stop,
        "ORDER_LAST": PlaceSlices.ORDER.stop,
        "STATUS_AT": PlaceSlices.STATUS.stop,
        "VISIBLE_FLAG": PlaceSlices.VISIBLE.stop,
        "CONDITIONS_FLAG": PlaceSlices.CONDITIONS.stop,
        "SUSPECT_FLAG": PlaceSlices.SUSPECT.stop,
        "CANCEL_FLAG": PlaceSlices.CANCEL_REQUESTED.stop,
        "TOKEN_FIRST": PlaceSlices.TOKEN.start + 1,
        "STAMP_SIZE": STAMP_SIZE,
    }


@pytest.mark.parametrize("name", VERBS)
def test_a_script_uses_the_parts_whose_functions_it_calls(name):
    text = script(name).text
    for part in PARTS:
        source = LIBRARY.joinpath(f"{part}.lua").read_text("utf-8")
        for function in re.findall(r"^local function (\w+)", source, re.MULTILINE):
            if re.search(rf"(?<![\w.:'`]){function}\(", text):
                assert f"local function {function}(" in text, f"uses {part}"


def test_every_part_is_used():
    used = {
        part
        for name in VERBS
        for part in PARTS
        if LIBRARY.joinpath(f"{part}.lua").read_text("utf-8") in script(name).text
    }

    assert used == set(PARTS)


def test_keys_have_the_names_that_stores_have():
    composed = compose("-- keys: leases paused_workers conditions dead_ids paused_queues\n")

    assert composed.keys == ("leases", "resting", "terms", "letters", "paused")
