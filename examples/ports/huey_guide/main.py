from datetime import UTC, datetime, timedelta

from demo import add, fetch_api_data, flaky_task, rebuild_index, send_email

from omniq import TaskQueue

with TaskQueue() as queue:
    print(queue.enqueue(add, 1, 2).result(timeout=20))
    print(queue.options(delay=0.2).enqueue(add, 3, 4).result(timeout=20))
    eta = datetime.now(UTC) + timedelta(seconds=0.2)
    print(queue.options(eta=eta).enqueue(add, 4, 5).result(timeout=20))
    print(queue.enqueue(flaky_task).result(timeout=20))
    print(queue.enqueue(fetch_api_data, "https://example.org").result(timeout=20))
    print(queue.options(priority=90).enqueue(send_email, "ann", "hello").result(timeout=20))
    queue.enqueue(rebuild_index).result(timeout=20)
    later = queue.options(delay=60).enqueue(add, 1, 2)
    print(later.cancel(), later.status().value)
