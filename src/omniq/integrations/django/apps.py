"""The Django application that has the command `omniq_worker`."""

from __future__ import annotations

from django.apps import AppConfig


class OmniqConfig(AppConfig):
    name = "omniq.integrations.django"
    label = "omniq"
    verbose_name = "omniq"
