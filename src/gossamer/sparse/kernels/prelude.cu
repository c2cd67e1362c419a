// What the sparse kernels have in common: types, and rows of a dense operand read in slices of 16 bytes a lane.
//
// A slice of a lane is 16 / ALIGN pieces, each as wide as the operand's rows are aligned. Pieces of neighbouring lanes
// are neighbours in memory, so that LANES lanes together read LANES * 16 consecutive bytes of a row, however it is aligned:
//
//   ALIGN 16, LANES 8:  | lane 0 | lane 1 | ... | lane 7 |          ALIGN 4:  0 1 2 ... 7 0 1 2 ... 7 0 1 2 ... 7 0 1 2 ... 7
//
// Macros: TYPE (0 float32, 1 float16, 2 bfloat16, 3 float64), ALIGN (bytes: 16, 8, 4 or 2), LANES (4 to 32).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ALL = 0xffffffffu;

#if TYPE == 3
typedef double Sum;
typedef double Stored;
#elif TYPE == 0
typedef float Sum;
typedef float Stored;
#else
typedef float Sum;
typedef u16 Stored;
#endif

constexpr int ELEMENTS = 16 / sizeof(Stored);     // of a slice
constexpr int PIECES = 16 / ALIGN;                // of a slice
constexpr int PER_PIECE = ALIGN / sizeof(Stored);
constexpr int TILE = LANES * ELEMENTS;            // columns that LANES lanes read at once

struct Slice {
  u32 word[4];
};

// The column, within a tile, of element e of a lane's slice.
int column_of(int lane, int e) { return (e / PER_PIECE * LANES + lane) * PER_PIECE + e % PER_PIECE; }

float widened(u16 bits) {
#if TYPE == 1
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}
float widened(float value) { return value; }
double widened(double value) { return value; }

void unpack(const Slice& slice, Sum (&to)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if TYPE == 0
    to[i] = __uint_as_float(slice.word[i]);
#elif TYPE == 3
    if (i % 2 == 0) to[i / 2] = __hiloint2double(slice.word[i + 1], slice.word[i]);
#elif TYPE == 2
    to[2 * i] = __uint_as_float(slice.word[i] << 16);
    to[2 * i + 1] = __uint_as_float(slice.word[i] & 0xffff0000u);
#else
    to[2 * i] = widened((u16)(slice.word[i] & 0xffffu));
    to[2 * i + 1] = widened((u16)(slice.word[i] >> 16));
#endif
  }
}

#if TYPE == 1 || TYPE == 2
u32 rounded_pair(float low, float high) {
  u32 both;
#if TYPE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}
Stored rounded(float value) { return (u16)rounded_pair(value, 0); }
#else
Stored rounded(Sum value) { return value; }
#endif

Slice packed(const Sum (&from)[ELEMENTS]) {
  Slice slice;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if TYPE == 0
    slice.word[i] = __float_as_uint(from[i]);
#elif TYPE == 3
    slice.word[i] = i % 2 ? __double2hiint(from[i / 2]) : __double2loint(from[i / 2]);
#else
    slice.word[i] = rounded_pair(from[2 * i], from[2 * i + 1]);
#endif
  }
  return slice;
}

// Where the pieces of a lane's slice lie, in bytes: the first from the start of the tile, the others from the first. Pieces
// beyond the row's end are read from the tile's start instead: what they add up to is never stored.
struct Offsets {
  int first, at[PIECES];
  Offsets() {}
  Offsets(int lane, int columns_left) {
    first = inside(lane, columns_left);
    at[0] = 0;
#pragma unroll
    for (int p = 1; p < PIECES; ++p) at[p] = inside(p * LANES + lane, columns_left) - first;
  }
  static int inside(int piece, int columns_left) { return piece * PER_PIECE < columns_left ? piece * ALIGN : 0; }
};

// Row `index` of an operand, one instruction: left to itself the compiler takes four.
const char* row_at(const char* operand, int index, u32 row_bytes) {
  u64 address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(index), "r"(row_bytes), "l"(operand));
  return (const char*)address;
}

// A slice of the row whose first piece is at `row`.
Slice load_slice(const char* row, const Offsets& offsets) {
  Slice s;
#if ALIGN == 16
  asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(s.word[0]), "=r"(s.word[1]), "=r"(s.word[2]), "=r"(s.word[3]) : "l"(row));
#elif ALIGN == 8
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    asm("ld.global.nc.v2.b32 {%0, %1}, [%2];"
        : "=r"(s.word[2 * p]), "=r"(s.word[2 * p + 1]) : "l"(row + offsets.at[p]));
  }
#elif ALIGN == 4
#pragma unroll
  for (int p = 0; p < 4; ++p) asm("ld.global.nc.b32 %0, [%1];" : "=r"(s.word[p]) : "l"(row + offsets.at[p]));
#else
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    u16 low, high;
    asm("ld.global.nc.b16 %0, [%1];" : "=h"(low) : "l"(row + offsets.at[2 * p]));
    asm("ld.global.nc.b16 %0, [%1];" : "=h"(high) : "l"(row + offsets.at[2 * p + 1]));
    s.word[p] = low | (u32)high << 16;
  }
#endif
  return s;
}

// Store what lies in the row; the results are not read again here, so that caches had better keep other things.
void store_slice(char* row, int lane, int columns_left, const Slice& s) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const int column = (p * LANES + lane) * PER_PIECE;
    if (column >= columns_left) continue;
    char* at = row + column * sizeof(Stored);
#if ALIGN == 16
    asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "r"(s.word[0]), "r"(s.word[1]), "r"(s.word[2]), "r"(s.word[3]) : "memory");
#elif ALIGN == 8
    asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(s.word[2 * p]), "r"(s.word[2 * p + 1]) : "memory");
#elif ALIGN == 4
    asm volatile("st.global.cs.b32 [%0], %1;" ::"l"(at), "r"(s.word[p]) : "memory");
#else
    asm volatile("st.global.cs.b16 [%0], %1;" ::"l"(at), "h"((u16)(s.word[p / 2] >> 16 * (p % 2))) : "memory");
#endif
  }
}

// A word of an array that is read once: it should not push rows of the dense operand out of L1.
int load_index(const int* at) {
  int value;
  asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
