// Min-plus products on CUDA cores: C = min(C, A (+) B), dense and as a list of tiles.
//
// One block of 256 threads computes a tile of 128 x 128 of C, an 8 x 8 register square a thread, in steps of 8 of the depth:
//
//              B: 8 x 128 in shared memory           thread t: columns 4 (t % 16) + {0..3} and + 64
//            +--------------------------+                      rows    4 (t / 16) + {0..3} and + 64
//   A: 128 x 8 (stored by depth) | 8 x 8 squares, so that each read of shared memory is one float4 without conflicts
//
// Two buffers: the next step is on its way from global memory to registers while the current one is combined. Every
// entry may lie past an edge (rows of A, columns of B, depth): there, infinity is read and nothing is written.
// Macros: NUMBER (float or int), INFINITE (its infinity).

#define TILE 128
#define STEP 8
#define THREADS 256

#ifdef WHOLE
#define LESSER(a, b) min(a, b)
#define LOWER(place, value) atomicMin(place, value)
#else
#define LESSER(a, b) fminf(a, b)
// Floats that are not negative are ordered like their bits.
#define LOWER(place, value) atomicMin((int*)(place), __float_as_int(value))
#endif

struct Job {            // one tile of C; places are in numbers, from the start of the matrix
    long long a, b, c;  // A (rows, depth), B (depth, columns), C (rows, columns)
    int rows, columns, depth, shared;  // shared: other tiles of the list may lower the same numbers
};

__device__ __forceinline__ void multiply_tile(
    const NUMBER* __restrict__ a, long long lda, const NUMBER* __restrict__ b, long long ldb, NUMBER* c, long long ldc,
    int rows, int columns, int depth, int shared)
{
    __shared__ __align__(16) NUMBER as[2][STEP][TILE + 4];
    __shared__ __align__(16) NUMBER bs[2][STEP][TILE + 4];
    const int t = threadIdx.x;
    const int a_row = t / 2, a_step = (t % 2) * 4;      // four steps of one row
    const int b_step = t / 32, b_column = (t % 32) * 4; // four columns of one step
    const int x = (t % 16) * 4, y = (t / 16) * 4;
    NUMBER next_a[4], next_b[4], best[8][8];
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) best[i][j] = INFINITE;

    auto fetch = [&](int k) {
        for (int i = 0; i < 4; i++) {
            const bool in_a = a_row < rows && k + a_step + i < depth;
            next_a[i] = in_a ? a[a_row * lda + k + a_step + i] : (NUMBER)INFINITE;
            const bool in_b = k + b_step < depth && b_column + i < columns;
            next_b[i] = in_b ? b[(k + b_step) * ldb + b_column + i] : (NUMBER)INFINITE;
        }
    };
    auto put = [&](int buffer) {
        for (int i = 0; i < 4; i++) {
            as[buffer][a_step + i][a_row] = next_a[i];
            bs[buffer][b_step][b_column + i] = next_b[i];
        }
    };

    fetch(0);
    put(0);
    __syncthreads();
    int buffer = 0;
    for (int k = 0; k < depth; k += STEP) {
        if (k + STEP < depth) fetch(k + STEP);
#pragma unroll
        for (int step = 0; step < STEP; step++) {
            NUMBER va[8], vb[8];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    va[4 * half + i] = as[buffer][step][64 * half + y + i];
                    vb[4 * half + i] = bs[buffer][step][64 * half + x + i];
                }
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) best[i][j] = LESSER(best[i][j], va[i] + vb[j]);
        }
        if (k + STEP < depth) {
            put(buffer ^ 1);
            __syncthreads();
            buffer ^= 1;
        }
    }
    for (int i = 0; i < 8; i++) {
        const int row = 64 * (i / 4) + y + i % 4;
        for (int j = 0; j < 8; j++) {
            const int column = 64 * (j / 4) + x + j % 4;
            if (row < rows && column < columns) {
                NUMBER* place = c + row * ldc + column;
                if (!shared) *place = LESSER(*place, best[i][j]);
                else if (best[i][j] < *place) LOWER(place, best[i][j]);
            }
        }
    }
}

// The product of whole matrices: one block a tile. C may be A or B where the other is closed.
extern "C" __global__ void __launch_bounds__(THREADS) minplus_dense(
    const NUMBER* a, long long lda, const NUMBER* b, long long ldb, NUMBER* c, long long ldc, int m, int n, int k)
{
    const int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    multiply_tile(a + row * lda, lda, b + column, ldb, c + row * ldc + column, ldc, m - row, n - column, k, 0);
}

// A list of tiles of one matrix, longest first; blocks take the next tile until none is left. `next` starts at zero.
extern "C" __global__ void __launch_bounds__(THREADS) minplus_tiles(NUMBER* d, long long ld, const Job* jobs, int count, int* next)
{
    __shared__ int mine;
    for (;;) {
        __syncthreads();
        if (threadIdx.x == 0) mine = atomicAdd(next, 1);
        __syncthreads();
        if (mine >= count) return;
        const Job job = jobs[mine];
        multiply_tile(d + job.a, ld, d + job.b, ld, d + job.c, ld, job.rows, job.columns, job.depth, job.shared);
    }
}

// The closure of a square of at most 64 in shared memory, for each of a list of squares on the diagonal of d.
extern "C" __global__ void __launch_bounds__(THREADS) close_squares(NUMBER* d, long long ld, const int* starts, const int* sizes)
{
    __shared__ NUMBER s[64][65];
    const int size = sizes[blockIdx.x];
    NUMBER* corner = d + starts[blockIdx.x] * (ld + 1);
    for (int e = threadIdx.x; e < size * size; e += THREADS) s[e / size][e % size] = corner[(e / size) * ld + e % size];
    for (int k = 0; k < size; k++) {
        __syncthreads();
        for (int e = threadIdx.x; e < size * size; e += THREADS) {
            const int i = e / size, j = e % size;
            s[i][j] = LESSER(s[i][j], s[i][k] + s[k][j]);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < size * size; e += THREADS) corner[(e / size) * ld + e % size] = s[e / size][e % size];
}

// Sweeps of the LU engine: x is (n, width), one thread a source; a level's vertices do not depend on each other.
// up: edges into a vertex from earlier ones; down: edges from it to later ones. Both pull, so nothing is written twice.
extern "C" __global__ void sweep_level(
    NUMBER* x, int width, const int* vertices, int count, const long long* starts, const int* others, const NUMBER* weights)
{
    const int source = blockIdx.x * blockDim.x + threadIdx.x;
    if (source >= width) return;
    for (int place = blockIdx.y; place < count; place += gridDim.y) {
        const int vertex = vertices[place];
        NUMBER best = x[(long long)vertex * width + source];
        for (long long edge = starts[vertex]; edge < starts[vertex + 1]; edge++)
            best = LESSER(best, x[(long long)others[edge] * width + source] + weights[edge]);
        x[(long long)vertex * width + source] = best;
    }
}
