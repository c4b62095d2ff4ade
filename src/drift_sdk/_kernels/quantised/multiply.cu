// Products with quantised weights: out[m, n] = sum over k of x[m, k] * weight[n, k], in bfloat16 with fp32 sums.
//
// The weights are the A operand of mma.sync.m16n8k16 and are converted in registers, exactly. packing.py has
// arranged them so that the 16 bytes that a thread loads are its own fragments: a chunk of 512 bytes holds 16
// rows and 32 columns (e4m3) or 64 (4 bits), 16 bytes for each lane. Of every 32 columns, lane (g, t) has columns
// 8 t ... 8 t + 7 of rows g and g + 8, and reads the same columns of x, which are in natural order.
//
// Order of summation, the same in both kernels: a slice is cut into steps of STEP columns. Tensor cores sum the
// columns of a group, from zero. Group sums, times their scales, are added in ascending order to the sum of the
// step; sums of steps are added in ascending order, from zero, in fp32. Tiles, warps, stages and rows do not
// change it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Codes { E4M3, INT4 };
enum Scales { CHANNEL, GROUP_FLOAT32, GROUP_BFLOAT16, GROUP_FLOAT16 };
enum Epilogue { SUMS, SILU, GELU_TANH };

constexpr int STEP = 128;         // columns of a step
constexpr int UNIT = 64;          // columns that every slice is a multiple of
constexpr int TILE = 16;          // rows of a tile of the weight
constexpr int CHUNK_BYTES = 512;  // 16 bytes for each lane

template <int CODES> constexpr int unit_bytes = CODES == E4M3 ? 1024 : 512;
template <int SCALES> constexpr int scale_bytes = SCALES == CHANNEL ? 0 : SCALES == GROUP_FLOAT32 ? 4 : 2;

// Bytes of a tile's step in shared memory: its codes, the scales of its groups, and the zero points.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS> constexpr int tile_bytes =
    2 * unit_bytes<CODES> + GROUPS * TILE * scale_bytes<SCALES> + (HAS_ZEROS ? GROUPS * TILE * 2 : 0);

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes.
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool is_copied) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_copied ? 16 : 0) : "memory");
}

template <int BYTES> __device__ __forceinline__ void copy_few(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES)
               : "memory");
}

