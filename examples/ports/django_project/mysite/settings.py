SECRET_KEY = "only for this example"
EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
INSTALLED_APPS = ["omniq.integrations.django", "mysite"]
USE_TZ = True
TASKS = {
    "default": {
        "BACKEND": "omniq.integrations.django.backend.OmniqBackend",
        "QUEUES": ["default", "emails"],
    }
}
