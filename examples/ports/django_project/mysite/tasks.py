from typing import Any

from django.core.mail import send_mail
from django.tasks import task


@task(priority=2, queue_name="emails", takes_context=True)  # type: ignore[untyped-decorator]  # Django has no types
def email_users(context: Any, emails: list[str], subject: str) -> int:
    message = f"attempt {context.attempt}"
    sent: int = send_mail(subject, message, "shop@example.org", emails)
    return sent
