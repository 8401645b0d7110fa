from datetime import UTC, datetime

from my_module import count_words_at_url

from omniq import TaskQueue

with TaskQueue() as queue:
    queue.enqueue(count_words_at_url, "https://example.org")
    later = queue.options(eta=datetime(2099, 10, 10, 9, 15, tzinfo=UTC))
    later.enqueue(count_words_at_url, "https://example.org")
    queue.options(delay=10).enqueue(count_words_at_url, "https://example.org")
    queue.options(max_retries=3).enqueue(count_words_at_url, "https://example.org")
    queue.options(retry=[10, 30, 60]).enqueue(count_words_at_url, "https://example.org")
