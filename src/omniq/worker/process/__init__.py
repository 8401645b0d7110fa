"""The parts of `omniq worker`: one process that serves, and several that are looked after."""
