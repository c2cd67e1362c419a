// Decoder of bit-exact bfloat16 weights at 12 bits: a record is 2048 bytes of mantissas and signs, then 1024 bytes of
// exponent codes, then the entries whose exponents have no code, four to 16 bytes: (value << 16 | 128 row + column), filled
// up with places outside the record.
//
// A lane's 32 pairs of neighbouring entries stand in the order s, row g before row g + 8. Eight pairs are 16 bytes of
// mantissas, at 512 * quarter + 16 * lane; a byte is mantissa << 1 | the sign of the pair's OTHER entry. Sixteen pairs are 16
// bytes of codes, at 2048 + 512 * (quarter / 2) + 16 * lane; a word holds four pairs, first entries in its low half.
//
// The bytes of a pair are spread to halves with the exponents' base between them; one rotation by a bit then puts
// mantissas, base and (because they were exchanged) signs where bfloat16 has them, and a multiply-add shifts the codes
// into the exponents. That is 4.25 instructions for two entries.

struct Share {
  u32 lane;
};

Share share_of(u32 lane) { return Share{lane}; }

u32 decode_pair(u32 bytes, u32 selector, u32 base, u32 codes, u32 to_exponent) {
  const u32 spread = permute(bytes, base, selector);
  return codes * to_exponent + __funnelshift_r(spread, spread, 1);
}

float as_float(u32 bfloat16_bits) { return __uint_as_float(bfloat16_bits << 16); }

// Entries without a code were multiplied as 2 ** (base - 127); add what they differ by. They are few.
void add_escapes(float (&sums)[BLOCKS][4], u32 escapes, u32 end, u32 x_tile, u32 lane, u32 base) {
  for (; escapes < end; escapes += 4) {
    const u32 escape = load<u32>(escapes), row = escape >> 7 & 0x1ff, column = escape & 127;
    if ((row & ~8u) != lane >> 2) continue;
    const float difference = as_float(escape >> 16) - as_float(base << 7);
    // The piece of x that holds token 2 t and column, as `fetch_activations` lays it down.
    const u32 piece = x_tile + column / 32 * BLOCKS * 512 + 16 * (8 * (lane & 3) + column / 8 % 4) + 2 * (column % 8);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float product = difference * as_float(load<u16>(piece + 512 * block + 64 * part));
        if (row < 8) {
          sums[block][part] += product;
        } else {
          sums[block][2 + part] += product;
        }
      }
    }
  }
}

// Decode one record of each strip, at `slot` in shared memory, and multiply it by a tile of x.
void multiply_tile(float (&sums)[STRIPS][BLOCKS][4], u32 slot, u32 slot_bytes, const u32 (&units)[STRIPS], u32 x_tile,
                   const Share& own, u32 base) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    Quad b[BLOCKS];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) b[block] = load<Quad>(x_tile + (quarter * BLOCKS + block) * 512);
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      const u32 record = slot + strip * slot_bytes + 16 * own.lane;
      const Quad bytes = load<Quad>(record + 512 * quarter);
      const Pair codes = load<Pair>(record + 2048 + 512 * (quarter / 2) + 8 * (quarter % 2));
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u32 low = codes.at[k], high = low >> 8;
        const u32 a[4] = {
            decode_pair(bytes.at[2 * k], 0x4140u, base, low & 0x000f000fu, 128),
            decode_pair(bytes.at[2 * k], 0x4342u, base, low & 0x00f000f0u, 8),
            decode_pair(bytes.at[2 * k + 1], 0x4140u, base, high & 0x000f000fu, 128),
            decode_pair(bytes.at[2 * k + 1], 0x4342u, base, high & 0x00f000f0u, 8),
        };
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          multiply(sums[strip][block], a, b[block].at[2 * k], b[block].at[2 * k + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
    const u32 record = slot + strip * slot_bytes;
    add_escapes(sums[strip], record + 3072, record + 16 * units[strip], x_tile - 16 * own.lane, own.lane, base);
  }
}
