// Products with quantised weights: out[m, n] = sum over k of x[m, k] * weight[n, k], in bfloat16 with fp32 sums.
//
// The weights are the A operand of wgmma.m64nNk16 and are converted in registers, exactly. packing.py has
// arranged them so that the 16 bytes that a thread loads are its own fragments: a chunk of 512 bytes holds 16
// rows and 32 columns (e4m3) or 64 (4 bits), 16 bytes for each lane. x is the B operand, in shared memory.
//
// One warp copies weights and x to shared memory, several steps ahead; barriers in shared memory connect it to
// the warpgroups that multiply, which do not wait for each other. A warpgroup converts a chunk while tensor cores
// multiply by the one before.
//
// Order of summation: tensor cores sum the columns of a group, from zero; with a scale a row, those of a step of
// STEP columns from the beginning of the slice. These sums, times the scale of their group, are added in ascending
// order, from zero, in fp32. Tiles, stages, clusters and rows do not change it.

enum Epilogue { SUMS, SILU, GELU_TANH };

// Bytes of a tile's step in shared memory: its codes, the scales of its groups, and the zero points.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS> constexpr int tile_bytes =
    2 * unit_bytes<CODES> + GROUPS * TILE * scale_bytes<SCALES> + (HAS_ZEROS ? GROUPS * TILE * 2 : 0);

// A step of a slice: its first column, and how many units of it exist (0 beyond the slice).
struct StepPlace {
  int column, num_units;
};

__device__ __forceinline__ StepPlace step_place(int slice, int step, int slice_size, int K) {
  const int column = slice * slice_size + step * STEP;
  const int end = min(K, (slice + 1) * slice_size);
  return {column, max(0, min(STEP, end - column)) / UNIT};
}

__device__ __forceinline__ u16 to_bfloat16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float from_bfloat16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

__device__ __forceinline__ float rounded(float value) { return from_bfloat16(to_bfloat16(value)); }

// activation(gate) * up; gate, up, the activation and the product are each rounded to bfloat16.
template <int EPILOGUE> __device__ __forceinline__ u16 gated(float gate, float up) {
  const float wide = rounded(gate);
  float argument = wide;
  if (EPILOGUE == GELU_TANH) {
    const float bounded = fminf(fmaxf(wide, -10.f), 10.f);
    const float cubic = __fmul_rn(__fmul_rn(bounded, bounded), __fmul_rn(bounded, 0.044715f));
    argument = __fmul_rn(__fadd_rn(bounded, cubic), 1.5957691216057308f);
  }
  const float activated = __fdiv_rn(wide, __fadd_rn(1.f, __expf(-argument)));
  return to_bfloat16(__fmul_rn(rounded(activated), rounded(up)));
}

// What the kernel takes.
//   codes, scales, zeros: as packing.py arranges them; scales and zeros of groups, or null.
//   channel_scale: [N] of weights with a scale a row, in the order of packed rows; or null.
//   bias: of a gated product, [N], the gate before up; or null.
//   out: [num_slices, M, N] fp32; of a gated product [M, N / 2] bfloat16.
//   N: rows of the weight that exist. K: columns. slice_size: of all slices but the last.
// A tile of a gated weight has 8 rows of the gate, and then the same rows of up.
struct Arguments {
  const u8 *codes, *scales, *zeros;
  const float* channel_scale;
  const u16* bias;
  void* out;
  int M, N, K, num_slices, slice_size;
};

// Returns the value of packed row `row` of the weight with its channel scale and bias.
template <int SCALES> __device__ __forceinline__ float finished(const Arguments& a, float sum, int row) {
  if (SCALES == CHANNEL) sum = __fmul_rn(sum, a.channel_scale[row]);
  if (a.bias != nullptr) {
    const int column = row / TILE * 8 + row % 8 + row % TILE / 8 * (a.N / 2);
    sum = __fadd_rn(sum, from_bfloat16(a.bias[column]));
  }
  return sum;
}

