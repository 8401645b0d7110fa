"""Where tasks live. `open_storage(url)` picks the backend; the contract is in `base`."""

from omniq.storage._urls import open_storage
from omniq.storage.base import BaseStorage, Capabilities

__all__ = ["BaseStorage", "Capabilities", "open_storage"]
