// Products of the rows of experts with the experts' quantised weights: packed_products.py describes them. Follows
// dependent_launch.cu, expert_rows.cu, formats.cu, hopper.cu, tile_sums.cu and epilogue.cu.
//
// A CTA goes through tasks: up to 8 * NT pairs of an expert, and WM panels of its weight. As in multiply.cu, one thread
// copies the steps of the weight to shared memory. A warp copies those of x, row by row, because the rows of an expert
// lie anywhere. Warpgroups multiply, a panel each. What copies is up to STAGES steps ahead, so in the next tasks while
// warpgroups end one.
//
// Order of summation: that of multiply.cu, with one warpgroup for all columns.

// What a product takes.
//   codes, scales, shifts, channel_scale: of all experts, one after the other, as packing.py arranges them.
//   counts: [NUM_EXPERTS], pairs: [NUM_EXPERTS, num_rows]: the rows of each expert, as routing.py lists them.
//   shares: [num_rows, NUM_ACTIVE] fp32; of the down projection.
//   out: [num_rows * NUM_ACTIVE, N / 2] bfloat16 (gated), or [NUM_ACTIVE, num_rows, N] fp32.
//   N: rows of an expert's weight, whole panels. K: columns.
struct PackedArguments {
  const u8 *codes, *scales, *shifts;
  const float* channel_scale;
  const int *counts, *pairs;
  const float* shares;
  void* out;
  int num_rows, N, K;
};

// Copies the rows of x of a tile's pairs, for all steps, by a warp: each lane copies some rows. Rows beyond the last
// pair are left as they are: they change no other row.
template <bool IS_GATED, int NUM_ACTIVE, int NT, class StagesOfCta>
__device__ __forceinline__ void copy_pairs(const PackedArguments& a, const TensorMap* x_map, const ExpertTile& tile,
                                           const StagesOfCta& stages, Turn<StagesOfCta::NUM>& turn, int num_whole,
                                           int num_steps) {
  constexpr int ROWS = NT * 8, EACH = (ROWS + 31) / 32, ROW_BYTES = UNIT * 2;
  const int lane = threadIdx.x & 31;
  const int* pairs = a.pairs + static_cast<u64>(tile.expert) * a.num_rows + tile.first;
  int row[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int place = i * 32 + lane, pair = place < tile.num_rows ? load_past_l1(pairs + place) : -1;
    row[i] = pair < 0 ? -1 : IS_GATED ? pair / NUM_ACTIVE : pair;
  }
  int column = 0;
  for (int step = 0; step < num_steps; step++) {
    const int num_units = step < num_whole ? 2 : 1;
    u64* const barrier = stages.full(turn.stage);
    wait_for_phase(stages.empty(turn.stage), turn.parity);
    if (lane == 0) arrive_expecting(barrier, num_units * tile.num_rows * ROW_BYTES);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (row[i] < 0) continue;
      u8* const to = stages.x(turn.stage) + (i * 32 + lane) * ROW_BYTES;
      copy_rows(to, x_map, column, row[i], barrier);
      if (num_units == 2) copy_rows(to + ROWS * ROW_BYTES, x_map, column + UNIT, row[i], barrier);
    }
    column += STEP;
    turn.advance(1);
  }
}

// What a warp stores the sums of its tile of the weight by: the pairs of this lane's columns, -1 where there is none,
// and the scales of its rows g and g + 8.
template <int CODES, int SCALES, int NT> struct Places {
  int pair[NT][2];
  float scale[2];

  // weight_tile: the tile's number in its expert, which may be behind the last one.
  __device__ __forceinline__ void load(const PackedArguments& a, const ExpertTile& tile, int weight_tile) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int* pairs = a.pairs + static_cast<u64>(tile.expert) * a.num_rows + tile.first;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int place = n * 8 + t * 2 + e;
        pair[n][e] = place < tile.num_rows ? load_past_l1(pairs + place) : -1;
      }
    if (SCALES == CHANNEL)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = min(weight_tile * TILE + g + 8 * h, a.N - 1);
        scale[h] = a.channel_scale[static_cast<u64>(tile.expert) * a.N + row];
      }
  }
};

// Writes the sums of a warp's tile of the weight, number `weight_tile` of its expert.
template <int CODES, int SCALES, bool IS_GATED, int NUM_ACTIVE, int NT>
__device__ __forceinline__ void store_pairs(const PackedArguments& a, const float (&total)[NT][4],
                                            const Places<CODES, SCALES, NT>& places, int weight_tile) {
  const int g = (threadIdx.x & 31) >> 2, column = weight_tile * TILE + g;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int pair = places.pair[n][e];
      if (pair < 0) continue;
      float value[2] = {total[n][e], total[n][e + 2]};  // of rows g and g + 8
      if (SCALES == CHANNEL)
#pragma unroll
        for (int h = 0; h < 2; h++) value[h] = __fmul_rn(value[h], places.scale[h] * code_unit<CODES>);
      if (IS_GATED) {
        u16* const out = static_cast<u16*>(a.out) + static_cast<u64>(pair) * (a.N / 2);
        out[weight_tile * 8 + g] = gated<SILU>(value[0], value[1]);
      } else {
        const u64 row = static_cast<u64>(pair % NUM_ACTIVE) * a.num_rows + pair / NUM_ACTIVE;
        float* const out = static_cast<float*>(a.out) + row * a.N + column;
        const float share = a.shares[pair];
        out[0] = __fmul_rn(rounded(value[0]), share), out[8] = __fmul_rn(rounded(value[1]), share);
      }
    }
}