// The sums of a warp's tile: 16 rows of the weight, 8 * NT rows of x.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int NT> struct TileSums {
  static constexpr int SCALES_AT = 2 * unit_bytes<CODES>, ZEROS_AT = SCALES_AT + GROUPS * TILE * scale_bytes<SCALES>;

  float total[NT][4];  // of all groups before
  float sum[NT][4];    // of a group; tensor cores add to it
  u32 a[2][2][4];      // fragments of two chunks of 32 columns, in turn
  float2 scale;        // of the group whose sum is `sum`

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] = sum[n][e] = 0.f;
    scale = make_float2(0.f, 0.f);
  }

  // Waits for the products of a group, and adds its sum.
  __device__ __forceinline__ void add_group() {
    wait_for_wgmma<0>();
#pragma unroll
    for (int n = 0; n < NT; n++) keep(sum[n]);
#pragma unroll
    for (int c = 0; c < 2; c++) keep(a[c][0]), keep(a[c][1]);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        total[n][e] = SCALES == CHANNEL ? __fadd_rn(total[n][e], sum[n][e])
                                        : __fmaf_rn(e < 2 ? scale.x : scale.y, sum[n][e], total[n][e]);
  }

  // Starts the products of a step of NUM_CHUNKS times 32 columns. tile: the step's weights in shared memory. x:
  // its rows, 64 columns each in two parts. The last group of the step before is added; `release` is called
  // once its products have ended. All warps of a warpgroup call it.
  template <int NUM_CHUNKS, class Release>
  __device__ __forceinline__ void start_step(const u8* tile, const u8* x, bool is_first_step, Release release) {
    constexpr int CHUNKS = GROUPS == 1 ? NUM_CHUNKS : 4 / GROUPS;  // of a group
    constexpr int PIECES = CODES == E4M3 ? NUM_CHUNKS : NUM_CHUNKS / 2;
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const u64 first_rows = descriptor(x);
    const uint4* const pieces = reinterpret_cast<const uint4*>(tile) + lane;
    uint4 words = pieces[0], next;
#pragma unroll
    for (int i = 0; i < NUM_CHUNKS; i++) {
      u32 zero0 = 0xC308C308u, zero1 = 0xC308C308u;  // -(128 + 8)
      if (HAS_ZEROS) {
        const u32 pair = reinterpret_cast<const u32*>(tile + ZEROS_AT)[i / CHUNKS * 8 + g];
        zero0 = __byte_perm(pair, 0, 0x1010), zero1 = __byte_perm(pair, 0, 0x3232);
      }
      const int piece = CODES == E4M3 ? i : i / 2;
      if (piece + 1 < PIECES) next = pieces[(piece + 1) * (CHUNK_BYTES / 16)];
      u32(&now)[2][4] = a[i % 2];
      wait_for_wgmma<1>();
      keep(now[0]), keep(now[1]);
      fragments<CODES>(now, words, i % 2, zero0, zero1);
      keep(now[0]), keep(now[1]);
      if (CODES == E4M3 || i % 2 == 1) words = next;
      if (i % CHUNKS == 0) {
        if (i > 0 || !is_first_step) add_group();
        if (i == 0 && !is_first_step) release();
        if (SCALES != CHANNEL)
          scale = scales_of_rows<SCALES>(tile + SCALES_AT + i / CHUNKS * TILE * scale_bytes<SCALES>, g);
      }
      fence_wgmma();
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int part = i * 2 + j;  // 16 columns, which are 32 bytes of a row
        wgmma<NT>(sum, now[j], first_rows + (part / 4 * NT * 1024 + part % 4 * 32) / 16, i % CHUNKS > 0 || j > 0);
      }
      commit_wgmma();
    }
  }
};

// Where a CTA's stages lie in shared memory: x, in two parts of 64 columns, then the weights of its tiles; after
// all stages the barriers.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int WM, int NT, int STAGES> struct Stages {
  static constexpr int ROWS = NT * 8, TILES = WM * 4;
  static constexpr int BYTES = tile_bytes<CODES, SCALES, HAS_ZEROS, GROUPS>, X_BYTES = ROWS * STEP * 2;
  static constexpr int STAGE_BYTES = (X_BYTES + TILES * BYTES + 1023) / 1024 * 1024;

  u8* shared;

  __device__ __forceinline__ u8* x(int stage) const { return shared + stage * STAGE_BYTES; }
  __device__ __forceinline__ u8* tile(int stage, int tile) const { return x(stage) + X_BYTES + tile * BYTES; }
  // The barrier of a stage whose bytes have come, and of one that has been read.
  __device__ __forceinline__ u64* full(int stage) const {
    return reinterpret_cast<u64*>(shared + STAGES * STAGE_BYTES) + stage;
  }
  __device__ __forceinline__ u64* empty(int stage) const { return full(STAGES + stage); }
};

