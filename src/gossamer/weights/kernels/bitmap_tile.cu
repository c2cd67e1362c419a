// Decoder of bitmap weights: a record is 64 mask words, 64 16-bit starts, then the values.
//
// Mask word (s, group) serves the eight lanes l / 8 = group: with u = g % 2, bits 16 u + 2 t + {0, 1} are the lane's pair
// in row g, the bits 8 above its pair in row g + 8. Values stand in the order of the bits, words in the order s, group.
// Words, and the starts of their values in bytes from the record's, are stored in the order group, s, so that a lane
// reads its sixteen with wide loads.
//
// Decoding a pair takes one popcount, two 16-bit loads (both unconditional) and a byte permutation of what they bring;
// another one, for two pairs at once, looks up which bytes, or zeros, belong where.

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
void multiply_tile(float (&sums)[STRIPS][BLOCKS][4], u32 slot, u32 slot_bytes, const u32 (&)[STRIPS], u32 x_tile,
                   const Share& own, u32) {
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

