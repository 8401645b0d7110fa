"""A worker of one peer, in the peer's environment: `python -m benchmarks.consumer PEER`."""

from __future__ import annotations

import importlib
import sys

from benchmarks import run_context

if __name__ == "__main__":
    run_context.use_uvloop()
    importlib.import_module(f"benchmarks.peers.{sys.argv[1]}").work()
