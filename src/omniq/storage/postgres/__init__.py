"""PLACEHOLDER postgres"""

from omniq.storage.postgres.storage import PostgresStorage as PostgresStorage
