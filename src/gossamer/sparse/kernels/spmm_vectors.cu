// C = A B on tensor cores, A in ME-BCRS: windows of 8 rows, vectors of 8 x 1, swapped and transposed.
//
// A warp multiplies one part of a window by TILES tiles of 128 bytes of columns: C^T = B^T A^T, so that the dense operand
// is the 16-high left fragment and 8 rows of A the 8-wide right one. Lane l, with g = l / 4 and t = l % 4:
//
//   right  b0    row g of A, vectors 2 t, 2 t + 1 (tf32: vector t): word l of a block of WIDTH vectors as it is stored
//   left         slice g (16 bytes of columns) of the rows of B of those vectors. Elements 2 m and 2 m + 1 of a slice are
//                rows g and g + 8 of product m: which column is which row of B^T may be chosen freely.
//   sums         rows 2 t and 2 t + 1 of the window, slice g: stored by 16 bytes as they were loaded
//
// Zeros that fill up a vector meet whatever B holds: should a sum come out infinite or NaN, the part is multiplied again
// entry by entry, by `masks`, so that an infinity in B reaches only rows that have an entry there.
//
// Macros beside prelude.cu's (LANES = 8): THREADS, TILES, UNROLL (blocks in flight).

constexpr int WIDTH = TYPE == 0 ? 4 : 8;  // vectors of a block
constexpr int PRODUCTS = ELEMENTS / 2;    // 16-high left fragments of a slice

struct Part {
  int window, begin, end, partial, stride;  // sums of window row p go to row partial + p * stride of `partial`, or to C
};

// Row g, vectors 2 t and 2 t + 1 (tf32: t) of the block at vector `at`, which has min(WIDTH, end - at) vectors.
template <bool FULL>
u32 load_values(const Stored* values, int at, int end, int lane) {
  const Stored* block = values + 8ull * at;
  const int vectors = end - at;
  if (FULL || vectors >= WIDTH) {
    u32 word;
    asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(word) : "l"((const u32*)block + lane));
    return word;
  }
  const int g = lane >> 2, t = lane & 3;
#if TYPE == 0
  return t < vectors ? __float_as_uint(block[g * vectors + t]) : 0;
#else
  const u32 low = 2 * t < vectors ? block[g * vectors + 2 * t] : 0;
  const u32 high = 2 * t + 1 < vectors ? block[g * vectors + 2 * t + 1] : 0;
  return low | high << 16;
#endif
}

// The rows of B that a lane gathers for a block.
struct Gathered {
#if TYPE == 0
  Slice rows[1];
#else
  Slice rows[2];
#endif
};

void multiply_block(float (&sums)[PRODUCTS][4], const Gathered& b, u32 values) {
#pragma unroll
  for (int m = 0; m < PRODUCTS; ++m) {
#if TYPE == 0
    multiply_narrow(sums[m], tf32(b.rows[0].word[2 * m]), tf32(b.rows[0].word[2 * m + 1]), tf32(values));
#else
    multiply_narrow(sums[m], __byte_perm(b.rows[0].word[m], b.rows[1].word[m], 0x5410),
                    __byte_perm(b.rows[0].word[m], b.rows[1].word[m], 0x7632), values);
#endif
  }
}

// Rows 2 t (HALF = 0) or 2 t + 1 of a lane's sums, in the order of a slice's elements.
template <int HALF>
void row_of(const float (&sums)[PRODUCTS][4], float (&to)[ELEMENTS]) {
#pragma unroll
  for (int m = 0; m < PRODUCTS; ++m) {
    to[2 * m] = sums[m][HALF];
    to[2 * m + 1] = sums[m][2 + HALF];
  }
}

bool all_finite(const float (&sums)[PRODUCTS][4]) {
  bool finite = true;
#pragma unroll
  for (int m = 0; m < PRODUCTS; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) finite &= fabsf(sums[m][i]) <= 3.402823466e38f;
  }
  return finite;
}

// One row of the window, entry by entry.
__noinline__ void multiply_entries(int row, Part part, const int* columns, const Stored* values, const u8* masks,
                                   const char* tile, u32 row_bytes, Offsets offsets, float* exact) {
  float sums[ELEMENTS] = {};
#pragma unroll 1
  for (int vector = part.begin; vector < part.end; ++vector) {
    if (!(masks[vector] >> row & 1)) continue;
    const int first = part.begin + (vector - part.begin) / WIDTH * WIDTH;  // parts begin with a block
    const int vectors = min(WIDTH, part.end - first);
    const float value = widened(values[8ull * first + row * vectors + vector - first]);
    float b[ELEMENTS];
    unpack(load_slice(row_at(tile, columns[vector], row_bytes), offsets), b);
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) sums[e] += value * b[e];
  }
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) exact[e] = sums[e];
}