// Copies all steps of a slice, by one warp. Weights of the first stages are copied before producers have ended.
// The CTAs of a cluster have different weights and the same x, of which each copies a share for all.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int WM, int NT, int STAGES, int CLUSTER>
__device__ __forceinline__ void copy_steps(const Arguments& a, const TensorMap* x_map,
                                           Stages<CODES, SCALES, HAS_ZEROS, GROUPS, WM, NT, STAGES> stages,
                                           int num_steps) {
  constexpr int TILES = WM * 4, ROWS = NT * 8, COLUMNS = STEP / GROUPS, SHARE = ROWS / CLUSTER;
  constexpr int CODE_BYTES = unit_bytes<CODES>, SCALE_BYTES = TILE * scale_bytes<SCALES>;
  const int lane = threadIdx.x & 31, num_tiles = (a.N + TILE - 1) / TILE, slice = blockIdx.z;
  const u64 tile = min(blockIdx.y * TILES + lane, num_tiles - 1), units = a.K / UNIT, groups = a.K / COLUMNS;
  const int box_rows = min(SHARE, a.M);  // rows beyond are left as they are: they change no other row
  const int first_share = CLUSTER > 1 ? rank_in_cluster() * SHARE : 0, first_row = blockIdx.x * ROWS + first_share;
  auto copy_weights = [&](int step) {
    const StepPlace place = step_place(slice, step, a.slice_size, a.K);
    const int stage = step % STAGES, num_groups = SCALES == CHANNEL ? 0 : place.num_units * UNIT / COLUMNS;
    const int code_bytes = place.num_units * CODE_BYTES, scale_bytes_ = num_groups * SCALE_BYTES;
    const int zero_bytes = HAS_ZEROS ? num_groups * TILE * 2 : 0, x_bytes = place.num_units * CLUSTER * box_rows * UNIT * 2;
    u64* const barrier = stages.full(stage);
    if (lane == 0) arrive_expecting(barrier, TILES * (code_bytes + scale_bytes_ + zero_bytes) + x_bytes);
    __syncwarp();
    if (lane >= TILES) return;
    u8* const to = stages.tile(stage, lane);
    const u64 group = tile * groups + place.column / COLUMNS;
    copy_bytes(to, a.codes + (tile * units + place.column / UNIT) * CODE_BYTES, code_bytes, barrier);
    if (SCALES != CHANNEL) copy_bytes(to + 2 * CODE_BYTES, a.scales + group * SCALE_BYTES, scale_bytes_, barrier);
    if (HAS_ZEROS)
      copy_bytes(to + 2 * CODE_BYTES + GROUPS * SCALE_BYTES, a.zeros + group * TILE * 2, zero_bytes, barrier);
  };
  auto copy_x = [&](int step) {
    const StepPlace place = step_place(slice, step, a.slice_size, a.K);
    if (lane >= place.num_units) return;
    u8* const to = stages.x(step % STAGES) + (lane * ROWS + first_share) * UNIT * 2;
    copy_rows<CLUSTER>(to, x_map, place.column + lane * UNIT, first_row, stages.full(step % STAGES));
  };
  const int num_first = min(STAGES, num_steps);
  for (int step = 0; step < num_first; step++) copy_weights(step);
  if (CLUSTER > 1) sync_cluster();  // all barriers exist
  wait_for_producers();
  for (int step = 0; step < num_first; step++) copy_x(step);
  for (int step = num_first; step < num_steps; step++) {
    wait_for_phase<CLUSTER>(stages.empty(step % STAGES), (step / STAGES - 1) & 1);
    copy_weights(step);
    copy_x(step);
  }
}

