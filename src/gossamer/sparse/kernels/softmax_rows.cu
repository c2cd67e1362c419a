// Softmax over the entries of every row, and its gradient: a warp a row, three and two walks over the row, which L1 serves.

Sum warp_sum(Sum value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL, value, distance);
  return value;
}

Sum warp_max(Sum value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const Sum other = __shfl_xor_sync(ALL, value, distance);
    value = other > value || other != other ? other : value;  // NaN stays
  }
  return value;
}

Sum exponential(Sum value) {
#if TYPE == 3
  return exp(value);
#else
  return __expf(value);
#endif
}

// out = exp(scores - their row's largest) / the row's sum of that.
extern "C" __global__ void softmax_rows(const int* __restrict__ indptr, const Stored* __restrict__ scores,
                                        Stored* __restrict__ out, int rows) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int begin = indptr[row], end = indptr[row + 1];
  if (begin == end) return;
  Sum largest = widened(scores[begin]);
  for (int i = begin + lane; i < end; i += 32) {
    const Sum score = widened(scores[i]);
    largest = score > largest || score != score ? score : largest;
  }
  largest = warp_max(largest);
  Sum sum = 0;
  for (int i = begin + lane; i < end; i += 32) sum += exponential(widened(scores[i]) - largest);
  sum = warp_sum(sum);
  for (int i = begin + lane; i < end; i += 32) out[i] = rounded(exponential(widened(scores[i]) - largest) / sum);
}

// out = shares * (gradient - the row's sum of shares * gradient).
extern "C" __global__ void softmax_gradient(const int* __restrict__ indptr, const Stored* __restrict__ shares,
                                            const Stored* __restrict__ gradient, Stored* __restrict__ out, int rows) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int begin = indptr[row], end = indptr[row + 1];
  Sum sum = 0;
  for (int i = begin + lane; i < end; i += 32) sum += widened(shares[i]) * widened(gradient[i]);
  sum = warp_sum(sum);
  for (int i = begin + lane; i < end; i += 32) out[i] = rounded(widened(shares[i]) * (widened(gradient[i]) - sum));
}
