"""A pytest plugin: the first game that fails is enough. Making it short takes minutes."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("first_game", phases=[Phase.generate])
settings.load_profile("first_game")
