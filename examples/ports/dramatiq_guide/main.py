from count_words import count_words, find, generate_report, long_running, sync_order_to_warehouse

from omniq import TaskFailed, TaskQueue

urls = [f"https://example.org/{page}" for page in ("a", "b", "c")]
with TaskQueue() as queue:
    counts = queue.enqueue_many(count_words, urls)
    queue.options(delay=10).enqueue(count_words, "https://example.org")
    queue.enqueue(generate_report, 1)
    synced = queue.enqueue(sync_order_to_warehouse, 2)
    print([each.result(timeout=20) for each in counts], synced.result(timeout=20))
    print(queue.enqueue(count_words, "foo").result(timeout=20))
    for failing in (queue.enqueue(find, "coffee"), queue.enqueue(long_running)):
        try:
            failing.result(timeout=20)
        except TaskFailed as failure:
            print(failure)