__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the newest copy groups of this thread are under way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wait_for_producers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void mma(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 fma_bfloat16x2(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Two e4m3 numbers in the upper bytes of 16 bits each: exponent and mantissa are moved to their places in
// bfloat16, which is the number times 2^-120. The product with 2^120 is exact, also for subnormal numbers.
// `shifted`: the word, shifted right by 4.
__device__ __forceinline__ u32 from_e4m3(u32 word, u32 shifted) {
  return fma_bfloat16x2((word & 0x80008000u) | (shifted & 0x07F007F0u), 0x7B807B80u, 0x80008000u);
}

// Codes in the low four bits of 16 bits each, minus their zero point: 0x4300 | q is 128 + q in bfloat16.
__device__ __forceinline__ u32 from_int4(u32 word, u32 minus_128_minus_zero) {
  return fma_bfloat16x2((word & 0x000F000Fu) | 0x43004300u, 0x3F803F80u, minus_128_minus_zero);
}

// The fragments of 16 rows and 32 columns: two of 16 columns each.
template <int CODES>
__device__ __forceinline__ void fragments(u32 (&a)[2][4], const uint4& words, int half, u32 zero0, u32 zero1) {
  if (CODES == E4M3) {
    const u32 rows0[2] = {words.x, words.y}, rows8[2] = {words.z, words.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      a[j][0] = from_e4m3(rows0[j] << 8, rows0[j] << 4);
      a[j][1] = from_e4m3(rows8[j] << 8, rows8[j] << 4);
      a[j][2] = from_e4m3(rows0[j], rows0[j] >> 4);
      a[j][3] = from_e4m3(rows8[j], rows8[j] >> 4);
    }
  } else {
    const u32 rows0 = half ? words.y : words.x, rows8 = half ? words.w : words.z;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      a[j][0] = from_int4(rows0 >> (8 * j), zero0);
      a[j][1] = from_int4(rows8 >> (8 * j), zero1);
      a[j][2] = from_int4(rows0 >> (8 * j + 4), zero0);
      a[j][3] = from_int4(rows8 >> (8 * j + 4), zero1);
    }
  }
}

// The scales of rows g and g + 8, from a tile's scales of one group in shared memory.
template <int SCALES> __device__ __forceinline__ float2 scales_of_rows(const u8* scales, int g) {
  if (SCALES == GROUP_FLOAT32) return reinterpret_cast<const float2*>(scales)[g];
  const u32 pair = reinterpret_cast<const u32*>(scales)[g];
  if (SCALES == GROUP_BFLOAT16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  float2 result;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(result.x), "=f"(result.y) : "r"(pair));
  return result;
}

// The sum of a step of MT tiles: `sum` is set. tiles: the step's weights in shared memory, `tile_bytes` each.
// num_units: 2, or 1 at the end of a slice. x(i, n): 8 elements of columns 32 i + 8 t ... of row 8 n + g.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int MT, int NT, class X>
__device__ __forceinline__ void sum_step(float (&sum)[MT][NT][4], const u8* tiles, int num_units, X x) {
  constexpr int BYTES = tile_bytes<CODES, SCALES, HAS_ZEROS, GROUPS>;
  constexpr int PARTS = 4 / GROUPS;  // 32 columns each, of a group
  const int lane = threadIdx.x & 31, g = lane >> 2;
  float group_sum[MT][NT][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i >= 2 && num_units < 2) break;
    if (i % PARTS == 0) {
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) group_sum[m][n][e] = 0.f;
    }
    u32 a[MT][2][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const u8* tile = tiles + m * BYTES;
      const int chunk = CODES == E4M3 ? i : i / 2;
      const uint4 words = reinterpret_cast<const uint4*>(tile + chunk * CHUNK_BYTES)[lane];
      u32 zero0 = 0xC308C308u, zero1 = 0xC308C308u;  // -(128 + 8)
      if (HAS_ZEROS) {
        const u8* zeros = tile + 2 * unit_bytes<CODES> + GROUPS * TILE * scale_bytes<SCALES>;
        const u32 pair = reinterpret_cast<const u32*>(zeros)[i / PARTS * 8 + g];
        zero0 = __byte_perm(pair, 0, 0x1010), zero1 = __byte_perm(pair, 0, 0x3232);
      }
      fragments<CODES>(a[m], words, i % 2, zero0, zero1);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint4 b = x(i, n);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma(group_sum[m][n], a[m][0], b.x, b.y);
        mma(group_sum[m][n], a[m][1], b.z, b.w);
      }
    }
    if (SCALES != CHANNEL && i % PARTS == PARTS - 1) {
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const u8* scales = tiles + m * BYTES + 2 * unit_bytes<CODES> + i / PARTS * TILE * scale_bytes<SCALES>;
        const float2 scale = scales_of_rows<SCALES>(scales, g);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float s = e < 2 ? scale.x : scale.y;
            sum[m][n][e] = i < PARTS ? __fmul_rn(s, group_sum[m][n][e])
                                     : __fmaf_rn(s, group_sum[m][n][e], sum[m][n][e]);
          }
      }
    }
  }
  if (SCALES == CHANNEL) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[m][n][e] = group_sum[m][n][e];
  }
}

// A step of a slice: its first column, and how many units of it exist (0 beyond the slice).
struct StepPlace {
  int column, num_units;
};

__device__ __forceinline__ StepPlace step_place(int slice, int step, int slice_size, int K) {
  const int column = slice * slice_size + step * STEP;
  const int end = min(K, (slice + 1) * slice_size);
  return {column, max(0, min(STEP, end - column)) / UNIT};
}

