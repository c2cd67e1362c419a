// Tensor-core products of a 16 x K left and a K x 8 right fragment with float32 sums (PTX ISA, "Matrix Fragments for mma").
// Lane l holds, with g = l / 4 and t = l % 4, of the sums: c0, c1 = row g, columns 2 t, 2 t + 1; c2, c3 = row g + 8.

#if TYPE == 0
u32 tf32(u32 bits) {
  u32 rounded_bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded_bits) : "f"(__uint_as_float(bits)));
  return rounded_bits;
}
#endif

// m16n8k8 for half types, m16n8k4 for tf32: the narrow shapes, which take one right register.
void multiply_narrow(float (&sum)[4], u32 a0, u32 a1, u32 b0) {
#if TYPE == 0
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#elif TYPE == 1
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(b0));
}

// m16n8k16 for half types, m16n8k8 for tf32.
void multiply_wide(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if TYPE == 0
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#elif TYPE == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
