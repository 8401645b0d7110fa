"""PLACEHOLDER memory"""

from omniq.storage.memory.storage import MemoryStorage as MemoryStorage
