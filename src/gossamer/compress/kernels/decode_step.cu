// What a LLaMA-like model computes between its matrix products when it decodes: one row of activations per sequence.
//
//   add_norm   hidden += what the last product gave (or = the token's embedding); normed = RMSNorm(hidden)
//   attend     queries and the new key rotated, key and value put into the cache, attention over the cache
//   merge      the sums of the cache's shares, where it is split over several blocks
//   gate       silu(gate) * up
//
// Macros: THREADS a block; PER, runs of 4 entries that a thread of add_norm owns; HEAD, entries of a head; GROUP, query
// heads that share a key head; NORMS, whether queries and keys are normalised each by itself.

// Two 16-bit numbers of a word.
void widen(float* to, u32 word) {
  to[0] = number((u16)word);
  to[1] = number((u16)(word >> 16));
}

u32 narrow(float first, float second) { return rounded(first) | (u32)rounded(second) << 16; }

float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

float block_sum(float value) {
  float* sums = (float*)shared;
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  return total;
}

#ifdef PER
// hidden: float32 (rows, width). delta: (rows, width), or where `first`, the embedding's matrix, whose row tokens[row] is
// taken. weight: (width), out: (rows, width). Grid: rows. width is a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm(float* hidden, const u16* delta, const u64* tokens, const u16* weight, u16* out, int width, float epsilon,
             int first) {
  const int row = blockIdx.x;
  Pair scales[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = 4 * (i * THREADS + threadIdx.x);
    if (at < width) scales[i] = *(const Pair*)(weight + at);
  }
  await_kernel_before();
  const u16* from = delta + (first ? tokens[row] : (u64)row) * width;
  hidden += (u64)row * width;
  float x[PER][4], sum = 0;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = 4 * (i * THREADS + threadIdx.x);
    if (at >= width) continue;
    const Pair added = *(const Pair*)(from + at);
    widen(x[i], added.at[0]);
    widen(x[i] + 2, added.at[1]);
    Floats whole;
    if (!first) whole = *(const Floats*)(hidden + at);
    for (int k = 0; k < 4; ++k) {
      if (!first) x[i][k] += whole.at[k];
      whole.at[k] = x[i][k];
      sum += x[i][k] * x[i][k];
    }
    *(Floats*)(hidden + at) = whole;
  }
  const float scale = rsqrtf(block_sum(sum) / width + epsilon);
  out += (u64)row * width;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = 4 * (i * THREADS + threadIdx.x);
    if (at >= width) continue;
    float by[4];
    widen(by, scales[i].at[0]);
    widen(by + 2, scales[i].at[1]);
    Pair word;
    word.at[0] = narrow(x[i][0] * scale * by[0], x[i][1] * scale * by[1]);
    word.at[1] = narrow(x[i][2] * scale * by[2], x[i][3] * scale * by[3]);
    *(Pair*)(out + at) = word;
  }
}
#endif

#ifdef HEAD
#define WARPS (THREADS / 32)
#define LANES (HEAD / 8)         // that share a position, 8 entries each
#define PLACES (32 / LANES)      // positions that a warp reads at once
#define DEEP 4                   // times in flight
#define PARTS (WARPS * PLACES)   // sums that are added in the end

// One head, normalised and rotated by one warp: entries d and d + HEAD / 2 turn together.
void rotate(float* to, const u16* head, const u16* norm, float epsilon, const float* cos, const float* sin, float scale) {
  const int lane = threadIdx.x % 32;
  float by = scale;
#if NORMS
  float squares = 0;
  for (int d = lane; d < HEAD; d += 32) squares += number(head[d]) * number(head[d]);
  const float inverse = rsqrtf(warp_sum(squares) / HEAD + epsilon);
#endif
  for (int d = lane; d < HEAD / 2; d += 32) {
    float x = number(head[d]) * by, y = number(head[d + HEAD / 2]) * by;
#if NORMS
    x *= inverse * number(norm[d]);
    y *= inverse * number(norm[d + HEAD / 2]);
#endif
    to[d] = x * cos[d] - y * sin[d];
    to[d + HEAD / 2] = y * cos[d] + x * sin[d];
  }
}

