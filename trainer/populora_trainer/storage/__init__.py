"""Where a run lives: objects that are written whole or not at all, checkpoints made of them, logs, and the run's lock.

Reads and writes values of the population; must not import the loop, the rollouts' engines or the command line.
"""
