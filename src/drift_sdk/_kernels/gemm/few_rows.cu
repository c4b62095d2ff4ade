// Products of a few rows: out[s, m, n] = sum over the columns k of slice s of x[m, k] * weight[n, k], in bfloat16
// with fp32 sums. gemm.py describes them. Follows types.cu and dependent_launch.cu.
//
// A warp has one tile of the weight, 16 rows of one slice. It copies them to shared memory as early as there is
// room. The tiles of a warpgroup are the A operand of wgmma, and x is the B operand.
//
// Order of summation: the columns of a slice in ascending order, 16 at a time, in one chain of wgmma.

constexpr int TILE = 16;                      // rows of a tile of the weight
constexpr int CHUNK = 64;                     // columns of a chunk: 128 bytes of a row
constexpr int CHUNK_BYTES = TILE * CHUNK * 2;  // of a tile
constexpr int MAX_ROWS = 8;                    // of x: the columns of the B operand
constexpr int STEP_CHUNKS = 2;                 // chunks between two barriers
constexpr int LOADS = 8;                       // pieces of a row of x that a lane loads at once

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A hint that weights be the first to leave the L2 cache: a step reads them once.
__device__ __forceinline__ u64 evict_first() {
  u64 hint;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(hint));
  return hint;
}

__device__ __forceinline__ void copy16(void* to, const void* from, u64 hint) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "l"(hint)
               : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the newest groups of copies of this thread are under way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits for all threads of a warpgroup. Barrier 0 is that of all threads.
__device__ __forceinline__ void wait_for_warpgroup(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma.
__device__ __forceinline__ void fence_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// d += a * b: 64 rows of a, of which each warp of a warpgroup has 16 in d, and 8 columns of b: see `descriptor`.
// Asynchronous: d may not be touched before `wait_for_wgmma`.
__device__ __forceinline__ void wgmma(float (&d)[4], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b));
}

__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wait_for_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps registers that wgmma writes from being read earlier than here.
__device__ __forceinline__ void keep(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}

// Rows of a chunk in shared memory, as wgmma takes them: 128 bytes of each, 64 columns, whose pieces of 16 bytes are
// swizzled; groups of 8 rows follow one another. `rows` lies at a multiple of 1,024 bytes.
__device__ __forceinline__ u64 descriptor(const void* rows) {
  return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | ((shared_address(rows) & 0x3FFFF) >> 4);
}

// The place of a piece of 16 bytes in a chunk, for a row of the weight or of x.
__device__ __forceinline__ int place_of(int row, int piece) { return row * (CHUNK * 2) + (piece ^ row % 8) * 16; }

// What a product takes. x: [M, K], weight: [N, K], bfloat16; out: [slices, M, N] fp32. N is a multiple of TILE, K and
// slice_size are multiples of CHUNK; slice_size: columns of all slices but the last. M: up to MAX_ROWS.
struct Arguments {
  const u16 *x, *weight;
  float* out;
  int M, N, K, slice_size;
};

