// Decompression of the bit-exact layout `tbe` (its arrays are described in weights/_tbe_layout.py), sm_90.
//
// A block takes one tile of 64x64 after the other; the next ones are on their way by the copy engine meanwhile. A warp owns 16
// rows, that is 16 of the 8x8 bitmaps, number 2 c + half for columns 8 c and rows 8 half from its first on:
//
//     prefix   lane s < 16 counts bitmap s: where each of its 8 rows begins in the stream of coded bytes
//     decode   lane l, for half = 0, 1: rows 2 (l / 8) + {0, 1} of bitmap 2 (l % 8) + half, 8 entries each = 16 bytes
//
// so that 8 lanes store 128 bytes side by side. Per row of 8 entries: codes are spread to bytes by a multiplication for each
// nibble of a plane; the coded bytes, read at any address, are moved to their entries by two byte permutations that a table
// holds for each of 256 masks; entries without a code (one in 35) are put in one by one.
//
// Budget for 256 entries, a row of 8 for each lane of a warp: about 90 instructions (23 cycles of a multiprocessor), 12 cycles
// of shared memory, POPC in the prefix only. 1.8 TB/s of output on 132 multiprocessors at 1.98 GHz allows 74 cycles, the speed
// of memory about 50: bytes bound it, not decoding.
//
// Macros: WIDE (rows of `out` begin at multiples of 16 bytes), STAGES.

#define PLANE_BYTES 512
#define TABLE 0
#define STARTS 1024
#define RING 2048

// What stands at one nibble of a plane, spread to four bytes: `bit` is 1, 2 or 4. A high nibble stays four bits up.
u32 spread(u32 nibble, u32 bit) { return nibble * (0x00204081u * bit); }

u32 codes_of(u32 one, u32 two, u32 three, u32 nibble, u32 bytes) {
  return (spread(one & nibble, 1) & bytes) | (spread(two & nibble, 2) & (bytes << 1)) | (spread(three & nibble, 4) & (bytes << 2));
}

// Four entries as bf16: `kept` holds signs and mantissas, `codes` exponents less the base (that is, plus base_low without
// carries, then base_top exchanged for the highest bits).
void assemble(u32 (&out)[4], int half, u32 kept, u32 codes, u32 base_low, u32 base_top) {
  const u32 exponent = (codes + base_low) ^ base_top;
  const u32 low = (kept & 0x7f7f7f7fu) | ((exponent << 7) & 0x80808080u);
  const u32 high = (kept & 0x80808080u) | ((exponent >> 1) & 0x7f7f7f7fu);
  out[2 * half] = permute(low, high, 0x5140u);
  out[2 * half + 1] = permute(low, high, 0x7362u);
}

// One row of eight entries. one, two, three: its bytes of the planes in bits 0..7. coded, full: where its entries begin.
void decode_row(u32 (&out)[4], u32 one, u32 two, u32 three, u32 coded, u32 full, u32 base_low, u32 base_top) {
  const u32 mask = (one | two | three) & 0xff;
  const u32 select = load<u32>(TABLE + 4 * mask), word = coded & ~3u, shift = 8 * (coded & 3);
  const u32 first = load<u32>(word), second = load<u32>(word + 4), third = load<u32>(word + 8);
  const u32 low = __funnelshift_r(first, second, shift), high = __funnelshift_r(second, third, shift);
  assemble(out, 0, permute(low, high, select), codes_of(one, two, three, 0x0f, 0x01010101u), base_low, base_top);
  assemble(out, 1, permute(low, high, select >> 16), codes_of(one, two, three, 0xf0, 0x10101010u) >> 4, base_low, base_top);
  for (u32 missing = mask ^ 0xff; missing; missing &= missing - 1, full += 2) {
    const u32 place = 31 - __clz(missing & (0 - missing)), value = load<u16>(full);
    const u32 put = place & 1 ? 0x5410u : 0x3254u, keep = 0x3210u;  // branches here would put `out` into local memory
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) out[pair] = permute(out[pair], value, place / 2 == pair ? put : keep);
  }
}

// Bytes p, p + 1 of `word` as two numbers of 16 bits.
u32 two_of(u32 word, int p) { return permute(word, 0, p ? 0x4342u : 0x4140u); }

// Lanes 0..15: the places, from the tile's first coded byte, at which the rows of the bitmaps begin, to STARTS.
void count_rows(u32 stage, u32 warp, u32 lane, u32 warp_start) {
  u64 mask = 0;
  if (lane < 16) {
    const u32 place = stage + 8 * (16 * warp + lane);
    mask = load<u64>(place) | load<u64>(place + PLANE_BYTES) | load<u64>(place + 2 * PLANE_BYTES);
  }
  u64 sums = mask - ((mask >> 1) & 0x5555555555555555ull);
  sums = (sums & 0x3333333333333333ull) + ((sums >> 2) & 0x3333333333333333ull);
  sums = (sums + (sums >> 4)) & 0x0f0f0f0f0f0f0f0full;
  sums *= 0x0101010101010101ull;  // byte r: the bits of rows 0 .. r
  const u32 own = (u32)(sums >> 56);
  u32 scan = own;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
    const u32 before = __shfl_up_sync(0xffffffffu, scan, step);
    if (lane >= step) scan += before;
  }
  if (lane >= 16) return;
  const u64 above = sums << 8;
  const u32 start = (warp_start + scan - own) * 0x10001u, low = (u32)above, high = (u32)(above >> 32);
  Quad rows;
  rows.at[0] = start + two_of(low, 0);
  rows.at[1] = start + two_of(low, 2);
  rows.at[2] = start + two_of(high, 0);
  rows.at[3] = start + two_of(high, 2);
  store(STARTS + 16 * (16 * warp + lane), rows);
}

