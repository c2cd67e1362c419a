"""The CUDA sources compile for every type and alignment; who owns what in them is right; work is dealt out exactly once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import matrices, random_matrix

from gossamer.sparse import MEBCRS
from gossamer.sparse import _vectors_gpu as vectors
from gossamer.sparse._entries_gpu import EntriesVariant
from gossamer.sparse._gpu_launch import alignment, source
from gossamer.sparse._rows_gpu import RowsVariant
from gossamer.sparse._rows_schedule import RowsSchedule
from gossamer.sparse._vectors_gpu import VectorsVariant, VectorsWork
from mma_lanes import G, T, left, mma, result, right

HALF, FULL, WIDE = torch.float16, torch.float32, torch.float64
CASES = [
    (("spmm_rows.cu",), RowsVariant(unroll=4).macros(FULL, 16)),
    (("spmm_rows.cu",), RowsVariant(lanes=32, unroll=4).macros(HALF, 2)),
    (("spmm_rows.cu",), RowsVariant(unroll=4).macros(WIDE, 8)),
    (("sddmm_entries.cu",), EntriesVariant().macros(torch.bfloat16, 4)),
    (("sddmm_entries.cu",), EntriesVariant(rounds=4, features_outer=True).macros(FULL, 16)),
    (vectors.SPMM, VectorsVariant().macros(FULL, 4)),
    (vectors.SPMM, VectorsVariant(tiles=2).macros(torch.bfloat16, 16)),
    (vectors.SDDMM, {"TYPE": 0, "ALIGN": 16, "LANES": 4, "THREADS": 128}),
    (vectors.SDDMM, {"TYPE": 1, "ALIGN": 16, "LANES": 4, "THREADS": 128}),
    (("add_partials.cu",), {"TYPE": 2, "ALIGN": 2, "LANES": 8}),
    (("softmax_rows.cu",), {"TYPE": 1, "ALIGN": 2, "LANES": 8}),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_sources_compile(case, arch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    from gossamer.core.nvrtc import compile_cubin

    names, macros = CASES[case]
    assert compile_cubin(source(*names), arch, macros)


@settings(max_examples=40)
@given(matrix=matrices(sizes=(0, 1, 9, 40)), longest=st.sampled_from([0, 3, 16]), segment=st.sampled_from([2, 5, 100]))
def test_a_schedule_covers_every_entry_once(matrix, longest, segment):
    schedule = RowsSchedule.build(matrix.indptr, longest, segment, window=16)
    indptr = matrix.indptr.tolist()
    lengths = np.diff(indptr)
    assert sorted(schedule.order.tolist()) == [row for row in range(len(lengths)) if lengths[row] <= longest]
    covered, units = [], {}
    for row, begin, end, partial in schedule.segments.tolist():
        assert indptr[row] <= begin < end <= indptr[row + 1] and end - begin <= segment
        covered += range(begin, end)
        units.setdefault(row, []).append((begin, partial))
    assert sorted(covered) == sorted(e for row in units for e in range(indptr[row], indptr[row + 1]))
    assert sorted(units) == [row for row in range(len(lengths)) if lengths[row] > longest]
    sums = {row: range(first, first + count) for row, first, count in schedule.sums.tolist()}
    for row, segments in units.items():
        numbers = [partial for _, partial in sorted(segments)]
        assert numbers == (list(sums[row]) if len(segments) > 1 else [-1])
    assert schedule.partials == sum(len(numbers) for numbers in sums.values())


def test_rows_side_by_side_are_neighbours_of_like_length():
    matrix = random_matrix((2000, 300), 0.05)
    order = RowsSchedule.build(matrix.indptr, 1000, 1000, window=64).order
    lengths = matrix.indptr.diff()[order.long()]
    for first in range(0, 2000, 64):
        window = lengths[first : first + 64]
        assert ((window[:-1] + 7) // 8 >= (window[1:] + 7) // 8).all()
        assert (order[first : first + 64] // 64 == first // 64).all()


@settings(max_examples=30)
@given(matrix=matrices(sizes=(0, 1, 9, 40)), blocks=st.sampled_from([1, 2, 32]), half=st.booleans())
def test_parts_cover_every_vector_once_and_every_window(matrix, blocks, half):
    form = MEBCRS.from_matrix(matrix, HALF if half else FULL)
    work = VectorsWork.build(form, blocks)
    pointers = form.row_pointers.tolist()
    seen, parts_of = [], {}
    for window, begin, end, partial, stride in work.parts.tolist():
        assert pointers[window] <= begin <= end <= pointers[window + 1]
        assert (begin - pointers[window]) % form.width == 0 and end - begin <= blocks * form.width
        assert end == pointers[window + 1] or (end - begin) % form.width == 0
        seen += range(begin, end)
        parts_of.setdefault(window, []).append((partial, stride))
    assert seen == list(range(pointers[-1])) and sorted(parts_of) == list(range(len(pointers) - 1))
    sums = {row: (first, count) for row, first, count in work.sums.tolist()}
    used = set()
    for window, parts in parts_of.items():
        for row in range(8 * window, min(8 * window + 8, matrix.shape[0])):
            if len(parts) == 1:
                assert parts[0][0] == -1 and row not in sums
                continue
            places = [partial + row % 8 * stride for partial, stride in parts]
            first, count = sums[row]
            assert places == list(range(first, first + count)) and not used & set(places)
            used |= set(places)
    assert all(place < work.partials for place in used)


def test_masks_name_the_rows_of_every_vector():
    matrix = random_matrix((43, 30), 0.2)
    masks = vectors.masks_of(MEBCRS.from_matrix(matrix))
    form = MEBCRS.from_matrix(matrix)
    dense = matrix.to_dense().numpy() != 0
    for window in range(6):
        for vector in range(form.row_pointers[window], form.row_pointers[window + 1]):
            column = dense[8 * window : 8 * window + 8, form.column_index[vector]]
            assert int(masks[vector]) == sum(1 << row for row in np.flatnonzero(column))


@pytest.mark.parametrize("k", [4, 8])
def test_the_lane_map_of_the_product_multiplies(k):
    """One block of a window and one tile of columns, lane by lane as ``spmm_vectors.cu`` describes it."""
    generator = np.random.default_rng(0)
    elements, width = (4, 1) if k == 4 else (8, 2)
    window, dense = generator.normal(size=(8, k)), generator.normal(size=(k, 8 * elements))
    words = window.reshape(-1)  # row-major 8 x k: word l of 1 or 2 entries
    b = np.stack([words[width * np.arange(32) + entry] for entry in range(width)], 1)[:, None, :]
    expected = right(k, width)
    assert np.array_equal(b, window.T[expected])  # what mma takes as k x 8
    out = np.zeros((8, 8 * elements))
    for m in range(elements // 2):
        vector = [width * T + entry for entry in range(width)]
        a = np.stack([np.stack([dense[v, elements * G + 2 * m + half] for v in vector], 1) for half in (0, 1)], 1)
        sums = mma(a, b, np.zeros((32, 4)), k)
        for half in (0, 1):
            for element in (0, 1):
                out[2 * T + half, elements * G + 2 * m + element] = sums[:, 2 * element + half]
    assert np.allclose(out, window @ dense)


@pytest.mark.parametrize("k", [8, 16])
def test_the_lane_map_of_sampled_products_multiplies(k):
    """16 vectors, 8 rows and 64 bytes of features, lane by lane as ``sddmm_vectors.cu`` describes it."""
    generator = np.random.default_rng(0)
    width, features = (1, 16) if k == 8 else (2, 32)
    x, y = generator.normal(size=(8, features)), generator.normal(size=(16, features))
    per_lane = features // 4
    sums = np.zeros((32, 4))
    for number in (0, 1):
        at = [per_lane * T[:, None] + width * (2 * number + word) + np.arange(width) for word in (0, 1)]
        a = np.stack([y[G + 8 * low][np.arange(32)[:, None], at[word]] for word in (0, 1) for low in (0, 1)], 1)
        b = np.stack([x[G][np.arange(32)[:, None], at[word]] for word in (0, 1)], 1)
        sums = mma(a, b, sums, k)
    assert a.shape == left(16, k, width)[0].shape
    rows, columns = result(16)
    assert np.allclose(sums, (y @ x.T)[rows, columns])


def test_alignment_is_what_rows_have():
    tensor = torch.zeros(65, dtype=HALF)
    base = tensor if tensor.data_ptr() % 16 == 0 else tensor[1:]
    assert [alignment(n, base) for n in (8, 4, 12, 2, 3)] == [16, 8, 8, 4, 2]
    assert alignment(8, base[1:]) == 2