// Grid: (CTAs of a slice, slices). Shared memory: x [chunks][MAX_ROWS][128 bytes], then the ring of each warpgroup:
// STAGES steps of its tiles, and room for three tiles, since wgmma also reads the tiles of warps that have none.
template <int STAGES> __device__ __forceinline__ void multiply_few(const Arguments& a) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int X_BYTES = MAX_ROWS * CHUNK * 2;  // of a chunk
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp / 4, g = lane >> 2, t = lane & 3;
  const int num_tiles = a.N / TILE, tile = warp * gridDim.x + blockIdx.x;  // neighbouring CTAs have neighbouring tiles
  const bool has_tile = tile < num_tiles;
  const int most_tiles = (num_tiles + gridDim.x - 1) / gridDim.x;  // of a CTA
  const int chunk_bytes = min(most_tiles - group * 4, 4) * CHUNK_BYTES;
  const int first_column = blockIdx.y * a.slice_size;
  const int num_chunks = (min(a.K, first_column + a.slice_size) - first_column) / CHUNK;
  u8* const ring = shared + a.slice_size / CHUNK * X_BYTES + group * (STAGES * STEP_CHUNKS * 4 * CHUNK_BYTES);

  // A lane copies one piece of four rows of a chunk.
  const u16* from = a.weight + static_cast<u64>(tile * TILE + lane / 8) * a.K + first_column + lane % 8 * 8;
  u8* const to = ring + warp % 4 * CHUNK_BYTES;
  const u64 hint = evict_first();
  int copied = 0, copied_stage = 0;  // steps
  auto copy_next = [&]() {
#pragma unroll
    for (int c = 0; c < STEP_CHUNKS; c++) {
      u8* const place = to + (copied_stage * STEP_CHUNKS + c) * chunk_bytes;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (has_tile && copied * STEP_CHUNKS + c < num_chunks)
          copy16(place + place_of(i * 4 + lane / 8, lane % 8), from + c * CHUNK + static_cast<u64>(i) * 4 * a.K, hint);
    }
    from += STEP_CHUNKS * CHUNK, copied++;
    if (++copied_stage == STAGES) copied_stage = 0;
    end_copies();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) copy_next();

  wait_for_producers();
  // Rows beyond the last one are left as they are: they change no other row.
  const int num_pieces = num_chunks * 8;
  for (int row = warp; row < a.M; row += blockDim.x / 32)
    for (int first = 0; first < num_pieces; first += 32 * LOADS) {
      const uint4* x = reinterpret_cast<const uint4*>(a.x + static_cast<u64>(row) * a.K + first_column);
      uint4 words[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; i++) words[i] = x[min(first + i * 32 + lane, num_pieces - 1)];
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int piece = first + i * 32 + lane;
        u8* const place = shared + piece / 8 * X_BYTES + place_of(row, piece % 8);
        if (piece < num_pieces) *reinterpret_cast<uint4*>(place) = words[i];
      }
    }
  fence_writes();
  __syncthreads();
  start_dependents();

  float sum[4] = {};
  u64 rows = descriptor(shared);
  int stage = 0;
  auto begin_step = [&](int step) {
    wait_for_copies<STAGES - 3>();
    fence_writes();
    wait_for_warpgroup(group);  // its other warps have copied the step, and read the last but one before it
    if (step >= 2) copy_next();
    keep(sum);
    fence_wgmma();
  };
  auto multiply_chunk = [&](int c) {
    const u64 weights = descriptor(ring + (stage * STEP_CHUNKS + c) * chunk_bytes);
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) wgmma(sum, weights + k * 2, rows + k * 2);  // 16 columns: 32 bytes
    rows += X_BYTES / 16;
  };
  const int num_whole_steps = num_chunks / STEP_CHUNKS;
#pragma unroll 1
  for (int step = 0; step < num_whole_steps; step++) {
    begin_step(step);
#pragma unroll
    for (int c = 0; c < STEP_CHUNKS; c++) multiply_chunk(c);
    end_wgmma();
    wait_for_wgmma<1>();
    if (++stage == STAGES) stage = 0;
  }
  if (num_chunks % STEP_CHUNKS != 0) {
    begin_step(num_whole_steps);
    multiply_chunk(0);
    end_wgmma();
  }
  wait_for_wgmma<0>();
  keep(sum);
  if (!has_tile) return;
  float* const out = a.out + static_cast<u64>(blockIdx.y) * a.M * a.N + tile * TILE + g;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int row = t * 2 + (e & 1);
    if (row < a.M) out[static_cast<u64>(row) * a.N + (e >> 1) * 8] = sum[e];
  }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    few_rows_product(const u16* x, const u16* weight, float* out, int M, int N, int K, int slice_size) {
  MULTIPLY({x, weight, out, M, N, K, slice_size});
}
