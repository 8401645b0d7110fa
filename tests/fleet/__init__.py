"""Many processes on one server, and servers that fail under them."""
