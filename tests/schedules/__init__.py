"""Schedules: cron expressions, firing, and who was first."""
