"""Finds the Chromium that the browser tests use."""

from __future__ import annotations

import os
import shutil

PATH = os.environ.get("OMNIQ_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def missing() -> str:
    """Why browser tests cannot run; empty if they can."""
    try:
        import playwright  # noqa: F401  # tests whether it is installed
    except ImportError:
        return "playwright is not installed: pip install playwright"
    return "" if PATH else "Chromium was not found: apt-get install chromium, or set OMNIQ_CHROMIUM"
