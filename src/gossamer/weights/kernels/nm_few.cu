// y = x W^T for vector-wise N:M weights of 16 bits and up to 32 rows of x: bound by the weight's bytes.
//
// The weight is B of shape (kept, padded), one row for each kept input, and one byte for each 32 or more of its columns that
// says which input of the row's window that is. A block owns 32 * WARPS outputs and a share of the kept rows, which stream
// through a ring of STAGES times 32 rows. A warp owns 32 outputs, that is one group:
//
//     A = B^T   16 outputs x 16 kept rows: one matrix load, transposed; rows of the ring lie 64 * WARPS bytes apart and their
//               16-byte pieces are exchanged by the row's low bits, so that 8 rows meet 8 different banks
//     B = x^T   16 kept rows x 8 tokens: one matrix load whose rows are the gathered inputs. x lies transposed in shared
//               memory for that, an input's tokens together; lane l knows the input of kept row l, a shuffle hands it on
//
// Where the kept rows are shared out, each share's sums go to `partial` and a second kernel adds them in order, so that y has
// the same bits every time.
//
// Macros: WARPS, STAGES, BLOCKS (of 8 tokens: 1, 2 or 4), BFLOAT16.

#define OUTPUTS (32 * WARPS)
#define ROW_BYTES (2 * OUTPUTS)
#define STAGE_ROWS 32
#define STAGE_BYTES (STAGE_ROWS * ROW_BYTES)
#define INPUT_BYTES (16 * BLOCKS)

// Where 8 tokens of an input lie, counted from the block's first; exchanged so that gathered rows meet more banks.
u32 x_place(u32 input, u32 block) { return INPUT_BYTES * input + 16 * (block ^ ((input * BLOCKS >> 3) & (BLOCKS - 1))); }

u32 ring_place(u32 row, u32 piece) { return ROW_BYTES * row + 16 * (piece ^ (row & 7)); }

// All threads: kept rows first .. first + 32 of the block's outputs into a stage; zeros from `last` on.
void fetch_rows(u32 stage, const u16* values, u64 padded, int first_output, int first, int last) {
#pragma unroll
  for (int turn = 0; turn < STAGE_ROWS / 8; ++turn) {
    const int piece = threadIdx.x + 32 * WARPS * turn, row = piece / (4 * WARPS), across = piece % (4 * WARPS);
    const int output = first_output + 8 * across;
    const bool there = first + row < last && output < padded;
    copy_16(stage + ring_place(row, across), there ? values + (first + row) * padded + output : values, there);
  }
}

// Eight neighbouring inputs of one token; zeros where there is none.
Quad eight_inputs(const u16* x, int token, int n, int input, int in_features, bool wide) {
  Quad eight = {};
  if (token >= n) return eight;
  const u16* source = x + (u64)token * in_features + input;
  if (wide) {
    if (input < in_features) eight = *(const Quad*)source;
    return eight;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (input + i < in_features) eight.at[i / 2] |= (u32)source[i] << (16 * (i % 2));
  }
  return eight;
}

// The block's inputs of all tokens, transposed, two tokens a word; zeros beyond.
void spread_x(u32 target, const u16* x, int n, int in_features, int first_input, int inputs) {
  const bool wide = (in_features | first_input | inputs) % 8 == 0;
  for (int piece = threadIdx.x; piece < 4 * BLOCKS * ((inputs + 7) / 8); piece += 32 * WARPS) {
    const int token = 2 * (piece % (4 * BLOCKS)), part = 8 * (piece / (4 * BLOCKS));
    const Quad even = eight_inputs(x, token, n, first_input + part, in_features, wide);
    const Quad odd = eight_inputs(x, token + 1, n, first_input + part, in_features, wide);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 both = permute(even.at[i / 2], odd.at[i / 2], i % 2 ? 0x7632u : 0x5410u);
      if (part + i < inputs) store<u32>(target + x_place(part + i, token / 8) + 2 * (token % 8), both);
    }
  }
}