// Writes the sums of a warp's tile.
template <int SCALES, int EPILOGUE, int NT>
__device__ __forceinline__ void store_sums(const Arguments& a, const float (&total)[NT][4], int tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, column = tile * TILE + g;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = (blockIdx.x * NT + n) * 8 + t * 2 + e;
      if (row >= a.M) continue;
      if (EPILOGUE == SUMS) {
        float* out = static_cast<float*>(a.out) + (static_cast<u64>(blockIdx.z) * a.M + row) * a.N;
        if (column < a.N) out[column] = finished<SCALES>(a, total[n][e], column);
        if (column + 8 < a.N) out[column + 8] = finished<SCALES>(a, total[n][e + 2], column + 8);
      } else if (column < a.N) {
        u16* out = static_cast<u16*>(a.out) + static_cast<u64>(row) * (a.N / 2);
        out[tile * 8 + g] = gated<EPILOGUE>(finished<SCALES>(a, total[n][e], column),
                                            finished<SCALES>(a, total[n][e + 2], column + 8));
      }
    }
}

// WM * 64 rows of the weight times 8 * NT rows of x, of one slice, by WM warpgroups and a warp that copies, up to
// STAGES steps ahead.
// Grid: (groups of 8 * NT rows, groups of WM * 64 rows of the weight, slices), in clusters along the weight.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int EPILOGUE, int WM, int NT, int STAGES, int CLUSTER>
__device__ __forceinline__ void multiply(const Arguments& a, const TensorMap* x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int TILES = WM * 4;
  const Stages<CODES, SCALES, HAS_ZEROS, GROUPS, WM, NT, STAGES> stages{shared};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slice_columns = min(a.K, static_cast<int>(blockIdx.z + 1) * a.slice_size) - blockIdx.z * a.slice_size;
  const int num_whole = slice_columns / STEP, num_steps = (slice_columns + STEP - 1) / STEP;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(stages.full(i), 1);
      init_barrier(stages.empty(i), TILES * CLUSTER);
    }
    fence_barriers();
  }
  __syncthreads();

  if (warp == TILES) {
    copy_steps<CODES, SCALES, HAS_ZEROS, GROUPS, WM, NT, STAGES, CLUSTER>(a, x_map, stages, num_steps);
    start_dependents();
    __syncwarp();
    if (CLUSTER > 1) sync_cluster();
    return;
  }

  if (CLUSTER > 1) sync_cluster();
  wait_for_producers();  // they may read `out`
  TileSums<CODES, SCALES, HAS_ZEROS, GROUPS, NT> sums;
  sums.clear();
  int stage = 0, parity = 0, before = 0;
  auto release = [&] {
    if (CLUSTER == 1 ? lane == 0 : lane < CLUSTER) arrive<CLUSTER>(stages.empty(before), lane);
  };
  for (int step = 0; step < num_whole; step++) {
    wait_for_phase<1>(stages.full(stage), parity);
    sums.template start_step<4>(stages.tile(stage, warp), stages.x(stage), step == 0, release);
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  if (num_whole < num_steps) {
    wait_for_phase<1>(stages.full(stage), parity);
    sums.template start_step<2>(stages.tile(stage, warp), stages.x(stage), num_whole == 0, release);
  }
  start_dependents();
  if (CLUSTER > 1) sync_cluster();  // shared memory of a CTA stays until the others have ended
  sums.add_group();
  store_sums<SCALES, EPILOGUE, NT>(a, sums.total, blockIdx.y * TILES + warp);
}

// The kernel that a program is compiled for: MULTIPLY is the function above with its
// template arguments. x_map: of x [M, K], in boxes of 64 columns and the rows that a CTA copies, at most M.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u8* codes, const u8* scales, const u8* zeros, const float* channel_scale,
            const __grid_constant__ TensorMap x_map, const u16* bias, void* out, int M, int N, int K, int num_slices,
            int slice_size) {
  MULTIPLY(Arguments{codes, scales, zeros, channel_scale, bias, out, M, N, K, num_slices, slice_size}, &x_map);
}
