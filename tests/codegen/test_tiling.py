"""The cut of a result into register tiles: it covers everything once, and nothing under the model is cheaper."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.codegen import fixed_tile, named_target, tile, tile_cycles, tile_shapes

TARGETS = ["x86-avx2", "x86-avx512", "aarch64-neon"]
sizes = st.integers(1, 200)


@given(m=sizes, n=sizes, k=sizes, name=st.sampled_from(TARGETS))
def test_strips_and_tiles_cover_every_entry_once(m: int, n: int, k: int, name: str) -> None:
    cut = tile(m, n, k, named_target(name))
    assert sum(strip.columns for strip in cut.strips) == n
    assert [strip.start for strip in cut.strips] == [
        sum(s.columns for s in cut.strips[:i]) for i in range(len(cut.strips))
    ]
    assert all(sum(height * count for height, count in strip.heights) == m for strip in cut.strips)


@given(m=st.integers(1, 20), vectors=st.integers(1, 6), k=sizes, name=st.sampled_from(TARGETS))
def test_no_other_cut_is_cheaper_under_the_model(m: int, vectors: int, k: int, name: str) -> None:
    target = named_target(name)
    shapes = tile_shapes(target)

    @cache
    def rows(left: int, width: int) -> float:
        return min(
            (tile_cycles(target, h, width, k) + rows(left - h, width) for h in shapes[width] if h <= left), default=0.0
        )

    @cache
    def columns(left: int) -> float:
        return min((rows(m, w) + columns(left - w) for w in shapes if w <= left), default=0.0)

    assert tile(m, vectors * target.lanes(), k, target).cycles == pytest.approx(columns(vectors))


@given(m=sizes, n=sizes, k=sizes, name=st.sampled_from(TARGETS))
def test_the_cut_is_expected_to_be_no_slower_than_one_tile_size(m: int, n: int, k: int, name: str) -> None:
    target = named_target(name)
    assert tile(m, n, k, target).cycles <= fixed_tile(m, n, k, target).cycles * 1.0001


def test_explain_names_tiles_and_the_fixed_cut() -> None:
    text = tile(26, 36, 256, named_target("x86-avx2")).explain()
    assert "26 x 36 x 256 on x86-avx2" in text and "columns 0..24: 3 vectors" in text and "ragged ends" in text


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        tile(1, 0, 1, named_target("x86-avx2"))
