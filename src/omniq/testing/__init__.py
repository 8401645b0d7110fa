"""For tests of omniq, of backends for it, and of code that uses it."""