struct Arrays {
  const u8 *plane1, *plane2, *plane3, *coded, *full;
};

// One thread: the tile's bytes into a stage. span: its beginnings in both streams, and the next tile's.
void fetch_tile(const Arrays& from, u32 stage, u32 coded_bytes, u32 barrier, int tile, const int (&span)[4]) {
  const u32 coded = span[2] - span[0], full = 2 * (span[3] - span[1]);
  expect_bytes(barrier, 3 * PLANE_BYTES + coded + full);
  fetch_bytes(stage, from.plane1 + (u64)PLANE_BYTES * tile, PLANE_BYTES, barrier);
  fetch_bytes(stage + PLANE_BYTES, from.plane2 + (u64)PLANE_BYTES * tile, PLANE_BYTES, barrier);
  fetch_bytes(stage + 2 * PLANE_BYTES, from.plane3 + (u64)PLANE_BYTES * tile, PLANE_BYTES, barrier);
  if (coded) fetch_bytes(stage + 3 * PLANE_BYTES, from.coded + span[0], coded, barrier);
  if (full) fetch_bytes(stage + 3 * PLANE_BYTES + coded_bytes, from.full + 2ull * span[1], full, barrier);
}

void read_span(int (&span)[4], const int* offsets, int tile, int tiles) {
  if (tile >= tiles) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) span[i] = offsets[2ull * tile + i];
}

// coded_bytes: room for a tile's coded bytes (a multiple of 16, with 16 spare); stage_bytes: of everything.
extern "C" __global__ void __launch_bounds__(128)
    tbe_decompress(const u8* __restrict__ plane1, const u8* __restrict__ plane2, const u8* __restrict__ plane3,
                   const u8* __restrict__ coded, const u8* __restrict__ full, const int* __restrict__ offsets,
                   const int* __restrict__ warps, u16* __restrict__ out, int rows, int columns, int across, int tiles, int base,
                   int coded_bytes, int stage_bytes) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, barriers = RING + STAGES * stage_bytes;
  const Arrays from{plane1, plane2, plane3, coded, full};
  const u32 base_low = (base & 0x7f) * 0x01010101u, base_top = (base & 0x80) * 0x01010101u;
  int span[4];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) init_barrier(barriers + 8 * stage);
    for (int stage = 0; stage < STAGES; ++stage) {
      const int tile = blockIdx.x + stage * gridDim.x;
      read_span(span, offsets, tile, tiles);
      if (tile < tiles) fetch_tile(from, RING + stage * stage_bytes, coded_bytes, barriers + 8 * stage, tile, span);
    }
    read_span(span, offsets, blockIdx.x + STAGES * gridDim.x, tiles);
  }
  for (u32 mask = threadIdx.x; mask < 256; mask += 128) {
    u32 select = 0;
    for (u32 place = 0, count = 0; place < 8; ++place) {
      if (mask >> place & 1) select |= count++ << (4 * place);
    }
    store(TABLE + 4 * mask, select);
  }
  __syncthreads();
  u32 stage = 0, parity = 0;
  int warp_start = blockIdx.x < tiles ? warps[8ull * blockIdx.x + 2 * warp] : 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u32 place = RING + stage * stage_bytes, coded_at = place + 3 * PLANE_BYTES, full_at = coded_at + coded_bytes;
    const int next_start = tile + gridDim.x < tiles ? warps[8ull * (tile + gridDim.x) + 2 * warp] : 0;
    await_bytes(barriers + 8 * stage, parity);
    count_rows(place, warp, lane, warp_start);
    __syncwarp();
    const int first_row = 64 * (tile / across) + 16 * warp + 2 * (lane >> 3);
    const int column = 64 * (tile % across) + 8 * (lane & 7);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 bitmap = 16 * warp + 2 * (lane & 7) + half, pair = lane >> 3, bytes = place + 8 * bitmap + 2 * pair;
      u32 one = load<u16>(bytes), two = load<u16>(bytes + PLANE_BYTES), three = load<u16>(bytes + 2 * PLANE_BYTES);
      u32 starts = load<u32>(STARTS + 16 * bitmap + 4 * pair);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 start = starts & 0xffff, before = 64 * bitmap + 16 * pair + 8 * odd;
        u32 entries[4];
        decode_row(entries, one, two, three, coded_at + start, full_at + 2 * (before - start), base_low, base_top);
        const int row = first_row + 8 * half + odd;
        u16* target = out + (u64)row * columns + column;
#if WIDE
        if (row < rows && column < columns) *(Quad*)target = Quad{{entries[0], entries[1], entries[2], entries[3]}};
#else
#pragma unroll
        for (int entry = 0; entry < 8; ++entry) {
          if (row < rows && column + entry < columns) target[entry] = (u16)(entries[entry / 2] >> (16 * (entry & 1)));
        }
#endif
        one >>= 8, two >>= 8, three >>= 8, starts >>= 16;
      }
    }
    __syncthreads();  // all have read the stage
    if (threadIdx.x == 0) {
      const int ahead = tile + STAGES * gridDim.x;
      if (ahead < tiles) fetch_tile(from, place, coded_bytes, barriers + 8 * stage, ahead, span);
      read_span(span, offsets, ahead + gridDim.x, tiles);
    }
    warp_start = next_start;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}
