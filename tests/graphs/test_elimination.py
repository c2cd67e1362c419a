"""Orders and symbolic elimination against the definition, on small graphs."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.graphs._elimination import eliminate, fill, supernodes
from gossamer.graphs._ordering import dissect, undirected


def random_pattern(n: int, edges: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    matrix = np.zeros((n, n), bool)
    matrix[tuple(generator.integers(0, n, (2, edges)))] = True
    np.fill_diagonal(matrix, False)
    return undirected(np.concatenate([[0], matrix.sum(1).cumsum()]), np.nonzero(matrix)[1])


def filled(starts: np.ndarray, neighbours: np.ndarray, order: np.ndarray) -> list[set[int]]:
    """Later neighbours after elimination, by joining them pairwise, in places of the order."""
    place = {int(vertex): number for number, vertex in enumerate(order)}
    later = [set() for _ in order]  # type: list[set[int]]
    for number, vertex in enumerate(order):
        for other in neighbours[starts[vertex] : starts[vertex + 1]]:
            if place[int(other)] > number:
                later[number].add(place[int(other)])
    for number in range(len(order)):
        for first in later[number]:
            later[first] |= {second for second in later[number] if second > first}
    return later


@settings(max_examples=40)
@given(n=st.integers(1, 30), edges=st.integers(0, 80), seed=st.integers(0, 2**32))
def test_the_filled_pattern_is_what_joining_neighbours_gives(n: int, edges: int, seed: int) -> None:
    starts, neighbours = random_pattern(n, edges, seed)
    order = np.random.default_rng(seed).permutation(n)
    found = eliminate(starts, neighbours, order)
    expected = filled(starts, neighbours, found.order)
    for place in range(n):
        assert found.heads[found.starts[place] : found.starts[place + 1]].tolist() == sorted(expected[place])
        assert found.parent[place] == min(expected[place], default=-1)
        assert found.place[found.order[place]] == place
    assert found.fill == fill(starts, neighbours, order)  # a postorder of the tree changes no fill
    bounds = supernodes(found)
    assert bounds[0] == 0 and bounds[-1] == n and (np.diff(bounds) > 0).all()
    for first, last in itertools.pairwise(bounds):
        assert (found.parent[first : last - 1] == np.arange(first + 1, last)).all()


@settings(max_examples=30)
@given(
    n=st.integers(1, 200),
    edges=st.integers(0, 400),
    seed=st.integers(0, 2**32),
    method=st.sampled_from(["auto", "bisection"]),
)
def test_a_dissection_is_a_permutation(n: int, edges: int, seed: int, method: str) -> None:
    assert sorted(dissect(*random_pattern(n, edges, seed), method).tolist()) == list(range(n))


def test_our_bisection_fills_a_grid_far_less_than_its_numbering() -> None:
    side = 30
    number = np.arange(side * side).reshape(side, side)
    tails = np.concatenate([number[:, :-1].ravel(), number[:-1].ravel()])
    heads = np.concatenate([number[:, 1:].ravel(), number[1:].ravel()])
    order = np.argsort(tails, kind="stable")
    indptr = np.searchsorted(tails[order], np.arange(side * side + 1))
    starts, neighbours = undirected(indptr, heads[order])
    natural = fill(starts, neighbours, np.arange(side * side))
    assert fill(starts, neighbours, dissect(starts, neighbours, "bisection")) < 0.6 * natural