// The kept row's input, counted from the block's first; 0 for rows beyond `last`. divide: 2^32 / n, rounded up, or 0 for n = 1.
u32 input_of(const u8* index, int row, int last, int groups, int group, int m, u32 divide, int first_input) {
  if (row >= last) return 0;
  const u32 window = divide ? __umulhi(row, divide) : row;
  return window * m + index[(u64)row * groups + group] - first_input;
}

// values: (kept, padded). index: (kept, groups). x: (n, in). y: (n, rows), or partial: (shares, n, rows) if there is more than
// one share. Grid: blocks of outputs, shares of `share` kept rows, whole windows. vector: outputs of a group.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    nm_few(const u16* __restrict__ values, const u8* __restrict__ index, const u16* __restrict__ x, u16* __restrict__ y,
           float* __restrict__ partial, int n, int rows, int in_features, int kept, int groups, int vector, int of, int m,
           u32 divide, int share) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first = blockIdx.y * share, last = min(first + share, kept);
  const int first_output = blockIdx.x * OUTPUTS, own_output = first_output + 32 * warp;
  const u64 padded = (u64)groups * vector;
  const int first_input = first / of * m, inputs = (last - first + of - 1) / of * m;
  const int group = min(own_output / vector, groups - 1);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    fetch_rows(stage * STAGE_BYTES, values, padded, first_output, first + STAGE_ROWS * stage, last);
    commit_copies();
  }
  u32 input = input_of(index, first + lane, last, groups, group, m, divide, first_input);
  const u32 x_at = STAGES * STAGE_BYTES;
  spread_x(x_at, x, n, in_features, first_input, inputs);

  float sums[2][BLOCKS][4] = {};
  int stage = 0;
  for (int row = first; row < last; row += STAGE_ROWS) {
    await_copies<STAGES - 2>();
    __syncthreads();  // the stage is there, and nobody reads the one before; at first, x too
    const int ahead = row + STAGE_ROWS * (STAGES - 1);
    const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
    if (ahead < last) fetch_rows(free_stage * STAGE_BYTES, values, padded, first_output, ahead, last);
    commit_copies();
    const u32 next = input_of(index, row + STAGE_ROWS + lane, last, groups, group, m, divide, first_input);
#pragma unroll
    for (int step = 0; step < STAGE_ROWS / 16; ++step) {
      u32 a[2][4], b[BLOCKS][2];
      const int a_row = 16 * step + lane % 8 + 8 * (lane / 16), piece = 4 * warp + lane / 8 % 2;
      load_transposed(a[0], stage * STAGE_BYTES + ring_place(a_row, piece));
      load_transposed(a[1], stage * STAGE_BYTES + ring_place(a_row, piece + 2));
      const u32 gathered = __shfl_sync(0xffffffffu, input, 16 * step + lane % 16);
#if BLOCKS == 1
      load_transposed(b[0], x_at + x_place(gathered, 0));
#else
#pragma unroll
      for (int two = 0; two < BLOCKS; two += 2) {
        u32 both[4];
        load_transposed(both, x_at + x_place(gathered, two + lane / 16));
        b[two][0] = both[0], b[two][1] = both[1], b[two + 1][0] = both[2], b[two + 1][1] = both[3];
      }
#endif
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) multiply(sums[half][block], a[half], b[block][0], b[block][1]);
      }
    }
    input = next;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int output = own_output + 16 * half + 8 * (part / 2) + lane / 4, token = 8 * block + 2 * (lane % 4) + part % 2;
        if (output >= rows || token >= n) continue;
        if (gridDim.y == 1) {
          y[(u64)token * rows + output] = rounded(sums[half][block][part]);
        } else {
          partial[((u64)blockIdx.y * n + token) * rows + output] = sums[half][block][part];
        }
      }
    }
  }
}

// y = the sum of the shares, rounded once.
extern "C" __global__ void add_shares(const float* __restrict__ partial, u16* __restrict__ y, int count, int shares) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (int share = 0; share < shares; ++share) sum += partial[(u64)share * count + i];
  y[i] = rounded(sum);
}
