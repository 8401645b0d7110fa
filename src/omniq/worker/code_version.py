"""The version of the application's code: a digest of the modules that a worker was given.

It changes when one of these files changes, and so marks a deployment in the history. The setting `app_version`
replaces it by a name, and also covers code outside of these modules.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable

_LENGTH = 8


def code_version(modules: Iterable[str] | None) -> str:
    """A short digest of the source files of these modules and of the modules below them; empty without any."""
    given = tuple(modules or ())
    digest, count = hashlib.sha256(), 0
    for name, module in sorted(sys.modules.copy().items()):
        if not any(name == each or name.startswith(f"{each}.") for each in given):
            continue
        path = getattr(module, "__file__", None)
        try:
            with open(path or "", "rb") as file:
                digest.update(name.encode() + hashlib.sha256(file.read()).digest())
        except OSError:
            # A module without a file, or one that was replaced: the others tell.
            continue
        count += 1
    return digest.hexdigest()[:_LENGTH] if count else ""
