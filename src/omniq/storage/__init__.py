"""Where tasks live. `open_storage(url)` picks the backend; the contract is in `base`."""

from omniq.storage.base import BaseStorage
from omniq.storage.types import Capabilities
from omniq.storage.urls import open_storage

__all__ = ["BaseStorage", "Capabilities", "open_storage"]