// Starts copying one tile's step to shared memory, by the 32 lanes of a warp.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS>
__device__ __forceinline__ void copy_tile(u8* to, const u8* codes, const u8* scales, const u8* zeros, int tile,
                                          StepPlace place, int K) {
  constexpr int BYTES = unit_bytes<CODES>, COLUMNS = STEP / GROUPS;
  const int lane = threadIdx.x & 31;
  const u8* from = codes + (static_cast<u64>(tile) * (K / UNIT) + place.column / UNIT) * BYTES + lane * 16;
#pragma unroll
  for (int i = 0; i < 2 * BYTES / CHUNK_BYTES; i++)
    if (i * CHUNK_BYTES < place.num_units * BYTES) copy16(to + i * CHUNK_BYTES + lane * 16, from + i * CHUNK_BYTES);
  if (SCALES != CHANNEL && lane < GROUPS * 8 && lane / 8 * COLUMNS < place.num_units * UNIT) {
    constexpr int PAIR = SCALES == CHANNEL ? 4 : 2 * scale_bytes<SCALES>;  // the scales of rows g and g + 8
    const u64 pair = (static_cast<u64>(tile) * (K / COLUMNS) + place.column / COLUMNS) * 8 + lane;
    copy_few<PAIR>(to + 2 * BYTES + lane * PAIR, scales + pair * PAIR);
    if (HAS_ZEROS) copy_few<4>(to + 2 * BYTES + GROUPS * 8 * PAIR + lane * 4, zeros + pair * 4);
  }
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

// What both kernels take.
//   codes, scales, zeros: as packing.py arranges them; scales and zeros of groups, or null.
//   channel_scale: [N] of weights with a scale a row, in the order of packed rows; or null.
//   x: [M, K] bfloat16. bias: of a gated product, [N], the gate before up; or null.
//   out: [num_slices, M, N] fp32; of a gated product [M, N / 2] bfloat16.
//   N: rows of the weight that exist. K: columns. slice_size: of all slices but the last.
// A tile of a gated weight has 8 rows of the gate, and then the same rows of up.
struct Arguments {
  const u8 *codes, *scales, *zeros;
  const float* channel_scale;
  const u16 *x, *bias;
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

// Up to 8 * NT rows of x: the warps of a CTA take the steps of a slice by turns and leave their sums in shared
// memory, where they are added in ascending order. A CTA goes through work items, tiles of MT * 16 rows of one
// slice each; each thread copies the weights that it will read, STAGES - 1 steps ahead.
// Grid: (up to the number of items, groups of 8 * NT rows).
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int EPILOGUE, int WARPS, int MT, int NT, int STAGES>
__device__ __forceinline__ void split_steps(const Arguments& a) {
  extern __shared__ __align__(16) u8 shared[];
  constexpr int BYTES = tile_bytes<CODES, SCALES, HAS_ZEROS, GROUPS>, ROWS = MT * TILE;
  constexpr int PART_STRIDE = ROWS + 4;  // floats of a row of x in the sum of a step; no bank conflicts
  constexpr int OUTPUTS = (ROWS * NT * 8 + WARPS * 32 - 1) / (WARPS * 32);  // of a thread
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.y * NT * 8, num_rows = min(a.M - first_row, NT * 8);
  const int num_tiles = (a.N + TILE - 1) / TILE, num_groups = (num_tiles + MT - 1) / MT;
  const int num_items = num_groups * a.num_slices;
  const int num_rounds = ((a.slice_size + STEP - 1) / STEP + WARPS - 1) / WARPS;
  u8* const ring = shared + warp * STAGES * MT * BYTES;
  float* const parts = reinterpret_cast<float*>(shared + WARPS * STAGES * MT * BYTES);
  const int step_floats = num_rows * PART_STRIDE;

  auto copy = [&](int stage, int item, int round) {
    if (item < num_items) {
      const StepPlace place = step_place(item / num_groups, round * WARPS + warp, a.slice_size, a.K);
      if (place.num_units > 0) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const int tile = min(item % num_groups * MT + m, num_tiles - 1);
          copy_tile<CODES, SCALES, HAS_ZEROS, GROUPS>(ring + (stage * MT + m) * BYTES, a.codes, a.scales, a.zeros,
                                                      tile, place, a.K);
        }
      }
    }
    end_copy_group();
  };
  uint4 next_x[4][NT];
  auto read_x = [&](int item, int round) {
    if (item >= num_items) return;
    const StepPlace place = step_place(item / num_groups, round * WARPS + warp, a.slice_size, a.K);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const bool is_read = n * 8 + g < num_rows && i / 2 < place.num_units;
        const u16* from = a.x + static_cast<u64>(first_row + n * 8 + g) * a.K + place.column + i * 32 + t * 8;
        next_x[i][n] = is_read ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      }
  };

  int ahead_item = blockIdx.x, ahead_round = 0;
  auto copy_ahead = [&](int stage) {
    copy(stage, ahead_item, ahead_round);
    if (++ahead_round == num_rounds) ahead_round = 0, ahead_item += gridDim.x;
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) copy_ahead(stage);
  wait_for_producers();
  read_x(blockIdx.x, 0);

  int stage = 0;
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    const int slice = item / num_groups;
    for (int round = 0; round < num_rounds; round++) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      copy_ahead(stage == 0 ? STAGES - 1 : stage - 1);
      uint4 x[4][NT];
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) x[i][n] = next_x[i][n];
      const bool is_last = round + 1 == num_rounds;
      read_x(is_last ? item + gridDim.x : item, is_last ? 0 : round + 1);
      const int step = round * WARPS + warp;
      const StepPlace place = step_place(slice, step, a.slice_size, a.K);
      if (place.num_units > 0) {
        float sum[MT][NT][4];
        sum_step<CODES, SCALES, HAS_ZEROS, GROUPS, MT, NT>(
            sum, ring + stage * MT * BYTES, place.num_units, [&](int i, int n) { return x[i][n]; });
        float* const part = parts + step * step_floats;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int row = n * 8 + t * 2 + (e & 1);
              if (row < num_rows) part[row * PART_STRIDE + m * TILE + g + (e >> 1) * 8] = sum[m][n][e];
            }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    if (item + gridDim.x >= num_items) start_dependents();
    __syncthreads();
    const int slice_columns = min(a.K, (slice + 1) * a.slice_size) - slice * a.slice_size;
    const int num_steps = (slice_columns + STEP - 1) / STEP;
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
      const int entry = threadIdx.x + i * WARPS * 32, place = entry % ROWS, row = entry / ROWS;
      float total = 0.f;
      if (row < num_rows) {
        const float* part = parts + row * PART_STRIDE + place;
#pragma unroll 8
        for (int step = 0; step < num_steps; step++) total = __fadd_rn(total, part[step * step_floats]);
      }
      const int column = item % num_groups * ROWS + place;
      const bool is_output = row < num_rows && column < a.N;
      if (is_output) total = finished<SCALES>(a, total, column);
      if (EPILOGUE == SUMS) {
        float* out = static_cast<float*>(a.out) + (static_cast<u64>(slice) * a.M + first_row + row) * a.N;
        if (is_output) out[column] = total;
      } else {
        const float up = __shfl_down_sync(~0u, total, 8);
        u16* out = static_cast<u16*>(a.out) + static_cast<u64>(first_row + row) * (a.N / 2);
        if (is_output && place % TILE < 8) out[column / TILE * 8 + place % 8] = gated<EPILOGUE>(total, up);
      }
    }
    __syncthreads();
  }
}

