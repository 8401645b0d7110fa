"""Schedules: which times are due, and the API to add, change and run them.

- `schedules`: `queue.schedules`, for async and for blocking code
- `due_times`: which nominal times are due, and the task of each
"""
