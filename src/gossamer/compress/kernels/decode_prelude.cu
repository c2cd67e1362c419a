// What the kernels of a decode step are written in. Macro BFLOAT16 says what 16-bit numbers are.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(128) u8 shared[];

struct __align__(8) Pair {
  u32 at[2];
};

struct __align__(16) Quad {
  u32 at[4];
};

struct __align__(16) Floats {
  float at[4];
};

#if BFLOAT16
float number(u16 bits) { return __uint_as_float((u32)bits << 16); }
#else
float number(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#endif

u16 rounded(float value) {
  u16 bits;
#if !BFLOAT16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#elif __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  const u32 word = __float_as_uint(value);
  bits = value == value ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fff;
#endif
  return bits;
}

// Every kernel of a step may be launched early. It waits here until the one before has ended, and lets the next one begin:
// a product that follows fetches its first weights meanwhile.
void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
