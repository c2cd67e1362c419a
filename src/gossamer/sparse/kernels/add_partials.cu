// The second kernel of products whose rows were cut: row sums[3 i] of out = the sum of sums[3 i + 2] rows of `partial` from
// row sums[3 i + 1] on, in this order, rounded once.
extern "C" __global__ void add_partials(const Sum* __restrict__ partial, Stored* __restrict__ out,
                                        const int* __restrict__ sums, int n) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= n) return;
  const int row = sums[3 * blockIdx.x], first = sums[3 * blockIdx.x + 1], count = sums[3 * blockIdx.x + 2];
  Sum sum = 0;
#pragma unroll 4
  for (int i = first; i < first + count; ++i) sum += partial[(u64)i * n + column];
  out[(u64)row * n + column] = rounded(sum);
}
