"""omniq behind Django's own tasks: `django.tasks` of Django 6, or `django_tasks` before that.

    INSTALLED_APPS = […, "omniq.integrations.django"]
    TASKS = {"default": {
        "BACKEND": "omniq.integrations.django.backend.OmniqBackend",
        "OPTIONS": {"url": "postgresql://…"},
    }}

`manage.py omniq_worker` runs the tasks of all installed applications.
"""
