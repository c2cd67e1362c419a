// y = x W^T for vector-wise N:M weights in float32, on the ordinary units, after the blocking of Ma et al. (IPDPS 2025).
//
// Both factors lie with their common dimension outside: x transposed, (in, tokens), so that a gathered input is one run of
// memory; the weight as B, (kept, padded). A block computes TOKENS x OUTPUTS in steps of INPUTS inputs (whole windows), of which
// KEPT are kept. Per step it brings, by copies in the background into a ring of STAGES,
//
//     x           the step's inputs, or, PACKED, those that a list names because any of the block's groups keeps them
//     B           KEPT rows of OUTPUTS
//     positions   a byte for each kept row and group: which row of x in the stage belongs to it
//
// A warp computes 8 * DOWN tokens x 32 outputs, so that all its lanes read the same gathered row of x; a thread DOWN x 8, in
// pieces of 4 that lie 32 tokens and 16 outputs apart. Lanes are laid so that 8 neighbours read 4 pieces of x and 2 of B.
// Per kept row and thread: DOWN / 4 + 2 wide loads, 8 * DOWN multiply-adds.
//
// Macros: TOKENS, OUTPUTS, DOWN (4, 8 or 16), KEPT, INPUTS, ROOM (rows of x in a stage), ACROSS (groups of a block), STAGES,
// PACKED, RESIDENT (blocks a multiprocessor).

#define WARPS_DOWN (TOKENS / (8 * DOWN))
#define THREADS (WARPS_DOWN * OUTPUTS)
#define POSITIONS ((KEPT + 3) / 4 * 4)
#define TURNS(pieces) (((pieces) + THREADS - 1) / THREADS)
#define X_BYTES (4 * ROOM * TOKENS)
#define B_BYTES (4 * KEPT * OUTPUTS)
#define INDEX_BYTES ((ACROSS * POSITIONS + 15) / 16 * 16)
#define LIST_BYTES (PACKED ? (4 * INPUTS + 15) / 16 * 16 : 0)
#define STAGE_BYTES (X_BYTES + B_BYTES + INDEX_BYTES)
#define LISTS (STAGES * STAGE_BYTES)

struct Operands {
  const float *x, *values;
  const u8* positions;
  const int* lists;
  int n, in_features, kept, padded;
  u64 row;  // numbers from one input to the next
};

// The inputs of one step for the block's tokens. LISTED: the list lies in the ring, else in memory.
template <bool LISTED>
void fetch_x(u32 stage, const Operands& from, int step, u64 list, int first_token) {
  const u32 ring_list = LISTS + step % STAGES * LIST_BYTES;
#pragma unroll
  for (int turn = 0; turn < TURNS(ROOM * (TOKENS / 4)); ++turn) {
    const int piece = threadIdx.x + THREADS * turn;
    if (ROOM * (TOKENS / 4) % THREADS && piece >= ROOM * (TOKENS / 4)) break;
    const int row = piece / (TOKENS / 4), token = first_token + 4 * (piece % (TOKENS / 4));
#if PACKED
    const int input = LISTED ? load<int>(ring_list + 4 * row) : from.lists[list + row];
    if (input < 0) break;
#else
    const int input = INPUTS * step + row;
#endif
    const bool there = input < from.in_features && token < from.n;
    copy_16(stage + 16 * piece, there ? from.x + from.row * input + token : from.x, there);
  }
}

// The rest of a step: the weight's rows and positions, and the list of the step that is fetched STAGES - 1 later.
void fetch_weight(u32 stage, const Operands& from, int step, u64 block_step, int steps_left, int first_output) {
#pragma unroll
  for (int turn = 0; turn < TURNS(KEPT * (OUTPUTS / 4)); ++turn) {
    const int piece = threadIdx.x + THREADS * turn;
    if (KEPT * (OUTPUTS / 4) % THREADS && piece >= KEPT * (OUTPUTS / 4)) break;
    const int row = KEPT * step + piece / (OUTPUTS / 4), output = first_output + 4 * (piece % (OUTPUTS / 4));
    const bool there = row < from.kept && output < from.padded;
    copy_16(stage + X_BYTES + 16 * piece, there ? from.values + (u64)row * from.padded + output : from.values, there);
  }
#pragma unroll
  for (int turn = 0; turn < TURNS(ACROSS * POSITIONS / 4); ++turn) {
    const int word = threadIdx.x + THREADS * turn;
    if (word >= ACROSS * POSITIONS / 4) break;
    copy_4(stage + X_BYTES + B_BYTES + 4 * word, from.positions + block_step * ACROSS * POSITIONS + 4 * word);
  }
#if PACKED
  if (steps_left <= STAGES - 1) return;
  const u32 target = LISTS + (step + STAGES - 1) % STAGES * LIST_BYTES;
#pragma unroll
  for (int turn = 0; turn < TURNS(INPUTS); ++turn) {
    const int word = threadIdx.x + THREADS * turn;
    if (word >= INPUTS) break;
    copy_4(target + 4 * word, from.lists + (block_step + STAGES - 1) * INPUTS + word);
  }
#endif
}

