// s = x[row] . y[column] on tensor cores, written into the values of an ME-BCRS matrix.
//
// A warp computes the dot products of 16 vectors of a window with its 8 rows: the rows of y that the vectors name are the
// 16-high left fragment, the window's rows of x the 8-wide right one. Lane l, with g = l / 4 and t = l % 4, loads 16 bytes of
// features at a time, slice t of 64 bytes, of vectors g and g + 8 and of row g: words 0 and 1 go into one product, 2 and 3
// into the next. (Which feature is which k may be chosen freely, as long as x and y agree.)
//
// Macros beside prelude.cu's (LANES = 4, ALIGN = 16): THREADS.

constexpr int WIDTH = TYPE == 0 ? 4 : 8;

struct Sixteen {
  int window, begin, window_begin, window_end;  // vectors begin .. begin + 15, as far as the window goes
};

Slice load_or_zero(const char* row, int piece, int pieces, bool there) {
  Slice s = {};
  if (there && piece < pieces) {
    asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(s.word[0]), "=r"(s.word[1]), "=r"(s.word[2]), "=r"(s.word[3]) : "l"(row + 16 * piece));
  }
#if TYPE == 0
#pragma unroll
  for (int i = 0; i < 4; ++i) s.word[i] = tf32(s.word[i]);
#endif
  return s;
}

void store_result(Stored* values, const u8* masks, const Sixteen& where, int vector, int row, float sum) {
  if (vector >= where.window_end) return;
  const int inside = vector - where.window_begin;
  const int block = where.window_begin + inside / WIDTH * WIDTH;
  const int vectors = min(WIDTH, where.window_end - block);
  const bool entry = masks[vector] >> row & 1;
  values[8ull * block + row * vectors + inside % WIDTH] = rounded(entry ? sum : 0.0f);
}

// columns, masks: (vectors,). work: (count,). x: (rows, d), y: (k, d), row-major, d a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    sddmm_vectors(const int* __restrict__ columns, const u8* __restrict__ masks, const Sixteen* __restrict__ work,
                  const char* __restrict__ x, const char* __restrict__ y, Stored* __restrict__ values, int count, int rows,
                  int d) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int number = blockIdx.x * (THREADS / 32) + __shfl_sync(ALL, threadIdx.x >> 5, 0);
  if (number >= count) return;
  const Sixteen where = work[number];
  const u64 row_bytes = (u64)d * sizeof(Stored);
  const int pieces = (int)(row_bytes / 16), upper = where.begin + g, lower = where.begin + g + 8;
  const bool has_upper = upper < where.window_end, has_lower = lower < where.window_end;
  const bool has_row = 8 * where.window + g < rows;
  const char* y_upper = y + (has_upper ? (u64)(u32)load_index(columns + upper) * row_bytes : 0);
  const char* y_lower = y + (has_lower ? (u64)(u32)load_index(columns + lower) * row_bytes : 0);
  const char* x_row = x + (has_row ? (u64)(8 * where.window + g) * row_bytes : 0);
  float sums[4] = {};
#pragma unroll 2
  for (int piece = t; piece - t < pieces; piece += 4) {
    const Slice a = load_or_zero(y_upper, piece, pieces, has_upper);
    const Slice b = load_or_zero(y_lower, piece, pieces, has_lower);
    const Slice c = load_or_zero(x_row, piece, pieces, has_row);
    multiply_wide(sums, a.word[0], b.word[0], a.word[1], b.word[1], c.word[0], c.word[1]);
    multiply_wide(sums, a.word[2], b.word[2], a.word[3], b.word[3], c.word[2], c.word[3]);
  }
  store_result(values, masks, where, upper, 2 * t, sums[0]);
  store_result(values, masks, where, upper, 2 * t + 1, sums[1]);
  store_result(values, masks, where, lower, 2 * t, sums[2]);
  store_result(values, masks, where, lower, 2 * t + 1, sums[3]);
}
