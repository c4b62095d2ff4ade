// The arithmetic of the gated delta rule with border states, which gated_delta.py describes. Every kernel that computes
// the bits uses these functions. Follows launch/types.cu and launch/dependent_launch.cu.
//
// A warp has 16 values of a head, and their part of the head's state S, transposed: S^T [16, DK] in float32, as
// accumulators of mma.m16n8k16. Two of these tiles of 8 keys are, split in two parts of bfloat16, the A operand of a
// product. Lane 4 g + t has values g and g + 8.

typedef long long i64;

constexpr int BORDER = 32;                   // positions between borders
constexpr int KEY_TILES = DK / 8, KEY_STEPS = DK / 16;
constexpr int KEY_STRIDE = DK + 8;           // of rows of keys in shared memory, which then have different banks
constexpr int VALUES = 16 * WARPS, PARTS = DV / VALUES, THREADS = 32 * WARPS;  // values and threads of a CTA
constexpr int KEY_PIECES = DK / 8;           // of 16 bytes, of a row
constexpr int CHANNELS = 2 * NUM_KEY_HEADS * DK + NUM_VALUE_HEADS * DV;
constexpr int GROUP = NUM_VALUE_HEADS / NUM_KEY_HEADS;
constexpr int STATE_FLOATS = DV / 16 * KEY_TILES * 128;  // of a head

// mixed: [N, CHANNELS] bfloat16, queries, keys, values of each row. scales: [N, 2 * NUM_KEY_HEADS], factors of queries,
// then of keys. gates: [N, 2 * NUM_VALUE_HEADS], logarithms (base 2) of decays, then rates.
// For each of S slots: border [S], the position of the stored state; state [S, NUM_VALUE_HEADS, DV / 16, DK / 8, 32, 4];
// and rings of the last RING rows: keys [S, NUM_KEY_HEADS, RING, DK] bfloat16, key_scales [S, NUM_KEY_HEADS, RING],
// updates [S, NUM_VALUE_HEADS, RING, DV], decays [S, NUM_VALUE_HEADS, RING].
// out: [N, NUM_VALUE_HEADS * DV] bfloat16.
struct Arguments {
  const u16* mixed;
  const float *scales, *gates;
  float* state;
  u16* keys;
  float *key_scales, *updates, *decays;
  u16* out;
};

typedef float State[KEY_TILES][4];

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void load_four(u32 (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void load_four_transposed(u32 (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void mma(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float power_of_2(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

__device__ __forceinline__ float from_bfloat16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

__device__ __forceinline__ u16 to_bfloat16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two numbers as two pairs of bfloat16: rounded, and what that has left.
__device__ __forceinline__ void split(float first, float second, u32& high, u32& low) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(second), "f"(first));
  const float rest_of_first = __fsub_rn(first, __uint_as_float(high << 16));
  const float rest_of_second = __fsub_rn(second, __uint_as_float(high & 0xFFFF0000u));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(rest_of_second), "f"(rest_of_first));
}

// The sum of the decays of lanes 0 to this one, added in an order that depends on the lane alone.
__device__ __forceinline__ float sum_decays(float decay) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(~0u, decay, distance);
    if (lane >= distance) decay = __fadd_rn(decay, other);
  }
  return decay;
}

// The part of a warp of the state, or zeros at the beginning of a sequence.
__device__ __forceinline__ void load_state(State& state, const float* from, bool is_empty) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++) {
    float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!is_empty) four = __ldcg(reinterpret_cast<const float4*>(from) + tile * 32 + lane);
    state[tile][0] = four.x, state[tile][1] = four.y, state[tile][2] = four.z, state[tile][3] = four.w;
  }
}

__device__ __forceinline__ void store_state(const State& state, float* to) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; tile++)
    reinterpret_cast<float4*>(to)[tile * 32 + lane] =
        make_float4(state[tile][0], state[tile][1], state[tile][2], state[tile][3]);
}

// The products of the state with keys and queries of rows: columns 2 j and 2 j + 1 of the tile `tile` are key and query
// of its row j, so that lane 4 g + t has those of row t. place(tile, i): the row of shared memory of column i. Keys are
// summed in ascending order, 16 at a time, first by the high parts of the state.
template <int COUNT, typename Place>
__device__ __forceinline__ void multiply_state(float (&sums)[COUNT][4], const State& state, Place place) {
  const int lane = threadIdx.x & 31;
  const u16* rows[COUNT];
#pragma unroll
  for (int tile = 0; tile < COUNT; tile++) {
    rows[tile] = place(tile, lane & 7) + (lane >> 3) * 8;
    sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < KEY_STEPS; step += 2) {
    u32 high[2][4], low[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float* part = state[2 * (step + i) + half];
        split(part[0], part[1], high[i][2 * half], low[i][2 * half]);
        split(part[2], part[3], high[i][2 * half + 1], low[i][2 * half + 1]);
      }
    u32 b[COUNT][4];
#pragma unroll
    for (int tile = 0; tile < COUNT; tile++) load_four(b[tile], rows[tile] + step * 16);
    // Each product waits for the one before it of its tile: those of other tiles lie between.
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int tile = 0; tile < COUNT; tile++) mma(sums[tile], high[i], b[tile][2 * i], b[tile][2 * i + 1]);
#pragma unroll
      for (int tile = 0; tile < COUNT; tile++) mma(sums[tile], low[i], b[tile][2 * i], b[tile][2 * i + 1]);
    }
  }
}

