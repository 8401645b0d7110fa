from omniq import TaskContext, task


@task
def add(x: int, y: int) -> int:
    return x + y


@task
def mul(x: int, y: int) -> int:
    return x * y


@task
def xsum(numbers: list[int]) -> int:
    return sum(numbers)


@task
def add_then_mul(ctx: TaskContext, x: int, y: int, z: int) -> int:
    return ctx.step("mul", mul, ctx.step("add", add, x, y), z)
