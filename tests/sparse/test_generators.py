"""Generated matrices: sizes, repeatability, and the property each family is there for."""

import pytest
import torch

from gossamer.sparse import _generators as generators
from gossamer.sparse import statistics


def test_equal_seeds_give_equal_matrices():
    first, second = (generators.rmat(3000, 20_000, 1) for _ in range(2))
    assert torch.equal(first.indices, second.indices) and torch.equal(first.values, second.values)
    assert not torch.equal(first.indices, generators.rmat(3000, 20_000, 2).indices)


def test_families_are_skewed_even_clustered_and_dense_in_spots():
    skewed = statistics(generators.rmat(5000, 50_000, 1))
    even = statistics(generators.uniform(5000, 50_000, 1, columns=300))
    grouped = statistics(generators.communities(4000, 200_000, 1, block=100))
    mesh = statistics(generators.finite_elements(6000, 1))
    assert skewed.degree_largest > 20 * skewed.degree_mean
    assert even.degree_largest < 4 * even.degree_mean and even.columns == 300
    assert grouped.nnz_per_vector8 > 1.5
    assert mesh.nnz_per_vector8 > 4 and mesh.rows == 24_000 and mesh.degree_largest == 40


def test_the_mixed_family_goes_from_scattered_to_clustered():
    shares = [statistics(generators.mixed(20_000, 40_000, part, 1)).share_in_vectors(3) for part in (0, 0.5, 1)]
    assert shares[0] < 0.1 < 0.3 < shares[1] < 0.7 < shares[2]
    assert abs(generators.mixed(20_000, 40_000, 0.5, 1).nnz - 40_000) < 3000


def test_unknown_names_and_shares_are_refused():
    with pytest.raises(ValueError, match="name must be one of rmat200k, .* got 'reddit'"):
        generators.generated("reddit")
    with pytest.raises(ValueError, match="clustered must be from 0 to 1, got 2"):
        generators.mixed(10, 10, 2, 0)


@pytest.mark.slow
def test_named_matrices_have_the_published_sizes():
    """Duplicates fall as the random numbers do, which differ between devices: within half a per cent."""
    for name, rows, nnz in (
        ("rmat200k", 200_000, 5_489_449), ("uni100k", 100_000, 4_998_737), ("sbm100k", 100_000, 9_605_357),
    ):  # fmt: skip
        matrix = generators.generated(name)
        assert matrix.shape == (rows, rows) and matrix.nnz == pytest.approx(nnz, rel=0.005)
