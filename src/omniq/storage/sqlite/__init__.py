"""PLACEHOLDER sqlite"""

from omniq.storage.sqlite.storage import SQLiteStorage as SQLiteStorage
