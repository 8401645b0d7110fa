"""PLACEHOLDER redis"""

from omniq.storage.redis.storage import RedisStorage as RedisStorage
