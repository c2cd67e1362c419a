// y = x W^T, decoding W in registers on its way into the tensor cores.
//
// A warp owns STRIPS strips of 16 rows and walks the records of its block's share of the columns. Records come by the copy
// engine, each warp a ring of its own. x comes in chunks that a whole block shares, laid down as lanes read it (a wide load
// from x itself would touch eight cache lines and cost sixteen cycles). Where the columns are split, each split's sums go
// to `partial` and a second kernel adds them, so that y has the same bits every time.
//
// Both kernels are launched early: they begin while the kernel before drains, and wait for its end before they touch
// anything but the weight.

// records, offsets: the weight, strip by strip. x: (n, 128 * tiles). y: (n, rows) where one split covers all columns,
// else partial: (splits, n, rows). Grid: strips over the warps of the blocks, splits.
extern "C" __global__ void fragment_linear(const u8* __restrict__ records, const u32* __restrict__ offsets,
                                           const u16* __restrict__ x, u16* __restrict__ y, float* __restrict__ partial,
                                           int n, int rows, int strips, int tiles, int tiles_a_split, int chunk_tiles,
                                           int x_bytes, int slot_bytes, u32 constant) {
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
  u32 lengths[STRIPS] = {};  // of the records in flight, ten bits each, the newest lowest
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
        lengths[strip] = lengths[strip] << 10 | (end[strip] - begin[strip]);
      }
      if (first + stage < last) {
        fetch_stage(base + ring + stage * stage_bytes, slot_bytes, records, begin, end, barriers + 16 * stage);
      }
    }
  }
  await_kernel_before();
  let_next_kernel_begin();
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
      u32 length[STRIPS];
      for (int strip = 0; strip < STRIPS; ++strip) {
        length[strip] = lengths[strip] >> 10 * (STAGES - 1) & 1023;
        if (ahead % 32 == 0) window[strip] = starts_of[strip][min(ahead + (int)lane, last - first)];
        begin[strip] = end[strip];
        end[strip] = __shfl_sync(0xffffffffu, window[strip], ahead % 32);
        lengths[strip] = lengths[strip] << 10 | (end[strip] - begin[strip]);
      }
      await_stage(barriers + 16 * stage, parity);
      multiply_tile(sums, slot, slot_bytes, length, x_tile, own, constant);
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

// y = the sum of the splits, rounded once. They are read from the L2 cache: this kernel began before they were written.
extern "C" __global__ void add_splits(const float* __restrict__ partial, u16* __restrict__ y, int count, int splits) {
  let_next_kernel_begin();
  await_kernel_before();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (int split = 0; split < splits; ++split) sum += __ldcg(partial + (u64)split * count + i);
  y[i] = rounded(sum);
}
