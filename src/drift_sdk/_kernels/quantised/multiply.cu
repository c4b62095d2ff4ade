// Products with quantised weights: out[m, n] = sum over k of x[m, k] * weight[n, k], in bfloat16 with fp32 sums.
//
// The weights are the A operand of wgmma.m64nNk16 and are converted in registers, exactly. packing.py has
// arranged them so that the 16 bytes that a thread loads are its own fragments: a chunk of 512 bytes holds 16
// rows and 32 columns (e4m3) or 64 (4 bits), 16 bytes for each lane. x is the B operand, in shared memory.
//
// Order of summation: a slice is cut into steps of STEP columns. Tensor cores sum the columns of a group, from
// zero. Group sums, times their scales, are added in ascending order to the sum of the step; sums of steps are
// added in ascending order, from zero, in fp32. Tiles, warps, stages and rows do not change it.

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

// d += a * b, or d = a * b, for 64 rows of a and 8 * NT columns of b: every warp of a warpgroup has 16 rows of a
// and d. Asynchronous: neither d nor a may be touched before `wait_for_wgmma`. b: see `descriptor`.
template <int NT> __device__ void wgmma(float (&d)[NT][4], const u32 (&a)[4], u64 b, int is_added);

#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
template <> __device__ __forceinline__ void wgmma<1>(float (&d)[1][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
      : FOUR(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
template <> __device__ __forceinline__ void wgmma<2>(float (&d)[2][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : FOUR(0), FOUR(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
template <> __device__ __forceinline__ void wgmma<4>(float (&d)[4][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
template <> __device__ __forceinline__ void wgmma<8>(float (&d)[8][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
#undef FOUR

__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_for_wgmma() {
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps registers that wgmma reads or writes from being computed later or reused earlier than here.
__device__ __forceinline__ void keep(u32 (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

__device__ __forceinline__ void keep(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}

// Makes this thread's writes to shared memory visible to wgmma, once they have been waited for.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The place of rows of x in shared memory, as wgmma takes it: rows of 128 bytes, 64 columns, whose pieces of 16
// bytes are swizzled; groups of 8 rows follow one another. `rows` lies at a multiple of 1,024 bytes.
__device__ __forceinline__ u64 descriptor(const void* rows) {
  return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | ((shared_address(rows) & 0x3FFFF) >> 4);
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

// The sum of NUM_CHUNKS times 32 columns of a step of a warp's tile: `sum` is set. tile: the step's weights in
// shared memory. x: its rows, 64 columns each in two parts. All warps of a warpgroup call it.
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int NT, int NUM_CHUNKS>
__device__ __forceinline__ void sum_chunks(float (&sum)[NT][4], const u8* tile, const u8* x) {
  constexpr int CHUNKS = GROUPS == 1 ? NUM_CHUNKS : 4 / GROUPS;  // of a group
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const u64 first_rows = descriptor(x);
#pragma unroll
  for (int first = 0; first < NUM_CHUNKS; first += CHUNKS) {
    float group_sum[NT][4];
    u32 a[CHUNKS][2][4];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int i = first + c;
      u32 zero0 = 0xC308C308u, zero1 = 0xC308C308u;  // -(128 + 8)
      if (HAS_ZEROS) {
        const u8* zeros = tile + 2 * unit_bytes<CODES> + GROUPS * TILE * scale_bytes<SCALES>;
        const u32 pair = reinterpret_cast<const u32*>(zeros)[first / CHUNKS * 8 + g];
        zero0 = __byte_perm(pair, 0, 0x1010), zero1 = __byte_perm(pair, 0, 0x3232);
      }
      const int piece = CODES == E4M3 ? i : i / 2;
      const uint4 words = reinterpret_cast<const uint4*>(tile + piece * CHUNK_BYTES)[lane];
      fragments<CODES>(a[c], words, i % 2, zero0, zero1);
#pragma unroll
      for (int j = 0; j < 2; j++) keep(a[c][j]);
      fence_wgmma();
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int part = i * 2 + j;  // 16 columns, which are 32 bytes of a row
        wgmma<NT>(group_sum, a[c][j], first_rows + (part / 4 * NT * 1024 + part % 4 * 32) / 16, c > 0 || j > 0);
      }
    }
    wait_for_wgmma();
#pragma unroll
    for (int n = 0; n < NT; n++) keep(group_sum[n]);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) keep(a[c][0]), keep(a[c][1]);
    float2 scale = make_float2(1.f, 1.f);
    if (SCALES != CHANNEL)
      scale = scales_of_rows<SCALES>(
          tile + 2 * unit_bytes<CODES> + first / CHUNKS * TILE * scale_bytes<SCALES>, g);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float s = e < 2 ? scale.x : scale.y;
        sum[n][e] = SCALES == CHANNEL ? group_sum[n][e]
                    : first == 0      ? __fmul_rn(s, group_sum[n][e])
                                      : __fmaf_rn(s, group_sum[n][e], sum[n][e]);
      }
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

// What the kernel takes.
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

// WM * 64 rows of the weight times 8 * NT rows of x, of one slice. SPLIT warpgroups take the steps of a slice by
// turns; the first one adds all sums. In a round, each of them has one step. Weights and x are copied to shared
// memory, STAGES - 1 rounds ahead.
// Grid: (groups of 8 * NT rows, groups of WM * 64 rows of the weight, slices).
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, int EPILOGUE, int WM, int SPLIT, int NT, int STAGES>
__device__ __forceinline__ void multiply(const Arguments& a) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int BYTES = tile_bytes<CODES, SCALES, HAS_ZEROS, GROUPS>, ROWS = NT * 8, THREADS_ = WM * SPLIT * 128;
  constexpr int X_BYTES = ROWS * STEP * 2;  // of a step
  constexpr int STAGE_BYTES = (SPLIT * (X_BYTES + WM * 4 * BYTES) + 1023) / 1024 * 1024;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int group_m = warp / 4 % WM, part = warp / 4 / WM;
  const int first_row = blockIdx.x * ROWS, slice = blockIdx.z;
  const int num_tiles = (a.N + TILE - 1) / TILE, tile = (blockIdx.y * WM + group_m) * 4 + warp % 4;
  const int num_rows = min(a.M - first_row, ROWS);
  const int slice_columns = min(a.K, (slice + 1) * a.slice_size) - slice * a.slice_size;
  const int num_steps = (slice_columns + STEP - 1) / STEP, num_rounds = (num_steps + SPLIT - 1) / SPLIT;
  const int place_in_stage = SPLIT * X_BYTES + ((part * WM + group_m) * 4 + warp % 4) * BYTES;
  const u16* const x = a.x + static_cast<u64>(first_row) * a.K + slice * a.slice_size;

  auto copy_weights = [&](int round, u8* stage) {
    const int step = round * SPLIT + part;
    if (step < num_steps)
      copy_tile<CODES, SCALES, HAS_ZEROS, GROUPS>(stage + place_in_stage, a.codes, a.scales, a.zeros,
                                                  min(tile, num_tiles - 1),
                                                  step_place(slice, step, a.slice_size, a.K), a.K);
  };
  // Rows beyond the last one are left as they are: they change no other row.
  auto copy_x = [&](int round, u8* stage) {
#pragma unroll
    for (int i = 0; i < (SPLIT * ROWS * 16 + THREADS_ - 1) / THREADS_; i++) {
      const int entry = threadIdx.x + i * THREADS_, row = entry / 16 % ROWS, step = entry / 16 / ROWS;
      const int column = (round * SPLIT + step) * STEP + entry % 16 * 8, half = entry % 16 / 8;
      if (step < SPLIT && row < num_rows && column < slice_columns)
        copy16(stage + step * X_BYTES + (half * ROWS + row) * 128 + (entry % 8 ^ row % 8) * 16,
               x + static_cast<u64>(row) * a.K + column);
    }
  };

  float total[NT][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) total[n][e] = 0.f;
  auto add = [&](int n, float4 sum) {
    total[n][0] = __fadd_rn(total[n][0], sum.x), total[n][1] = __fadd_rn(total[n][1], sum.y);
    total[n][2] = __fadd_rn(total[n][2], sum.z), total[n][3] = __fadd_rn(total[n][3], sum.w);
  };
  // The sums of the other warpgroups of a round: [2 rounds][SPLIT - 1][WM][NT][128 threads].
  float4* const sums = reinterpret_cast<float4*>(shared + STAGES * STAGE_BYTES);
  auto place_of_sum = [&](int round, int of_part, int n) {
    return (((round % 2 * (SPLIT - 1) + of_part - 1) * WM + group_m) * NT + n) * 128 + threadIdx.x % 128;
  };
  auto add_others = [&](int round) {
#pragma unroll
    for (int other = 1; other < SPLIT; other++)
      if (round * SPLIT + other < num_steps)
#pragma unroll
        for (int n = 0; n < NT; n++) add(n, sums[place_of_sum(round, other, n)]);
  };

#pragma unroll
  for (int round = 0; round < STAGES - 1; round++) copy_weights(round, shared + round * STAGE_BYTES);
  wait_for_producers();
#pragma unroll
  for (int round = 0; round < STAGES - 1; round++) {
    copy_x(round, shared + round * STAGE_BYTES);
    end_copy_group();
  }
  int stage = 0;
  for (int round = 0; round < num_rounds; round++) {
    wait_for_copies<STAGES - 2>();
    fence_copies();
    __syncthreads();
    u8* const free_stage = shared + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES;
    copy_weights(round + STAGES - 1, free_stage);
    copy_x(round + STAGES - 1, free_stage);
    end_copy_group();
    if (SPLIT > 1 && part == 0 && round > 0) add_others(round - 1);
    const u8* const here = shared + stage * STAGE_BYTES;
    const int step = round * SPLIT + part;
    if (step < num_steps) {
      float sum[NT][4];
      const u8 *const weights = here + place_in_stage, *const rows = here + part * X_BYTES;
      if (slice_columns - step * STEP >= STEP)
        sum_chunks<CODES, SCALES, HAS_ZEROS, GROUPS, NT, 4>(sum, weights, rows);
      else
        sum_chunks<CODES, SCALES, HAS_ZEROS, GROUPS, NT, 2>(sum, weights, rows);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float4 value = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
        if (part == 0) add(n, value);
        else sums[place_of_sum(round, part, n)] = value;
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  start_dependents();
  if (SPLIT > 1) {
    __syncthreads();
    if (part > 0) return;
    add_others(num_rounds - 1);
  }
  const int column = tile * TILE + g;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = first_row + n * 8 + t * 2 + e;
      if (row >= a.M) continue;
      if (EPILOGUE == SUMS) {
        float* out = static_cast<float*>(a.out) + (static_cast<u64>(slice) * a.M + row) * a.N;
        if (column < a.N) out[column] = finished<SCALES>(a, total[n][e], column);
        if (column + 8 < a.N) out[column + 8] = finished<SCALES>(a, total[n][e + 2], column + 8);
      } else if (column < a.N) {
        u16* out = static_cast<u16*>(a.out) + static_cast<u64>(row) * (a.N / 2);
        out[tile * 8 + g] = gated<EPILOGUE>(finished<SCALES>(a, total[n][e], column),
                                            finished<SCALES>(a, total[n][e + 2], column + 8));
      }
    }
}

// The kernel that a program is compiled for: MULTIPLY is the function above with its
// template arguments.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u8* codes, const u8* scales, const u8* zeros, const float* channel_scale, const u16* x,
            const u16* bias, void* out, int M, int N, int K, int num_slices, int slice_size) {
  MULTIPLY(Arguments{codes, scales, zeros, channel_scale, x, bias, out, M, N, K, num_slices, slice_size});
}
