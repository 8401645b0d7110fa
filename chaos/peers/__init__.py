"""The same kills for other task queues as for omniq: what is lost, done twice, and how soon it is back.

Each queue is driven by an adapter of at most a hundred lines, in an environment of its own. What
happens is written down outside every store, and counted the same way for all of them.
"""
