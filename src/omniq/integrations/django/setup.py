"""Sets up Django on import. A worker imports this module before the modules with tasks."""

from __future__ import annotations

import django

django.setup()
