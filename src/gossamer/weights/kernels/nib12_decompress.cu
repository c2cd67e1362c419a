// Decompression of the two 12-bit layouts of bfloat16 weights, bound by memory: every thread reads and writes wide words.

// Eight neighbouring entries from 8 bytes of sign << 7 | mantissa and 8 bytes whose low nibbles are codes: 0 for exponent 0, else
// the exponent less `base`.
Quad eight_of(const u32 (&kept)[2], const u32 (&codes)[2], u32 base) {
  Quad out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 code = codes[half] & 0x0f0f0f0fu;
    const u32 exponent = code + (((code + 0x0f0f0f0fu) >> 4) & 0x01010101u) * base;
    const u32 low = (kept[half] & 0x7f7f7f7fu) | ((exponent << 7) & 0x80808080u);
    const u32 high = (kept[half] & 0x80808080u) | ((exponent >> 1) & 0x7f7f7f7fu);
    out.at[2 * half] = permute(low, high, 0x5140u);
    out.at[2 * half + 1] = permute(low, high, 0x7362u);
  }
  return out;
}

void put_eight(u16* out, Quad entries, int column, int columns) {
  if (columns % 8 == 0) {
    if (column < columns) *(Quad*)(out + column) = entries;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < columns) out[column + i] = (u16)(entries.at[i / 2] >> (16 * (i % 2)));
  }
}

// The layout `nib12` (weights/_nib12_layout.py). A thread: entries 8 i .. and 32 + 8 i .. of a block of 64.
extern "C" __global__ void nib12_decompress(const u8* __restrict__ plane, const u8* __restrict__ codes, u16* __restrict__ out,
                                            u64 pieces, int blocks, int columns, u32 base) {
  const u64 piece = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  if (piece >= pieces) return;
  const u64 block = piece / 4, row = block / blocks;
  const int part = piece % 4, column = 64 * (int)(block % blocks) + 8 * part;
  const uint2 code = *(const uint2*)(codes + 32 * block + 8 * part);
  const uint2 first = *(const uint2*)(plane + 64 * block + 8 * part), second = *(const uint2*)(plane + 64 * block + 8 * part + 32);
  u16* target = out + row * columns;
  put_eight(target, eight_of({first.x, first.y}, {code.x, code.y}, base), column, columns);
  put_eight(target, eight_of({second.x, second.y}, {code.x >> 4, code.y >> 4}, base), column + 32, columns);
}

// The layout of FragmentLosslessWeight (kernels/nib12_tile.cu). A warp: one record of 16 x 128; a lane, for each quarter of 32
// columns, the 8 columns from 8 (l % 4) on in rows l / 4 and l / 4 + 8; then the entries that stand at the record's end.
extern "C" __global__ void fragment_decompress(const u8* __restrict__ records, const u32* __restrict__ offsets,
                                               u16* __restrict__ out, int count, int tiles, int rows, int columns, u32 base) {
  const int record = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (record >= count) return;
  const u8* begin = records + 16ull * offsets[record];
  const u8* place = begin + 16 * lane;
  const int first_row = 16 * (record / tiles), first_column = 128 * (record % tiles), row = first_row + lane / 4;
  Quad bytes[4], codes[2];
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) bytes[quarter] = *(const Quad*)(place + 512 * quarter);
#pragma unroll
  for (int half = 0; half < 2; ++half) codes[half] = *(const Quad*)(place + 2048 + 512 * half);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    Quad upper, lower;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const u32 code = codes[quarter / 2].at[2 * (quarter % 2) + pair / 2] >> (8 * (pair % 2));
      const u32 above = permute(bytes[quarter].at[pair], base, 0x4140u), below = permute(bytes[quarter].at[pair], base, 0x4342u);
      upper.at[pair] = (code & 0x000f000fu) * 128 + __funnelshift_r(above, above, 1);
      lower.at[pair] = (code & 0x00f000f0u) * 8 + __funnelshift_r(below, below, 1);
    }
    const int column = first_column + 32 * quarter + 8 * (lane % 4);
    if (row < rows) put_eight(out + (u64)row * columns, upper, column, columns);
    if (row + 8 < rows) put_eight(out + (u64)(row + 8) * columns, lower, column, columns);
  }
  __syncwarp();  // escapes go over what other lanes have written
  const u32 escapes = 4 * (offsets[record + 1] - offsets[record]) - 768;
  for (u32 i = lane; i < escapes; i += 32) {
    const u32 escape = ((const u32*)(begin + 3072))[i], entry = escape & 0xffff;
    const u64 target = (u64)(first_row + entry / 128) * columns + first_column + entry % 128;
    if (entry < 2048) out[target] = (u16)(escape >> 16);
  }
}

// The entries that are listed row by row, over what stands in their places.
extern "C" __global__ void put_escapes(const u32* __restrict__ starts, const int* __restrict__ columns_of,
                                       const u16* __restrict__ values, u16* __restrict__ out, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  for (u32 escape = starts[row]; escape < starts[row + 1]; ++escape) out[(u64)row * columns + columns_of[escape]] = values[escape];
}
