"""Many worker processes on one server, and servers that fail while they run."""