void store_row(const float (&sums)[ELEMENTS], int row, const Part& part, int rows, int n, int first_column, int g, char* out,
               float* partial) {
  const int columns_left = n - first_column;
  if (part.partial >= 0) {
    float* to = partial + (u64)(part.partial + row * part.stride) * n + first_column;
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      if (column_of(g, e) < columns_left) to[column_of(g, e)] = sums[e];
    }
  } else if (8 * part.window + row < rows) {
    char* to = out + ((u64)(8 * part.window + row) * n + first_column) * sizeof(Stored);
    store_slice(to, g, columns_left, packed(sums));
  }
}

// UNROLL blocks from vector `first` on: gather, then multiply. column: of the vectors around, one a lane, `place` the lane
// that has the first one's. FULL: all vectors are there; what is not is neither gathered nor multiplied.
template <bool FULL>
void multiply_blocks(float (&sums)[TILES][PRODUCTS][4], int first, int end, int column, int place, const Stored* values,
                     const char* const (&tile)[TILES], u32 row_bytes, const Offsets (&offsets)[TILES], int lane) {
  const int t = lane & 3;
  Gathered b[UNROLL][TILES];
  u32 a[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const int block = first + u * WIDTH;
    a[u] = FULL || block < end ? load_values<FULL>(values, block, end, lane) : 0;
#pragma unroll
    for (int r = 0; r < WIDTH / 4; ++r) {
      const int vector = u * WIDTH + WIDTH / 4 * t + r;
      const int c = __shfl_sync(ALL, column, place + vector);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        if (FULL || first + vector < end) {
          b[u][i].rows[r] = load_slice(row_at(tile[i], c, row_bytes), offsets[i]);
        } else {
          b[u][i].rows[r] = Slice{};
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
    for (int i = 0; i < TILES; ++i) multiply_block(sums[i], b[u][i], a[u]);
  }
}

// columns, masks: (vectors,). values: (8 * vectors,). parts: (count,). dense: (k, n), out: (rows, n), row-major. Every window
// has a part, if only an empty one. Grid: parts over the warps of blocks, tiles of columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    spmm_vectors(const int* __restrict__ columns, const Stored* __restrict__ values, const u8* __restrict__ masks,
                 const Part* __restrict__ parts, const char* __restrict__ dense, char* __restrict__ out,
                 float* __restrict__ partial, int count, int rows, int n) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int number = blockIdx.x * (THREADS / 32) + __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (number >= count) return;
  const Part part = parts[number];
  const u32 row_bytes = n * (u32)sizeof(Stored);
  const int first_column = blockIdx.y * TILE * TILES;

  const char* tile[TILES];
  Offsets offsets[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {  // a tile beyond the last column reads the first one and stores nothing
    const int column = first_column + i * TILE;
    offsets[i] = Offsets(g, n - column);
    tile[i] = dense + (column < n ? (u64)column * sizeof(Stored) : 0) + offsets[i].first;
  }
  float sums[TILES][PRODUCTS][4] = {};
  int ahead = part.begin + lane < part.end ? load_index(columns + part.begin + lane) : 0;
#pragma unroll 1
  for (int at = part.begin; at < part.end; at += 32) {
    const int column = ahead;
    ahead = at + 32 + lane < part.end ? load_index(columns + at + 32 + lane) : 0;
#pragma unroll 1
    for (int place = 0; place < min(32, part.end - at); place += UNROLL * WIDTH) {
      const int first = at + place;
      if (first + UNROLL * WIDTH <= part.end) {
        multiply_blocks<true>(sums, first, part.end, column, place, values, tile, row_bytes, offsets, lane);
      } else {
        multiply_blocks<false>(sums, first, part.end, column, place, values, tile, row_bytes, offsets, lane);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int column = first_column + i * TILE;
    float even[ELEMENTS], odd[ELEMENTS];
    row_of<0>(sums[i], even);
    row_of<1>(sums[i], odd);
    if (!all_finite(sums[i])) {
      float exact[ELEMENTS];
      multiply_entries(2 * t, part, columns, values, masks, tile[i], row_bytes, offsets[i], exact);
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) even[e] = exact[e];
      multiply_entries(2 * t + 1, part, columns, values, masks, tile[i], row_bytes, offsets[i], exact);
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) odd[e] = exact[e];
    }
    store_row(even, 2 * t, part, rows, n, column, g, out, partial);
    store_row(odd, 2 * t + 1, part, rows, n, column, g, out, partial);
  }
}
