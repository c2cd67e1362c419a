"""A NumPy emulator of ``mma.sync``: which lane holds which entry (PTX ISA, "Matrix Fragments for mma").

Registers are arrays ``(32 lanes, registers, entries of a register)``. With g = lane // 4 and t = lane % 4, a register of
16-bit type holds two neighbouring columns (rows, for the right matrix), one of tf32 a single one.
"""

from __future__ import annotations

import numpy as np

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def left(rows: int, k: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every entry of the left fragment, ``(32, registers, width)``; width 2 for 16-bit types, else 1."""
    places = []
    for column in range(0, k, 4 * width):
        for row in range(0, rows, 8):
            places.append([(G + row, column + width * T + entry) for entry in range(width)])
    return _stacked(places)


def right(k: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row (of k) and column (of 8) of every entry of the right fragment."""
    return _stacked([[(row + width * T + entry, G) for entry in range(width)] for row in range(0, k, 4 * width)])


def result(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every accumulator, ``(32, registers)``."""
    places = [(G + row, 2 * T + entry) for row in range(0, rows, 8) for entry in range(2)]
    return np.stack([p[0] for p in places], 1), np.stack([p[1] for p in places], 1)


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, k: int) -> np.ndarray:
    """``c + a b`` in float64 for m16n8k``k``; ``a``, ``b`` and ``c`` are fragments."""
    width = a.shape[2]
    left_matrix, right_matrix = np.zeros((16, k)), np.zeros((k, 8))
    left_matrix[left(16, k, width)] = a
    right_matrix[right(k, width)] = b
    return c + (left_matrix @ right_matrix)[result(16)]


def _stacked(places: list[list[tuple[np.ndarray, np.ndarray]]]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.stack([np.stack([entry[0] for entry in register], 1) for register in places], 1)
    columns = np.stack([np.stack([entry[1] for entry in register], 1) for register in places], 1)
    return rows, columns
