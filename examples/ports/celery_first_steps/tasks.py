from omniq import task


@task(queue="low-priority", rate="10/m")
def add(x: int, y: int) -> int:
    return x + y
