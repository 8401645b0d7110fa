"""PLACEHOLDER file"""

from omniq.storage.file.storage import FileStorage as FileStorage
