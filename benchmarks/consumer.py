"""A worker of one peer, in the peer's own environment: `python -m benchmarks.consumer PEER`."""

from __future__ import annotations

import importlib
import sys

from benchmarks import place

if __name__ == "__main__":
    place.use_uvloop()
    importlib.import_module(f"benchmarks.peers.{sys.argv[1]}").work()
