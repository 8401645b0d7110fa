"""A Django project whose tasks omniq runs.

python manage.py omniq_worker
python manage.py runserver
curl -X POST localhost:8000/parcels/7
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
