"""What a task is to its author: the decorator, its options, and what a running task can do."""
