"""Sets Django up when it is imported: the first module of a worker, before those that have models."""

from __future__ import annotations

import django

django.setup()
