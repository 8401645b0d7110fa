"""Celery's integration tests of its canvas, as tests of omniq's flows.

`cases.py` lists all of them; `page.py` writes the table docs/reference/canvas.md.
"""
