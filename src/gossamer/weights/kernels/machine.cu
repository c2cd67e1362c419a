// The machine's instructions that C++ has no word for, and names for them: what the kernels after it are written in.
//
// `shared` is all the shared memory of a block; places in it are offsets in bytes. Macro BFLOAT16 says what 16-bit numbers are.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(128) u8 shared[];

struct __align__(16) Quad {
  u32 at[4];
};

struct __align__(16) Floats {
  float at[4];
};

template <class Word>
Word load(u32 offset) {
  return *(const Word*)(shared + offset);
}

template <class Word>
void store(u32 offset, Word word) {
  *(Word*)(shared + offset) = word;
}

// What the copy engine, barriers and matrix loads call a place in `shared`.
u32 shared_address(u32 offset) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(shared));
  return (u32)address + offset;
}

// Bytes of {low, high} picked by the four low nibbles of `selector`. (The intrinsic masks the nibbles first.)
u32 permute(u32 low, u32 high, u32 selector) {
  u32 word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(selector));
  return word;
}

// 16 or 4 bytes from memory to shared memory, in the background; zeros instead unless `valid`.
void copy_16(u32 offset, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(offset)), "l"(source), "r"(valid ? 16 : 0)
               : "memory");
}

void copy_4(u32 offset, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(offset)), "l"(source) : "memory");
}

void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last PENDING groups of this thread's copies are there.
template <int PENDING>
void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#if __CUDA_ARCH__ >= 900
// The copy engine's side: a barrier counts the bytes that arrive.
void init_barrier(u32 offset) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(offset)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

void fetch_bytes(u32 offset, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(offset)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

void await_bytes(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}
#endif

// Four 8x8 matrices of 16-bit numbers, transposed: lane l gives the place of row l % 8 of matrix l / 8, and gets from each
// the entries of column l / 4 in rows 2 (l % 4) and 2 (l % 4) + 1.
void load_transposed(u32 (&matrix)[4], u32 offset) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(shared_address(offset))
               : "memory");
}

// The same for two; the places of lanes from 16 on are not looked at.
void load_transposed(u32 (&matrix)[2], u32 offset) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrix[0]), "=r"(matrix[1])
               : "r"(shared_address(offset))
               : "memory");
}

#if BFLOAT16
#define MMA_TYPES "bf16.bf16"
#else
#define MMA_TYPES "f16.f16"
#endif

// sum += a b for fragments of mma.m16n8k16.
void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
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

