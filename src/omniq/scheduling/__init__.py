"""Schedules: which times are due, and the API to add, change and run them."""
