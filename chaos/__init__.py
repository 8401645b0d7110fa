"""Long runs of omniq under faults, and the checker that decides whether it kept its promises.

Producers, workers and whatever does them harm write down what they do, outside the store. One
checker reads that history, whichever backend it is of, and whether the fleet was real or simulated.
"""
