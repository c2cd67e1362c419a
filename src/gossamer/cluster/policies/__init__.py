"""Schedulers, one file each: a policy is a name, an order of the queue, and ``schedule(state)``."""
