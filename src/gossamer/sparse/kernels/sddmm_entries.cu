// s = x[row] . y[column] of every entry: eight lanes take eight consecutive entries at a time.
//
// A lane multiplies 16 bytes of each dot product (and again, 128 bytes further on); then the eight lanes add up their eight
// sums by halves, seven shuffles in all, and lane l has the dot product of entry l:
//
//   lane l:   s0 s1 s2 s3 s4 s5 s6 s7   --4-->   4 sums of 2 lanes   --2-->   2 of 4   --1-->   1 of 8, of entry l
//
// Entries are the unit of work, whatever rows they are in: no row is too long. FEATURES_OUTER walks all of a block's entries
// for one 128-byte slice of features before the next: the slices of y that neighbouring rows share then stay in L1.
//
// Macros beside prelude.cu's (LANES = 8): THREADS, ROUNDS (eights of entries that eight lanes take), FEATURES_OUTER.

struct Eight {
  int row, column;  // of entry `lane`
  bool one_row;     // all eight are in one row
  bool there;       // entry `lane` exists
};

// Beyond the last entry it is taken again, so that all lanes go the same way.
Eight load_eight(const int* rows, const int* indices, long long first, int nnz, int lane) {
  Eight e;
  e.there = first + lane < nnz;
  const long long at = min(first + lane, (long long)nnz - 1);
  e.row = load_index(rows + at);
  e.column = load_index(indices + at);
  e.one_row = __shfl_sync(ALL, e.row, 0, 8) == __shfl_sync(ALL, e.row, 7, 8);
  return e;
}

// Add what a slice contributes; in the last tile of a ragged row only the pieces that are there.
template <bool FULL>
Sum dot(const Sum (&x)[ELEMENTS], const Slice& slice, Sum sum, int lane, int columns_left) {
  Sum y[ELEMENTS];
  unpack(slice, y);
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) {
    if (FULL || column_of(lane, e) < columns_left) sum += x[e] * y[e];
  }
  return sum;
}

// Add one tile of features to the eight sums of a lane.
template <bool FULL>
void add_tile(Sum (&sums)[8], const Eight& eight, const char* x, const char* y, u32 row_bytes, int columns_left, int lane) {
  const Offsets offsets(lane, columns_left);
  x += offsets.first;
  y += offsets.first;
  Slice theirs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    theirs[i] = load_slice(row_at(y, __shfl_sync(ALL, eight.column, i, 8), row_bytes), offsets);
  }
  Sum mine[ELEMENTS];
  if (__all_sync(ALL, eight.one_row)) {
    unpack(load_slice(row_at(x, eight.row, row_bytes), offsets), mine);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = dot<FULL>(mine, theirs[i], sums[i], lane, columns_left);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      unpack(load_slice(row_at(x, __shfl_sync(ALL, eight.row, i, 8), row_bytes), offsets), mine);
      sums[i] = dot<FULL>(mine, theirs[i], sums[i], lane, columns_left);
    }
  }
}

void add_tile_at(Sum (&sums)[8], const Eight& eight, const char* x, const char* y, int feature, int d, int lane) {
  const u64 skip = (u64)feature * sizeof(Stored);
  const u32 row_bytes = d * (u32)sizeof(Stored);
  if (d - feature >= TILE) {
    add_tile<true>(sums, eight, x + skip, y + skip, row_bytes, TILE, lane);
  } else {
    add_tile<false>(sums, eight, x + skip, y + skip, row_bytes, d - feature, lane);
  }
}

// The sum over eight lanes of sums[lane].
Sum added_up(const Sum (&sums)[8], int lane) {
  Sum four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Sum away = lane & 4 ? sums[i] : sums[i + 4], keep = lane & 4 ? sums[i + 4] : sums[i];
    four[i] = keep + __shfl_xor_sync(ALL, away, 4);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Sum away = lane & 2 ? four[i] : four[i + 2], keep = lane & 2 ? four[i + 2] : four[i];
    two[i] = keep + __shfl_xor_sync(ALL, away, 2);
  }
  const Sum away = lane & 1 ? two[0] : two[1], keep = lane & 1 ? two[1] : two[0];
  return keep + __shfl_xor_sync(ALL, away, 1);
}

// rows, indices, out: (nnz,). x: (m, d), y: (k, d), row-major. Grid: blocks of THREADS * ROUNDS entries.
extern "C" __global__ void __launch_bounds__(THREADS)
    sddmm_entries(const int* __restrict__ rows, const int* __restrict__ indices, const char* __restrict__ x,
                  const char* __restrict__ y, Stored* __restrict__ out, int nnz, int d) {
  const int lane = threadIdx.x % 8;
  const long long first = (long long)blockIdx.x * THREADS * ROUNDS + threadIdx.x / 8 * 8;
#if FEATURES_OUTER
  __shared__ Sum totals[ROUNDS][THREADS];  // each thread its own
#pragma unroll 1
  for (int feature = 0; feature < d; feature += TILE) {
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round) {
      const Eight eight = load_eight(rows, indices, first + round * THREADS, nnz, lane);
      Sum sums[8] = {};
      add_tile_at(sums, eight, x, y, feature, d, lane);
      const Sum total = added_up(sums, lane) + (feature ? totals[round][threadIdx.x] : (Sum)0);
      if (d - feature > TILE) {
        totals[round][threadIdx.x] = total;
      } else if (eight.there) {
        out[first + round * THREADS + lane] = rounded(total);
      }
    }
  }
#else
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const Eight eight = load_eight(rows, indices, first + round * THREADS, nnz, lane);
    Sum sums[8] = {};
#pragma unroll 1
    for (int feature = 0; feature < d; feature += TILE) add_tile_at(sums, eight, x, y, feature, d, lane);
    const Sum total = added_up(sums, lane);
    if (eight.there) out[first + round * THREADS + lane] = rounded(total);
  }
#endif
}