// qkv: (rows, (GROUP + 2) * key heads * HEAD), all queries, then all keys, then all values. cos, sin: float32 (length,
// HEAD / 2). keys, values: (rows, key heads, length, HEAD). seen: (rows, GROUP * key heads * HEAD). partial: float32 (rows *
// query heads, splits, HEAD + 2), sums, their maximum and their total, where there are several splits. window: positions
// that a token sees. Grid: key heads, rows, splits of the positions.
extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const u16* qkv, const u16* query_norm, const u16* key_norm, const float* cos, const float* sin, u16* keys,
           u16* values, const u64* position, u16* seen, float* partial, int length, int window, float epsilon,
           float scale) {
  const int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, split = blockIdx.z, splits = gridDim.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* queries = (float*)shared;             // (GROUP, HEAD)
  float* key = queries + GROUP * HEAD;         // (HEAD)
  float* sums = key + HEAD;                    // (PARTS, GROUP, HEAD)
  float* most = sums + PARTS * GROUP * HEAD;   // (PARTS, GROUP)
  float* total = most + PARTS * GROUP;         // (PARTS, GROUP)
  await_kernel_before();

  const int now = (int)position[0], oldest = max(0, now + 1 - window);
  const int share = (now + 1 - oldest + splits - 1) / splits;
  const int begin = oldest + split * share, end = min(begin + share, now + 1);
  const bool owner = begin <= now && now < end;  // of the new position
  const u16* given = qkv + (u64)row * (GROUP + 2) * heads * HEAD;
  const u64 cached = ((u64)row * heads + head) * length * HEAD;
  cos += (u64)now * (HEAD / 2);
  sin += (u64)now * (HEAD / 2);
  for (int one = warp; one <= GROUP; one += WARPS) {
    if (one < GROUP) {
      rotate(queries + one * HEAD, given + (head * GROUP + one) * HEAD, query_norm, epsilon, cos, sin, scale);
    } else {
      rotate(key, given + (GROUP * heads + head) * HEAD, key_norm, epsilon, cos, sin, 1);
    }
  }
  __syncthreads();
  if (owner) {
    for (int d = threadIdx.x; d < HEAD; d += THREADS) {
      keys[cached + (u64)now * HEAD + d] = rounded(key[d]);
      values[cached + (u64)now * HEAD + d] = given[((GROUP + 1) * heads + head) * HEAD + d];
    }
    __syncthreads();
  }

  const int part = lane % LANES, place = lane / LANES;
  float q[GROUP][8], sum[GROUP][8] = {}, best[GROUP], weight[GROUP] = {};
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    best[g] = -1e30f;
#pragma unroll
    for (int d = 0; d < 8; ++d) q[g][d] = queries[g * HEAD + 8 * part + d];
  }
  for (int first = begin + warp * PLACES; first < end; first += PARTS * DEEP) {
    Quad k[DEEP], v[DEEP];
    float score[DEEP][GROUP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const u64 at = cached + (u64)min(first + i * PARTS + place, end - 1) * HEAD + 8 * part;
      k[i] = *(const Quad*)(keys + at);
      v[i] = *(const Quad*)(values + at);
    }
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      float entries[8];
      for (int word = 0; word < 4; ++word) widen(entries + 2 * word, k[i].at[word]);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        float dot = 0;
        for (int d = 0; d < 8; ++d) dot += q[g][d] * entries[d];
        for (int distance = LANES / 2; distance > 0; distance /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, distance);
        score[i][g] = first + i * PARTS + place < end ? dot : -1e30f;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float now_best = best[g];
      for (int i = 0; i < DEEP; ++i) now_best = fmaxf(now_best, score[i][g]);
      const float shrink = expf(best[g] - now_best);
      best[g] = now_best;
      weight[g] *= shrink;
      for (int d = 0; d < 8; ++d) sum[g][d] *= shrink;
    }
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      float entries[8];
      for (int word = 0; word < 4; ++word) widen(entries + 2 * word, v[i].at[word]);
      const bool there = first + i * PARTS + place < end;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        const float by = there ? expf(score[i][g] - best[g]) : 0;
        weight[g] += by;
        for (int d = 0; d < 8; ++d) sum[g][d] += by * entries[d];
      }
    }
  }
  const int own = warp * PLACES + place;
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
#pragma unroll
    for (int d = 0; d < 8; ++d) sums[(own * GROUP + g) * HEAD + 8 * part + d] = sum[g][d];
    if (part == 0) {
      most[own * GROUP + g] = best[g];
      total[own * GROUP + g] = weight[g];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * HEAD; i += THREADS) {
    const int g = i / HEAD, d = i % HEAD;
    float top = -1e30f, value = 0, whole = 0;
    for (int other = 0; other < PARTS; ++other) top = fmaxf(top, most[other * GROUP + g]);
    for (int other = 0; other < PARTS; ++other) {
      const float by = expf(most[other * GROUP + g] - top);
      value += by * sums[(other * GROUP + g) * HEAD + d];
      whole += by * total[other * GROUP + g];
    }
    const u64 query = (u64)row * GROUP * heads + head * GROUP + g;
    if (splits == 1) {
      seen[query * HEAD + d] = rounded(value / whole);
    } else {
      float* to = partial + (query * splits + split) * (HEAD + 2);
      to[d] = value;
      if (d == 0) {
        to[HEAD] = top;
        to[HEAD + 1] = whole;
      }
    }
  }
}

// seen from partial, as above. Grid: query heads of all rows.
extern "C" __global__ void merge(const float* partial, u16* seen, int splits) {
  await_kernel_before();
  const float* from = partial + (u64)blockIdx.x * splits * (HEAD + 2);
  float top = -1e30f, whole = 0;
  for (int i = 0; i < splits; ++i) top = fmaxf(top, from[i * (HEAD + 2) + HEAD]);
  for (int i = 0; i < splits; ++i) whole += expf(from[i * (HEAD + 2) + HEAD] - top) * from[i * (HEAD + 2) + HEAD + 1];
  for (int d = threadIdx.x; d < HEAD; d += blockDim.x) {
    float value = 0;
    for (int i = 0; i < splits; ++i) value += expf(from[i * (HEAD + 2) + HEAD] - top) * from[i * (HEAD + 2) + d];
    seen[(u64)blockIdx.x * HEAD + d] = rounded(value / whole);
  }
}
#endif

#ifdef GATE
// gate_up: (rows, 2 * width), gates first. out: (rows, width). Grid: runs of 4 * THREADS entries, rows.
extern "C" __global__ void gate(const u16* gate_up, u16* out, int width) {
  await_kernel_before();
  const int at = 4 * (blockIdx.x * THREADS + threadIdx.x);
  if (at >= width) return;
  const u16* from = gate_up + (u64)blockIdx.y * 2 * width + at;
  const Pair gates = *(const Pair*)from, ups = *(const Pair*)(from + width);
  Pair result;
  for (int word = 0; word < 2; ++word) {
    float g[2], u[2];
    widen(g, gates.at[word]);
    widen(u, ups.at[word]);
    result.at[word] = narrow(g[0] / (1 + expf(-g[0])) * u[0], g[1] / (1 + expf(-g[1])) * u[1]);
  }
  *(Pair*)(out + (u64)blockIdx.y * width + at) = result;
}
#endif
