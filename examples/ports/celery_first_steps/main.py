from tasks import add

from omniq import TaskQueue

with TaskQueue() as queue:
    result = queue.enqueue(add, 4, 4)
    print(result.status().value)
    print(result.result(timeout=20))
