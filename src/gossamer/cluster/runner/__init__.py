"""Real training processes under a policy: a controller that decides, agents that start and watch processes.

- :class:`JobSpec`, :func:`read_specs`: what to run, from YAML.
- :class:`Controller`: decides by a policy of this room, learns how much jobs slow each other down, re-queues crashes.
- :class:`Agent`: one per machine; starts processes, forwards their progress, reports how they ended.
- :class:`TrainingSession`, :class:`AccumulatingStep` (``gossamer.cluster.runner.training``): for the training script.
"""

from gossamer.cluster.runner._specs import JobSpec, read_specs
from gossamer.cluster.runner.agent import Agent
from gossamer.cluster.runner.controller import Controller, Outcome

__all__ = ["Agent", "Controller", "JobSpec", "Outcome", "read_specs"]
