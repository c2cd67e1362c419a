// y = x W^T for a bitmap weight in fragment order, decoded in registers on its way into the tensor cores (sm_90).
//
// A warp owns STRIPS strips of 16 rows and walks the records of its block's share of the columns. A record is one tile of
// 16 rows x 128 columns: 64 mask words, 64 16-bit starts, then the values. Lane l = 8 * group + lane_in_group (g = l / 4,
// t = l % 4 as in the fragment layouts of mma.m16n8k16) owns, in step s = 4 * quarter + 2 * k + h of sixteen,
//
//     register a[2h]      row g,      columns 32 quarter + 8 t + 4 k + 2 h + {0, 1}
//     register a[2h + 1]  row g + 8,  the same columns
//
// that is, four runs of 8 consecutive columns a tile: columns may be permuted freely as long as x is read in the same
// order, and so a lane reads x in runs of 16 bytes. Mask word (s, group) serves the eight lanes of a group: with
// u = g % 2, bits 16 u + 2 t + {0, 1} are the lane's pair in row g, the bits 8 above its pair in row g + 8. Values stand
// in the order of the bits, words in the order s, group. Words, and the starts of their values in bytes from the
// record's, are stored in the order group, s, so that a lane reads its sixteen with wide loads.
//
// Decoding a pair takes one popcount, two 16-bit loads (both unconditional) and a byte permutation of what they bring;
// another one, for two pairs at once, looks up which bytes, or zeros, belong where.
//
// Records come by the copy engine, each warp a ring of its own. x comes in chunks that a whole block shares, laid down as
// lanes read it (a wide load from x itself would touch eight cache lines and cost sixteen cycles). Where the columns are
// split, each split's sums go to `partial` and a second kernel adds them, so that y has the same bits every time.
//
// Macros: BLOCKS (8 columns of y each), STRIPS, STAGES (records in flight), BFLOAT16 (0 or 1).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(128) u8 shared[];

struct __align__(16) Quad {
  u32 at[4];
};

struct __align__(8) Pair {
  u32 at[2];
};

u32 shared_address(const void* pointer) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return (u32)address;
}

template <class Word>
Word load(u32 offset) {
  return *(const Word*)(shared + offset);
}

// Bytes of {low, high} picked by the four low nibbles of `selector`. (The intrinsic masks the nibbles first.)
u32 permute(u32 low, u32 high, u32 selector) {
  u32 word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(selector));
  return word;
}

// offset + the lower or upper 16 bits of `two`.
u32 add_half(u32 offset, u32 two, int upper) {
  u32 sum;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(two), "r"(upper ? 0x100 : 0x001), "r"(offset));
  return sum;
}

// The entries of one pair: the low half of `selector` says which bytes of two values, or zeros, they are.
u32 decode_pair(u32 mask, u32 below, u32 start, u32 selector) {
  const u32 place = start + 2 * __popc(mask & below);
  return permute(load<u16>(place), load<u16>(place + 2), selector);
}

void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BFLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

u16 rounded(float value) {
  u16 bits;
#if BFLOAT16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
  return bits;
}

void fetch_record(u32 target, const u8* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// One lane issues one record of each strip into a stage; offsets count units of 16 bytes.
void fetch_stage(u32 stage, u32 slot_bytes, const u8* records, const u32 (&begin)[STRIPS], const u32 (&end)[STRIPS],
                 u32 barrier) {
  u32 chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  if (!chosen) return;
  u32 units = 0;
  for (int strip = 0; strip < STRIPS; ++strip) units += end[strip] - begin[strip];
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(16 * units) : "memory");
  for (int strip = 0; strip < STRIPS; ++strip) {
    fetch_record(stage + strip * slot_bytes, records + 16ull * begin[strip], 16 * (end[strip] - begin[strip]), barrier);
  }
}

void await_stage(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// The block copies the tiles first .. last of x: a piece of 16 bytes is what one lane reads for one quarter of a tile and
// one block of 8 rows; quarter * BLOCKS + block numbers the 512-byte parts of a tile.
void fetch_activations(u32 target, const u16* x, u64 row_length, int n, int first, int last, u32 lane, u32 warp, u32 warps) {
  for (u32 part = warp; part < (last - first) * 4 * BLOCKS; part += warps) {
    const int row = min((int)(8 * (part % BLOCKS) + (lane >> 2)), n - 1);  // columns of y beyond n are dropped at the end
    const u16* source = x + row * row_length + 128 * first + 32 * (part / BLOCKS) + 8 * (lane & 3);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + 512 * part + 16 * lane), "l"(source) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// What a lane owns of every record and mask word.
struct Share {
  u32 masks, starts, shift, below_upper, below_lower, patterns;
};

Share share_of(u32 lane) {
  Share own;
  own.masks = 64 * (lane >> 3);
  own.starts = 256 + 32 * (lane >> 3);
  own.shift = 16 * (lane >> 2 & 1) + 2 * (lane & 3);
  own.below_upper = (1u << own.shift) - 1;
  own.below_lower = (1u << (own.shift + 8)) - 1;
  // A constant that the compiler keeps in a lane's register: else it is moved there before every use. Bytes 2 p and
  // 2 p + 1 of {patterns, 0x54101022} select for pattern p = 00, 01, 10, 11; bytes 2 and 3 of a loaded value are zero.
  own.patterns = 0x22102222u | own.below_lower >> 31;
  return own;
}

// Decode one record of each strip, at `slot` in shared memory, and multiply it by a tile of x.
void multiply_tile(float (&sums)[STRIPS][BLOCKS][4], u32 slot, u32 slot_bytes, u32 x_tile, const Share& own) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    Quad b[BLOCKS];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) b[block] = load<Quad>(x_tile + (quarter * BLOCKS + block) * 512);
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const u32 record = slot + strip * slot_bytes;
      const Quad masks = load<Quad>(record + own.masks + 16 * quarter);
      const Pair starts = load<Pair>(record + own.starts + 8 * quarter);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        u32 a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 mask = masks.at[2 * k + h], start = add_half(record, starts.at[k], h);
          const u32 selectors = permute(own.patterns, 0x54101022u, ((mask >> own.shift) & 0x0303u) * 0x22u + 0x1010u);
          a[2 * h] = decode_pair(mask, own.below_upper, start, selectors);
          a[2 * h + 1] = decode_pair(mask, own.below_lower, start, selectors >> 16);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          multiply(sums[strip][block], a, b[block].at[2 * k], b[block].at[2 * k + 1]);
        }
      }
    }
  }
}

