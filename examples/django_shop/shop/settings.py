"""Minimal Django settings, with omniq as the backend for tasks."""

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
        # The shop's database: the task of a parcel is stored when the order is committed.
        "OPTIONS": {"url": f"sqlite:///{SHOP_DB}", "database": "default"},
    }
}
