// Decoder of binarised N:8 weights at four bits: a record is 16 bytes that say which of its 128 columns are salient, the
// values of its 16 rows, and 1024 bytes of codes.
//
// A weight takes one of eleven values of its row and block: zero, one of six, or, in a salient column, one of four. Codes
// are 0, 1 .. 6, and 4 .. 7 in salient columns, so that each looks up one byte among eight: low bytes and high bytes of
// {0, six values, 0}, or of {0, the first three of the six, four values}. Those of a row stand in 16 bytes (low bytes of
// {0 .. 3} and {4 .. 6, 0}, then high ones), at 16 + 16 * row, and in 8 (low and high bytes of the four), at 272 + 8 * row.
//
// A word of codes holds 8 consecutive columns of a row, the first lowest. Lane l, quarter q, rows g and g + 8: the words
// 2 (q % 2) and 2 (q % 2) + 1 of the 16 bytes at 400 + 512 * (q / 2) + 16 * l.
//
// Four weights cost eight byte permutations (four look-ups for each kind of column, of which a mask of the columns takes
// one, and two that put bytes together): 2.5 instructions a weight, where two look-ups in shared memory would be bound
// by its banks.

struct Share {
  u32 lane;
};

Share share_of(u32 lane) { return Share{lane}; }

// Values of one row, by bytes.
struct Values {
  Quad others;
  Pair salient;
};

Values values_of(u32 record, u32 row) {
  return Values{load<Quad>(record + 16 + 16 * row), load<Pair>(record + 272 + 8 * row)};
}

// 0xff in the bytes whose bit among the lowest four is set.
u32 spread(u32 four_bits) { return ((four_bits & 15u) * 0x00204081u & 0x01010101u) * 0xffu; }

// One byte of each of four weights.
u32 look_up(u32 first, u32 second, u32 salient, u32 codes, u32 mask) {
  return (permute(first, second, codes) & ~mask) | (permute(first, salient, codes) & mask);
}

// Decode one record of each strip, at `slot` in shared memory, and multiply it by a tile of x.
void multiply_tile(float (&sums)[STRIPS][BLOCKS][4], u32 slot, u32 slot_bytes, const u32 (&)[STRIPS], u32 x_tile,
                   const Share& own, u32) {
  Values values[STRIPS][2];
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
    values[strip][0] = values_of(slot + strip * slot_bytes, own.lane >> 2);
    values[strip][1] = values_of(slot + strip * slot_bytes, (own.lane >> 2) + 8);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Quad codes[STRIPS];
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      codes[strip] = load<Quad>(slot + strip * slot_bytes + 400 + 512 * half + 16 * own.lane);
    }
#pragma unroll
    for (int quarter = 2 * half; quarter < 2 * half + 2; ++quarter) {
      Quad b[BLOCKS];
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) b[block] = load<Quad>(x_tile + (quarter * BLOCKS + block) * 512);
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
        const u32 salient = load<u8>(slot + strip * slot_bytes + 4 * quarter + (own.lane & 3));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const u32 mask = spread(salient >> 4 * k);
          u32 a[4];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const Values& of_row = values[strip][row];
            const u32 four = codes[strip].at[2 * (quarter % 2) + row] >> 16 * k;
            const u32 low = look_up(of_row.others.at[0], of_row.others.at[1], of_row.salient.at[0], four, mask);
            const u32 high = look_up(of_row.others.at[2], of_row.others.at[3], of_row.salient.at[1], four, mask);
            a[row] = permute(low, high, 0x5140u);
            a[2 + row] = permute(low, high, 0x7362u);
          }
#pragma unroll
          for (int block = 0; block < BLOCKS; ++block) {
            multiply(sums[strip][block], a, b[block].at[2 * k], b[block].at[2 * k + 1]);
          }
        }
      }
    }
  }
}