// The tasks of a CTA. Those of CTAs that run together follow each other: tiles of rows with the same panels of their
// experts, then with the next ones. All lanes of a warp have the same.
template <int NUM_EXPERTS, int TILE_M, int WM> struct Tasks {
  ExpertTiles<NUM_EXPERTS, TILE_M> tiles;
  int following, end;  // of all tasks
  ExpertTile tile;     // of the task, and its first panel
  int panel;

  __device__ __forceinline__ Tasks(const int* counts, int num_panels) : tiles(counts) {
    following = blockIdx.x, end = tiles.num_tiles * ((num_panels + WM - 1) / WM);
  }

  // Goes to the next task. Returns whether there is one.
  __device__ __forceinline__ bool advance() {
    if (following >= end) return false;
    tile = tiles.find(following % tiles.num_tiles), panel = following / tiles.num_tiles * WM;
    following += gridDim.x;
    return true;
  }
};

// Tasks of WM panels of an expert's weight times up to 8 * NT of its rows, by WM warpgroups, a warp that copies
// weights and one that copies x. The rows of a gated product are listed by the kernel before this one, those of the
// other product earlier. Grid: any number of CTAs.
template <int CODES, int SCALES, int SHIFTS, int GROUPS, bool IS_GATED, int WM, int NT, int STAGES, int NUM_EXPERTS,
          int NUM_ACTIVE>
__device__ __forceinline__ void multiply_pairs(const PackedArguments& a, const TensorMap* x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int WARPS = WM * 4;
  const Stages<CODES, SCALES, SHIFTS, GROUPS, WM, NT, STAGES> stages{shared};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(stages.full(i), 2);
      init_barrier(stages.empty(i), WARPS);
    }
    fence_barriers();
  }
  if (IS_GATED) wait_for_producers();
  const int num_panels = a.N / PANEL, num_whole = a.K / STEP, num_steps = (a.K + STEP - 1) / STEP;
  Tasks<NUM_EXPERTS, NT * 8, WM> tasks(a.counts, num_panels);
  __syncthreads();

  if (warp == WARPS) {
    const Weight weight{a.codes, a.scales, a.shifts, a.K};
    Turn<STAGES> turn{0, 1};
    while (tasks.advance()) {
      const int before = tasks.tile.expert * num_panels, last = before + num_panels - 1;
      if (lane == 0) copy_weights(weight, before + tasks.panel, last, 0, stages, turn, num_whole, num_steps);
    }
    if (!IS_GATED) wait_for_producers();  // as every thread does before it ends
    return;
  }
  if (!IS_GATED) wait_for_producers();
  if (warp == WARPS + 1) {
    Turn<STAGES> turn{0, 1};
    while (tasks.advance())
      copy_pairs<IS_GATED, NUM_ACTIVE, NT>(a, x_map, tasks.tile, stages, turn, num_whole, num_steps);
    start_dependents();  // all copies have been started
    return;
  }

  Turn<STAGES> turn{0, 0};
  while (tasks.advance()) {
    const int weight_tile = tasks.panel * 4 + warp;
    TileSums<CODES, SCALES, SHIFTS, GROUPS, NT> sums;
    Places<CODES, SCALES, NT> places;
    if (NT <= 2) places.load(a, tasks.tile, weight_tile);  // before they are needed, if they are few
    sum_steps<1>(sums, stages, turn, warp / 4, 0, num_whole, num_steps);
    if (weight_tile >= a.N / TILE) continue;
    if (NT > 2) places.load(a, tasks.tile, weight_tile);
    store_pairs<CODES, SCALES, IS_GATED, NUM_ACTIVE>(a, sums.total, places, weight_tile);
  }
}

// The kernel that a program is compiled for: MULTIPLY_PAIRS is the function above with its template arguments, CTAS
// how many CTAs a multiprocessor is to have room for. x_map: of x, in boxes of one row and 64 columns.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    packed_product(const u8* codes, const u8* scales, const u8* shifts, const float* channel_scale,
                   const __grid_constant__ TensorMap x_map, const int* counts, const int* pairs, const float* shares,
                   void* out, int num_rows, int N, int K) {
  MULTIPLY_PAIRS(PackedArguments{codes, scales, shifts, channel_scale, counts, pairs, shares, out, num_rows, N, K},
                 &x_map);
}