// Many rows of x: a warp has MT tiles of the weight and NT * 8 rows, and goes through all steps of a slice. The
// CTA's x and weights are copied to shared memory, STAGES - 1 steps ahead. WM warps along the weight, WN along
// the rows. Grid: (groups of WN * NT * 8 rows, groups of WM * MT tiles, slices).
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int EPILOGUE, int WM, int WN, int MT, int NT,
          int STAGES>
__device__ __forceinline__ void share_rows(const Arguments& a) {
  extern __shared__ __align__(16) u8 shared[];
  constexpr int BYTES = tile_bytes<CODES, SCALES, HAS_ZEROS, GROUPS>, ROWS = WN * NT * 8;
  constexpr int X_BYTES = ROWS * STEP * 2, STAGE_BYTES = X_BYTES + WM * MT * BYTES, WARPS = WM * WN;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int warp_m = warp % WM, warp_n = warp / WM;
  const int first_row = blockIdx.x * ROWS, first_tile = blockIdx.y * WM * MT, slice = blockIdx.z;
  const int num_tiles = (a.N + TILE - 1) / TILE;
  const int slice_columns = min(a.K, (slice + 1) * a.slice_size) - slice * a.slice_size;
  const int num_steps = (slice_columns + STEP - 1) / STEP;

  auto copy_weights = [&](int step) {
    if (step >= num_steps) return;
    u8* const to = shared + step % STAGES * STAGE_BYTES + X_BYTES;
    const StepPlace place = step_place(slice, step, a.slice_size, a.K);
#pragma unroll
    for (int i = 0; i < (WM * MT + WARPS - 1) / WARPS; i++) {
      const int tile = warp + i * WARPS;
      if (tile < WM * MT)
        copy_tile<CODES, SCALES, HAS_ZEROS, GROUPS>(to + tile * BYTES, a.codes, a.scales, a.zeros,
                                                    min(first_tile + tile, num_tiles - 1), place, a.K);
    }
  };
  // 16 bytes of row r, number c, lie at c ^ 4 (r % 2): eight lanes that read together have different banks.
  auto copy_x = [&](int step) {
    if (step >= num_steps) return;
    u8* const to = shared + step % STAGES * STAGE_BYTES;
    const StepPlace place = step_place(slice, step, a.slice_size, a.K);
#pragma unroll
    for (int i = 0; i < (ROWS * 16 + WARPS * 32 - 1) / (WARPS * 32); i++) {
      const int entry = threadIdx.x + i * WARPS * 32, row = entry / 16, c = entry % 16;
      if (entry >= ROWS * 16) break;
      const bool is_copied = first_row + row < a.M && c / 8 < place.num_units;
      const u16* from = a.x + (is_copied ? static_cast<u64>(first_row + row) * a.K + place.column + c * 8 : 0);
      copy16_or_zero(to + row * (STEP * 2) + (c ^ (row % 2 * 4)) * 16, from, is_copied);
    }
  };

  float total[MT][NT][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[m][n][e] = 0.f;

#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) copy_weights(step);
  wait_for_producers();
#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) {
    copy_x(step);
    end_copy_group();
  }
  for (int step = 0; step < num_steps; step++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    copy_weights(step + STAGES - 1);
    copy_x(step + STAGES - 1);
    end_copy_group();
    const u8* const stage = shared + step % STAGES * STAGE_BYTES;
    const u8* const rows = stage + (warp_n * NT * 8 + g) * (STEP * 2);
    float sum[MT][NT][4];
    sum_step<CODES, SCALES, HAS_ZEROS, GROUPS, MT, NT>(
        sum, stage + X_BYTES + warp_m * MT * BYTES, step_place(slice, step, a.slice_size, a.K).num_units,
        [&](int i, int n) {
          return *reinterpret_cast<const uint4*>(rows + n * 8 * (STEP * 2) + ((i * 4 + t) ^ (g % 2 * 4)) * 16);
        });
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) total[m][n][e] = __fadd_rn(total[m][n][e], sum[m][n][e]);
  }
  start_dependents();
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int column = (first_tile + warp_m * MT + m) * TILE + g;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = first_row + (warp_n * NT + n) * 8 + t * 2 + e;
        if (row >= a.M) continue;
        if (EPILOGUE == SUMS) {
          float* out = static_cast<float*>(a.out) + (static_cast<u64>(slice) * a.M + row) * a.N;
          if (column < a.N) out[column] = finished<SCALES>(a, total[m][n][e], column);
          if (column + 8 < a.N) out[column + 8] = finished<SCALES>(a, total[m][n][e + 2], column + 8);
        } else if (column < a.N) {
          u16* out = static_cast<u16*>(a.out) + static_cast<u64>(row) * (a.N / 2);
          out[column / TILE * 8 + g] = gated<EPILOGUE>(finished<SCALES>(a, total[m][n][e], column),
                                                       finished<SCALES>(a, total[m][n][e + 2], column + 8));
        }
      }
  }
}

// The kernel that a program is compiled for: PRODUCT is one of the functions above, with its template arguments.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u8* codes, const u8* scales, const u8* zeros, const float* channel_scale, const u16* x,
            const u16* bias, void* out, int M, int N, int K, int num_slices, int slice_size) {
  PRODUCT(Arguments{codes, scales, zeros, channel_scale, x, bias, out, M, N, K, num_slices, slice_size});
}
