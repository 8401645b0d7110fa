"""Where the browser is, or why there is none."""

from __future__ import annotations

import os
import shutil

PATH = os.environ.get("OMNIQ_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def missing() -> str:
    """Why no test can run in a browser here; empty when one can."""
    try:
        import playwright  # noqa: F401  # only whether it is there
    except ImportError:
        return "playwright is not installed: pip install playwright"
    return "" if PATH else "no Chromium was found: apt-get install chromium, or set OMNIQ_CHROMIUM"
