// C = A B on CUDA cores, A in compressed rows: short rows by LANES lanes each, long ones by whole blocks.
//
// A tile of LANES * 16 bytes of columns is done for all rows before the next tile (blockIdx.y): the slice of B that a tile
// needs then stays in L2. The first `long_items` blocks of a tile each multiply one segment of a long row, all lanes of the
// block together; the others take SHORT_ROWS rows of `order` each, 32 / LANES rows a warp side by side:
//
//   warp, LANES = 8:   lanes 0-7          lanes 8-15         lanes 16-23        lanes 24-31
//                      row order[4 i]     row order[4 i + 1] row order[4 i + 2] row order[4 i + 3]
//                      8 entries: each lane loads one, all see each by a shuffle; each gathers 16 bytes of B's row
//
// Sums are in float32 (float64). Where a row has several segments they are written to `partial` and added by
// `add_partials` in a fixed order, so that C has the same bits every time.
//
// Macros beside prelude.cu's: THREADS, UNROLL (rows of B in flight a lane), ROUNDS (rows that a group of lanes takes in a
// block).

constexpr int GROUPS = THREADS / LANES;
constexpr int SHORT_ROWS = GROUPS * ROUNDS;

struct Segment {
  int row, begin, end, partial;
};

void add_product(Sum (&sums)[ELEMENTS], Sum value, const Slice& slice) {
  Sum b[ELEMENTS];
  unpack(slice, b);
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) sums[e] += value * b[e];
}

// Add the entries at .. end of a group's row, LANES at a time, `step` apart. All lanes of the warp take part.
void multiply_entries(Sum (&sums)[ELEMENTS], int at, int end, int step, const int* indices, const Stored* values,
                      const char* tile, u32 row_bytes, const Offsets& offsets, int lane) {
  int left = end - at, longest = __reduce_max_sync(ALL, left);
  int column = 0;
  Sum value = 0;
  if (lane < left) {
    column = load_index(indices + at + lane);
    value = widened(values[at + lane]);
  }
  for (; longest > 0; longest -= step) {
    const int column_now = column, left_now = left;
    const Sum value_now = value;
    at += step;
    left -= step;
    if (lane < left) {
      column = load_index(indices + at + lane);
      value = widened(values[at + lane]);
    }
#pragma unroll
    for (int first = 0; first < LANES; first += UNROLL) {
      if (first > 0 && first >= longest) break;
      Slice rows[UNROLL];
      if (__all_sync(ALL, left_now >= first + UNROLL)) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
          rows[u] = load_slice(row_at(tile, __shfl_sync(ALL, column_now, first + u, LANES), row_bytes), offsets);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
          add_product(sums, __shfl_sync(ALL, value_now, first + u, LANES), rows[u]);
        }
      } else {  // what is not there is neither loaded nor multiplied: zero times infinity would be NaN
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
          const int c = __shfl_sync(ALL, column_now, first + u, LANES);
          if (first + u < left_now) rows[u] = load_slice(row_at(tile, c, row_bytes), offsets);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
          const Sum v = __shfl_sync(ALL, value_now, first + u, LANES);
          if (first + u < left_now) add_product(sums, v, rows[u]);
        }
      }
    }
  }
}

// indptr: (rows + 1,). order: (short_rows,), the rows that are not long. segments: (long_items,). dense: (k, n), out:
// (rows, n), row-major. partial: (number of segments of rows with several, n). Grid: long_items + short blocks, tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
    spmm_rows(const int* __restrict__ indptr, const int* __restrict__ indices, const Stored* __restrict__ values,
              const char* __restrict__ dense, char* __restrict__ out, Sum* __restrict__ partial,
              const int* __restrict__ order, const Segment* __restrict__ segments, int short_rows, int long_items, int n) {
  __shared__ Sum across_warps[THREADS / 32][TILE];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const int first_column = blockIdx.y * TILE, columns_left = n - first_column;
  const u32 row_bytes = n * (u32)sizeof(Stored);
  const Offsets offsets(lane, columns_left);
  const char* tile = dense + (u64)first_column * sizeof(Stored) + offsets.first;
  char* out_tile = out + (u64)first_column * sizeof(Stored);

  if (blockIdx.x >= long_items) {
    const int first_slot = (blockIdx.x - long_items) * SHORT_ROWS + group;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
      const int slot = first_slot + round * GROUPS;
      const bool there = slot < short_rows;
      const int row = there ? load_index(order + slot) : 0;
      const int begin = there ? indptr[row] : 0, end = there ? indptr[row + 1] : 0;
      Sum sums[ELEMENTS] = {};
      multiply_entries(sums, begin, end, LANES, indices, values, tile, row_bytes, offsets, lane);
      if (there) store_slice(out_tile + (u64)row * row_bytes, lane, columns_left, packed(sums));
    }
    return;
  }

  const Segment segment = segments[blockIdx.x];
  Sum sums[ELEMENTS] = {};
  multiply_entries(sums, segment.begin + group * LANES, segment.end, THREADS, indices, values, tile, row_bytes, offsets,
                   lane);
#pragma unroll
  for (int distance = LANES; distance < 32; distance *= 2) {
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) sums[e] += __shfl_xor_sync(ALL, sums[e], distance);
  }
  if (threadIdx.x % 32 < LANES) {
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) across_warps[threadIdx.x / 32][column_of(lane, e)] = sums[e];
  }
  __syncthreads();
#pragma unroll 1
  for (int column = threadIdx.x; column < min(TILE, columns_left); column += THREADS) {
    Sum sum = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += across_warps[warp][column];
    if (segment.partial < 0) {
      ((Stored*)(out_tile + (u64)segment.row * row_bytes))[column] = rounded(sum);
    } else {
      partial[(u64)segment.partial * n + first_column + column] = sum;
    }
  }
}
