// What every product with weights in fragment order has in common, before its decoder (sm_90).
//
// Weights are cut into records of 16 rows x 128 columns; a decoder turns one into fragments of mma.m16n8k16. Lane l, with
// g = l / 4 and t = l % 4 as in the fragment layouts, owns, in step s = 4 * quarter + 2 * k + h of sixteen,
//
//     register a[2h]      row g,      columns 32 quarter + 8 t + 4 k + 2 h + {0, 1}
//     register a[2h + 1]  row g + 8,  the same columns
//
// that is, four runs of 8 consecutive columns a record: columns may be permuted freely as long as x is read in the same
// order, and so a lane reads x in runs of 16 bytes.
//
// Macros: BLOCKS (8 columns of y each), STRIPS (of 16 rows a warp), STAGES (records in flight, 2 or 3), BFLOAT16.

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

// A kernel that was launched early waits here until the one before has ended and its results can be read.
void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every block has said so, the next kernel may begin if it is launched early. Said after `await_kernel_before` by a
// kernel that follows a stranger: then whatever wrote the weights that the next one fetches has ended.
void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

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

