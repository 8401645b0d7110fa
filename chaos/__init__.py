"""Long runs of omniq under faults, and the checker that decides whether it kept its promises.

Producers, workers and the process that injects faults record what they do, outside the store. One
checker reads that history, for every backend, real or simulated.

    __main__      real processes, signals and servers: `python -m chaos`
    simulated     a fleet on virtual time, from one seed: `python -m chaos.simulated`
    soak          long-lived processes under few faults: `python -m chaos.soak`
    bank          money moves in tasks while servers fail over and go back in time: `python -m chaos.bank`
    bank_places   the databases of a bank
    versions      two versions of omniq on one store: `python -m chaos.versions REVISION`
    nemesis       injects faults into the processes of a real run
    processes     the processes of a real run, and how they are forked
    stores        the stores and servers of a real run
    tasks         the tasks of a run, and the plan of each
    producer      enqueues, cancels and retries, and records the replies
    observers     record a worker's events and leases
    store_reader  records the contents of a store after a run
    task_writes   the rows that tasks write in their transactions
    history       the events of a run, and the journal that each process writes
    timeline      a history sorted by task, owner and process
    checker       applies every check to a history
    results, ownership, times, limits    the checks
    verdict       the outcome of the checks
    curves        memory, files and threads over a soak
    soak_chart    draws them
    peers         the same kills for other task queues
"""
