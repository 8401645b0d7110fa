"""The parts of the Redis backend; `omniq.storage.redis` puts them together."""