// records, offsets: the weight, strip by strip. x: (n, 128 * tiles). y: (n, rows) where one split covers all columns,
// else partial: (splits, n, rows). Grid: strips over the warps of the blocks, splits.
extern "C" __global__ void bitmap_linear(const u8* __restrict__ records, const u32* __restrict__ offsets,
                                         const u16* __restrict__ x, u16* __restrict__ y, float* __restrict__ partial,
                                         int n, int rows, int strips, int tiles, int tiles_a_split, int chunk_tiles,
                                         int x_bytes, int slot_bytes) {
  const u32 lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), warps = blockDim.x >> 5;
  const int first_strip = STRIPS * (blockIdx.x * warps + warp);
  const int first = blockIdx.y * tiles_a_split, last = min(first + tiles_a_split, tiles);
  const bool active = first_strip < strips;  // the others help with x

  // Offsets into `shared`; the copy engine and barriers take addresses, which begin at `base`.
  const u32 base = shared_address(shared), stage_bytes = STRIPS * slot_bytes;
  const u32 ring = x_bytes + warp * STAGES * (stage_bytes + 16), barriers = base + ring + STAGES * stage_bytes;

  // Where records begin, 32 at a time: lane l holds that of tile `first` + 32 i + l of each strip.
  const u32* starts_of[STRIPS];
  u32 window[STRIPS], begin[STRIPS], end[STRIPS];
  if (active) {
    for (int strip = 0; strip < STRIPS; ++strip) {
      starts_of[strip] = offsets + (u64)min(first_strip + strip, strips - 1) * tiles + first;
      window[strip] = starts_of[strip][min((int)lane, last - first)];
      end[strip] = __shfl_sync(0xffffffffu, window[strip], 0);
    }
    if (lane == 0) {
      for (int stage = 0; stage < STAGES; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 16 * stage) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    for (int stage = 0; stage < STAGES; ++stage) {
      for (int strip = 0; strip < STRIPS; ++strip) {
        begin[strip] = end[strip];
        end[strip] = __shfl_sync(0xffffffffu, window[strip], stage + 1);
      }
      if (first + stage < last) {
        fetch_stage(base + ring + stage * stage_bytes, slot_bytes, records, begin, end, barriers + 16 * stage);
      }
    }
  }
  fetch_activations(base, x, 128ull * tiles, n, first, min(first + chunk_tiles, last), lane, warp, warps);

  const Share own = share_of(lane);
  float sums[STRIPS][BLOCKS][4] = {};
  u32 stage = 0, parity = 0, x_chunk = 0;
  for (int chunk = first; chunk < last; chunk += chunk_tiles) {
    const int chunk_end = min(chunk + chunk_tiles, last);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();  // this chunk is there, and nobody reads the one before
    u32 x_tile = x_chunk + 16 * lane;
    if (chunk_end < last) {
      x_chunk ^= x_bytes / 2;
      const int next_end = min(chunk_end + chunk_tiles, last);
      fetch_activations(base + x_chunk, x, 128ull * tiles, n, chunk_end, next_end, lane, warp, warps);
    }
    if (!active) continue;
    for (int tile = chunk; tile < chunk_end; ++tile, x_tile += BLOCKS * 2048) {
      const u32 slot = ring + stage * stage_bytes;
      const int ahead = tile - first + STAGES + 1;
      for (int strip = 0; strip < STRIPS; ++strip) {
        if (ahead % 32 == 0) window[strip] = starts_of[strip][min(ahead + (int)lane, last - first)];
        begin[strip] = end[strip];
        end[strip] = __shfl_sync(0xffffffffu, window[strip], ahead % 32);
      }
      await_stage(barriers + 16 * stage, parity);
      multiply_tile(sums, slot, slot_bytes, x_tile, own);
      __syncwarp();  // all lanes have read the slot
      if (tile + STAGES < last) fetch_stage(base + slot, slot_bytes, records, begin, end, barriers + 16 * stage);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  if (!active) return;
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int row = 16 * (first_strip + strip) + (lane >> 2) + 8 * (part >> 1);
        const int column = 8 * block + 2 * (lane & 3) + (part & 1);
        if (row >= rows || column >= n) continue;
        if (gridDim.y == 1) {
          y[(u64)column * rows + row] = rounded(sums[strip][block][part]);
        } else {
          partial[((u64)blockIdx.y * n + column) * rows + row] = sums[strip][block][part];
        }
      }
    }
  }
}

// y = the sum of the splits, rounded once.
extern "C" __global__ void add_splits(const float* __restrict__ partial, u16* __restrict__ y, int count, int splits) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (int split = 0; split < splits; ++split) sum += partial[(u64)split * count + i];
  y[i] = rounded(sum);
}
