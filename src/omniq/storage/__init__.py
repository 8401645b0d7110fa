"""Where tasks live. `open_storage(url)` picks the backend; the contract is in `base`."""

from omniq.storage._urls import open_storage
from omniq.storage.base import BaseStorage
from omniq.storage.terms import Capabilities

__all__ = ["BaseStorage", "Capabilities", "open_storage"]
