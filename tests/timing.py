"""How long something may take, on a machine that may be busy with other work."""

from __future__ import annotations

import os


def at_most(seconds: float) -> float:
    """Return this bound, and a longer one while processes wait for a processor.

    On an idle machine, nothing is added. Beside two processes for each processor a process gets half
    of the time, and now and then has to wait for its turn.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, 2 * load)
