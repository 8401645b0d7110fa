import os
import time

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
django.setup()

from mysite.tasks import email_users  # noqa: E402

result = email_users.using(priority=10).enqueue(["ann@example.org"], "welcome")
while not result.is_finished:
    time.sleep(0.1)
    result.refresh()
print(result.status, result.return_value, result.attempts)
