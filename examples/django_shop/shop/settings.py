"""As little as Django needs, and the tasks."""

import os

SHOP_DB = os.environ.get("SHOP_DB", "shop.db")
SECRET_KEY = "only-for-this-example"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
INSTALLED_APPS = ["shop", "omniq.integrations.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": SHOP_DB}}
TASKS = {
    "default": {
        "BACKEND": "omniq.integrations.django.backend.OmniqBackend",
        "QUEUES": ["default", "parcels"],
        # The shop's own database: a parcel's task is there when the order is committed.
        "OPTIONS": {"url": f"sqlite:///{SHOP_DB}", "database": "default"},
    }
}
