"""Runs one claimed task: finds its function, calls it where it belongs, says what it came to."""
