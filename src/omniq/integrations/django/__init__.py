"""A backend for Django's tasks: `django.tasks` of Django 6, or `django_tasks` before that.

    INSTALLED_APPS = […, "omniq.integrations.django"]
    TASKS = {"default": {
        "BACKEND": "omniq.integrations.django.backend.OmniqBackend",
        "OPTIONS": {"url": "postgresql://…"},
    }}

`manage.py omniq_worker` runs the tasks of all installed applications.

| module | what it does |
|---|---|
| `apps` | the Django application, for `INSTALLED_APPS` |
| `backend` | `OmniqBackend`: enqueues tasks and reads results |
| `management` | the command `omniq_worker` |
| `setup` | sets up Django in a worker process |
| `task_call` | calls a task's function in a worker, with Django's signals |
"""
