"""Which team decodes: all threads, unless one alone was faster; the logits do not depend on it."""

from __future__ import annotations

import itertools

import numpy as np
from tiny_models import tiny_model

from gossamer.compress import Decoder
from gossamer.compress._decode_llama import LlamaSteps
from gossamer.compress._decode_threads import Team


def turns(together: list[float], alone: float, steps: int) -> list[bool]:
    """What runs, step by step, where a step by all takes ``together[i]`` seconds and one by a single thread ``alone``."""
    team, ran = Team(alone), []
    for step in range(steps):
        ran.append(team.together)
        team.took(together[step] if team.together else alone)
    return ran


def test_all_threads_run_while_they_are_faster() -> None:
    assert all(turns([1.0] * 100, 2.0, 100))


def test_one_slow_step_changes_nothing() -> None:
    assert all(turns([1.0, 1.0, 50.0, 1.0] * 10, 2.0, 40))


def test_one_thread_takes_over_and_all_are_tried_again_ever_more_seldom() -> None:
    ran = turns([10.0] * 400, 2.0, 400)
    tried = [step for step in range(1, 400) if ran[step] and not ran[step - 1]]
    assert ran[:4] == [True, True, True, False]
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [19, 35, 67, 131, 131]
    assert sum(ran) <= 3 * (len(tried) + 1)


def test_all_threads_come_back_when_the_core_is_free_again() -> None:
    ran = turns([10.0] * 20 + [1.0] * 380, 2.0, 400)
    assert ran[4] is False
    assert all(ran[40:])


def test_the_logits_are_the_same_by_all_threads_and_by_one() -> None:
    model = tiny_model("llama")
    steps = LlamaSteps(model, 32, 2, "gossamer", adapt=True)
    steps.warm()
    team = steps._team
    assert team is not None
    logits = {}
    for together in (True, False):
        team.together = together
        logits[together] = [steps.step(token, place).copy() for place, token in enumerate([3, 1, 4])]
        team.together = together
    np.testing.assert_array_equal(logits[True], logits[False])


def test_threads_that_are_asked_for_stay() -> None:
    decoder = Decoder(tiny_model("llama"), max_length=16, threads=2)
    assert isinstance(decoder._steps, LlamaSteps)
    assert decoder._steps._team is None