// The products of 16 keys with the keys and queries of a tile of rows, COUNT times: lane 4 g + t has those of keys g and
// g + 8 with row t. keys: of each time the first of the keys; rows: the row of shared memory of column lane % 8.
template <int COUNT>
__device__ __forceinline__ void multiply_keys(float (&sums)[COUNT][4], const u16* const (&keys)[COUNT],
                                              const u16* const (&rows)[COUNT]) {
  const int lane = threadIdx.x & 31;
  const int a_place = ((lane & 7) + (lane & 8)) * KEY_STRIDE + (lane >> 4) * 8, b_place = (lane >> 3) * 8;
#pragma unroll
  for (int time = 0; time < COUNT; time++) sums[time][0] = sums[time][1] = sums[time][2] = sums[time][3] = 0.f;
#pragma unroll
  for (int step = 0; step < KEY_STEPS; step += 2) {
    u32 a[COUNT][2][4], b[COUNT][4];
#pragma unroll
    for (int time = 0; time < COUNT; time++) {
      load_four(b[time], rows[time] + b_place + step * 16);
      load_four(a[time][0], keys[time] + a_place + step * 16);
      load_four(a[time][1], keys[time] + a_place + step * 16 + 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int time = 0; time < COUNT; time++) mma(sums[time], a[time][i], b[time][2 * i], b[time][2 * i + 1]);
  }
}

// The factors of the update and of the query of row `own` in what row `other` has added to the state.
struct Factors {
  float update, output;
};

__device__ __forceinline__ Factors factors(float key_product, float query_product, float key_scale, float query_scale,
                                           float rate, float other_key_scale, float decay, float other_decay) {
  const float power = power_of_2(__fsub_rn(decay, other_decay));
  const float key = __fmul_rn(__fmul_rn(key_product, __fmul_rn(key_scale, other_key_scale)), power);
  const float query = __fmul_rn(__fmul_rn(query_product, __fmul_rn(query_scale, other_key_scale)), power);
  return {__fmul_rn(rate, key), query};
}

// The update of a row, from its value and the product of its key with the state at the border, without earlier rows.
__device__ __forceinline__ float first_update(float product, float value, float key_scale, float rate, float power) {
  return __fmul_rn(rate, __fmaf_rn(-product, __fmul_rn(key_scale, power), value));
}

__device__ __forceinline__ float first_output(float product, float query_scale, float power) {
  return __fmul_rn(product, __fmul_rn(query_scale, power));
}

// Advances the state by the BORDER rows in shared memory: keys, key_scales, the sums of decays, and updates(row, i), those
// of values g and g + 8 for i = 0, 1. Rows are summed 16 at a time, and of these the ones with equal remainder by 4
// belong to a lane; first the high parts of the weighted updates.
template <int TILES_AT_ONCE, typename Updates>
__device__ __forceinline__ void fold(State& state, const u16* keys, const float* key_scales, const float* decays,
                                     Updates updates) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const float last = decays[BORDER - 1];
  u32 high[2][4], low[2][4];
#pragma unroll
  for (int step = 0; step < 2; step++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float weighted[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = 16 * step + 4 * (2 * half + i) + t;
        const float weight = __fmul_rn(key_scales[row], power_of_2(__fsub_rn(last, decays[row])));
        weighted[0][i] = __fmul_rn(updates(row, 0), weight);
        weighted[1][i] = __fmul_rn(updates(row, 1), weight);
      }
      split(weighted[0][0], weighted[0][1], high[step][2 * half], low[step][2 * half]);
      split(weighted[1][0], weighted[1][1], high[step][2 * half + 1], low[step][2 * half + 1]);
    }
  // Row i of matrix m: key of the row that belongs to index 8 (m % 2) + i of step m / 2.
  const int matrix = lane >> 3, index = lane & 7;
  const u16* const row = keys + (16 * (matrix >> 1) + 4 * (2 * (matrix & 1) + (index & 1)) + (index >> 1)) * KEY_STRIDE;
  const float power = power_of_2(last);
#pragma unroll
  for (int first = 0; first < KEY_TILES; first += TILES_AT_ONCE) {
    u32 b[TILES_AT_ONCE][4];
#pragma unroll
    for (int i = 0; i < TILES_AT_ONCE; i++) {
      load_four_transposed(b[i], row + (first + i) * 8);
#pragma unroll
      for (int j = 0; j < 4; j++) state[first + i][j] = __fmul_rn(state[first + i][j], power);
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int i = 0; i < TILES_AT_ONCE; i++) mma(state[first + i], high[step], b[i][2 * step], b[i][2 * step + 1]);
#pragma unroll
      for (int i = 0; i < TILES_AT_ONCE; i++) mma(state[first + i], low[step], b[i][2 * step], b[i][2 * step + 1]);
    }
  }
}