void multiply_step(float (&sums)[DOWN][8], u32 x, u32 weight, u32 positions) {
#pragma unroll
  for (int four = 0; four < POSITIONS / 4; ++four) {
    const u32 places = load<u32>(positions + 4 * four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * four + i;
      if (row >= KEPT) break;
      const u32 x_row = x + 4 * TOKENS * ((places >> (8 * i)) & 0xff);
      float a[DOWN], b[8];
#pragma unroll
      for (int part = 0; part < DOWN / 4; ++part) {
        const Floats four_of = load<Floats>(x_row + 128 * part);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[4 * part + j] = four_of.at[j];
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const Floats four_of = load<Floats>(weight + 4 * OUTPUTS * row + 64 * part);
#pragma unroll
        for (int j = 0; j < 4; ++j) b[4 * part + j] = four_of.at[j];
      }
#pragma unroll
      for (int down = 0; down < DOWN; ++down) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[down][j] += a[down] * b[j];
      }
    }
  }
}

// x: (in, tokens), `row` numbers from input to input, a multiple of 4. values: (kept, padded). positions: (blocks, steps, ACROSS,
// POSITIONS). lists: (blocks, steps, INPUTS), -1 where they end. y: (n, rows), or partial: (shares, n, rows) if the steps are
// shared out. Grid: blocks of tokens, of outputs, shares of `share` steps.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    nm_floats(const float* __restrict__ x, const float* __restrict__ values, const u8* __restrict__ positions,
              const int* __restrict__ lists, float* __restrict__ y, int n, int rows, int in_features, int kept, int padded,
              int steps, int share, u64 row) {
  const Operands from{x, values, positions, lists, n, in_features, kept, padded, row};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_token = TOKENS * blockIdx.x, first_output = OUTPUTS * blockIdx.y;
  const int first = share * blockIdx.z, last = min(first + share, steps);
  const u64 block = (u64)blockIdx.y * steps;
#pragma unroll
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    if (first + ahead < last) {
      fetch_x<false>(ahead * STAGE_BYTES, from, first + ahead, (block + first + ahead) * INPUTS, first_token);
      const int step = first + ahead;
      fetch_weight(ahead * STAGE_BYTES, from, step, block + step, last - step, first_output);
    }
    commit_copies();
  }
  const int own_token = 8 * DOWN * (warp % WARPS_DOWN) + 4 * (lane % 16 / 2);
  const int warp_output = 32 * (warp / WARPS_DOWN), own_output = warp_output + 8 * (lane / 16) + 4 * (lane % 2);
  const u32 own_group = X_BYTES + B_BYTES + POSITIONS * (warp_output * ACROSS / OUTPUTS);
  float sums[DOWN][8] = {};
  int stage = 0;
  for (int step = first; step < last; ++step) {
    await_copies<STAGES - 2>();
    __syncthreads();  // the stage is there, and nobody reads the one before
    const int ahead = step + STAGES - 1;
    if (ahead < last) {
      const u32 target = (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES;
      fetch_x<true>(target, from, ahead, 0, first_token);
      fetch_weight(target, from, ahead, block + ahead, last - ahead, first_output);
    }
    commit_copies();
    const u32 place = stage * STAGE_BYTES;
    multiply_step(sums, place + 4 * own_token, place + X_BYTES + 4 * own_output, place + own_group);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  float* target = y + (u64)blockIdx.z * n * rows;
#pragma unroll
  for (int down = 0; down < DOWN; ++down) {
    const int token = first_token + own_token + 32 * (down / 4) + down % 4;
    if (token >= n) continue;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int output = first_output + own_output + 16 * part;
      float* place = target + (u64)token * rows + output;
      if (rows % 4 == 0) {
        if (output >= rows) continue;
        *(Floats*)place = Floats{{sums[down][4 * part], sums[down][4 * part + 1], sums[down][4 * part + 2], sums[down][4 * part + 3]}};
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (output + j < rows) place[j] = sums[down][4 * part + j];
        }
      }
    }
  }
}

// y = the sum of the shares, in order.
extern "C" __global__ void add_shares(const float* __restrict__ partial, float* __restrict__ y, u64 count, int shares) {
  const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (int share = 0; share < shares; ++share) sum += partial[share * count + i];
  y[i] = sum;
}
