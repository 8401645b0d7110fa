from proj.tasks import add, add_then_mul, xsum

from omniq import TaskFailed, TaskQueue

with TaskQueue() as queue:
    first = queue.enqueue(add, 2, 2)
    late = queue.options(queue="lopri", delay=10).enqueue(add, 2, 2)
    print(first.result(timeout=20), len(first.id), late.status().value)

    wrong = queue.options(max_retries=0).enqueue("proj.tasks.add", 2, "2")
    try:
        wrong.result(timeout=20)
    except TaskFailed as failure:
        print(wrong.status().value, failure.error and failure.error.error_type)

    group = queue.enqueue_many(add, [(i, i) for i in range(10)])
    numbers = [each.result(timeout=20) for each in group]
    print(numbers)
    print(queue.enqueue(add_then_mul, 4, 4, 8).result(timeout=20))
    print(queue.enqueue(xsum, numbers).result(timeout=20))
