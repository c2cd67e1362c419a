"""Matrices made by rule: stand-ins for graphs and meshes that cannot be shipped, and families with a known answer.

The five named ones repeat the recipes of one measured comparison of public GPU kernels, seeds included, so that later
runs stand beside it. Numbers come from a ``torch.Generator`` on ``device``: the same device gives the same matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.sparse._matrix import SparseMatrix

_VALUE_SEED = 5
_QUADRANTS = (0.57, 0.19, 0.19, 0.05)


def rmat(rows: int, samples: int, seed: int, device: str = "cpu") -> SparseMatrix:
    """A recursive-matrix graph (quadrants .57, .19, .19, .05) with its nodes shuffled: a few have very many edges.

    samples: edges drawn inside ``rows``; repeated ones count once.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scale = max(1, (rows - 1).bit_length())
    bounds = torch.tensor(_QUADRANTS, device=device).cumsum(0)[:3]
    found = [torch.empty(2, 0, dtype=torch.int64, device=device)]
    missing = samples
    while missing > 0:
        count = min(2 * missing, 1 << 24)
        row = torch.zeros(count, dtype=torch.int64, device=device)
        column = torch.zeros_like(row)
        for _ in range(scale):
            quadrant = torch.bucketize(torch.rand(count, generator=generator, device=device), bounds)
            row, column = 2 * row + (quadrant >> 1), 2 * column + (quadrant & 1)
        inside = (row < rows) & (column < rows)
        found.append(torch.stack([row[inside], column[inside]])[:, :missing])
        missing -= found[-1].shape[1]
    shuffle = torch.randperm(rows, generator=generator, device=device)
    row, column = shuffle[torch.cat(found, 1)]
    return _weighted(row, column, (rows, rows))


def uniform(rows: int, samples: int, seed: int, columns: int | None = None, device: str = "cpu") -> SparseMatrix:
    """Entries anywhere with equal probability."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = columns or rows
    row = torch.randint(rows, (samples,), generator=generator, device=device)
    column = torch.randint(wide, (samples,), generator=generator, device=device)
    return _weighted(row, column, (rows, wide))


def communities(rows: int, samples: int, seed: int, block: int = 1000, device: str = "cpu") -> SparseMatrix:
    """A graph of communities of ``block`` nodes: nine of ten edges stay inside."""
    generator = torch.Generator(device).manual_seed(seed)
    row = torch.randint(rows, (samples,), generator=generator, device=device)
    inside = torch.rand(samples, generator=generator, device=device) < 0.9
    offset = torch.randint(block, (samples,), generator=generator, device=device)
    anywhere = torch.randint(rows, (samples,), generator=generator, device=device)
    near = torch.minimum(row // block * block + offset, torch.tensor(rows - 1, device=device))
    return _weighted(row, torch.where(inside, near, anywhere), (rows, rows))


def finite_elements(nodes: int, seed: int, unknowns: int = 4, device: str = "cpu") -> SparseMatrix:
    """A mesh: every node is coupled by dense blocks with 7 neighbours of a 3-D grid and 3 nodes not far away."""
    generator = torch.Generator(device).manual_seed(seed)
    node = torch.arange(nodes, device=device)
    grid = torch.tensor([0, 1, -1, 50, -50, 2500, -2500], device=device)
    around = torch.randint(-3000, 3001, (nodes, 3), generator=generator, device=device)
    neighbour = (node[:, None] + torch.cat([grid.expand(nodes, -1), around], 1)) % nodes
    unknown = torch.arange(unknowns, device=device)
    row = (node[:, None, None, None] * unknowns + unknown[:, None]).expand(-1, neighbour.shape[1], -1, unknowns)
    column = (neighbour[:, :, None, None] * unknowns + unknown).expand(-1, -1, unknowns, -1)
    size = nodes * unknowns
    return _weighted(row.reshape(-1), column.reshape(-1), (size, size))


def mixed(rows: int, nnz: int, clustered: float, seed: int, device: str = "cpu") -> SparseMatrix:
    """Dense spots in a scattered background: a share ``clustered`` of the entries in 8x8 clusters of density 0.6.

    For 0 no 8x1 vector is worth a tensor core, for 1 nearly all are; in between both engines have work.
    """
    if not 0 <= clustered <= 1:
        raise ValueError(f"clustered must be from 0 to 1, got {clustered}")
    generator = torch.Generator(device).manual_seed(seed)
    spots = round(clustered * nnz / (0.6 * 64))
    corner = torch.randint(max(1, rows // 8), (2, spots), generator=generator, device=device) * 8
    places = torch.arange(64, device=device)
    kept = torch.rand(spots, 64, generator=generator, device=device) < 0.6
    row, column = ((corner[i][:, None] + place)[kept] for i, place in enumerate((places // 8, places % 8)))
    rest = rmat(rows, max(0, nnz - len(row)), seed + 1, device)
    row, column = torch.cat([row, rest.rows.to(row)]), torch.cat([column, rest.indices.to(column)])
    inside = (row < rows) & (column < rows)
    return _weighted(row[inside], column[inside], (rows, rows))


def generated(name: str, device: str = "cpu") -> SparseMatrix:
    """One of the named matrices: rmat200k, rmat20, fem500k, sbm100k, uni100k (5 to 20 million entries).

    Raises:
        ValueError: no matrix is called so.
    """
    if name not in _NAMED:
        raise ValueError(f"name must be one of {', '.join(_NAMED)}, got {name!r}")
    return _NAMED[name](device)


_NAMED: dict[str, Callable[[str], SparseMatrix]] = {
    "rmat200k": lambda device: rmat(200_000, 6_000_000, 11, device),
    "rmat20": lambda device: rmat(1 << 20, 16 << 20, 12, device),
    "fem500k": lambda device: finite_elements(125_000, 7, device=device),
    "sbm100k": lambda device: communities(100_000, 10_000_000, 7, device=device),
    "uni100k": lambda device: uniform(100_000, 5_000_000, 7, device=device),
}


def _weighted(row: Tensor, column: Tensor, shape: tuple[int, int]) -> SparseMatrix:
    """Repeated places merged, values N(0, 1)."""
    place = torch.unique(row * shape[1] + column)
    device = place.device
    indptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(place // shape[1], minlength=shape[0]), 0, out=indptr[1:])
    values = torch.randn(len(place), generator=torch.Generator(device).manual_seed(_VALUE_SEED), device=device)
    return SparseMatrix(indptr.to(torch.int32), (place % shape[1]).to(torch.int32), values, shape)
