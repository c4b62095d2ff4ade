// Products of MXFP4 experts for many rows each, in bfloat16 with fp32 sums: cuda_experts.py describes them.
// Follows common.cu, expert_rows.cu, mxfp4.cu and expert_arguments.cu.
//
// A weight is converted once for 64 pairs. Each warp has 32 rows of the weight to itself, which go from global
// memory to its fragments, and reads the rows of x from shared memory, where all warps have put them in the order
// of the fragments.
//
// Order of summation: that of expert_products.cu. What a warp sums there, chunks w, w + 8, w + 16, ..., is summed
// here as one part after the other, and the parts are added in ascending order.

// A CTA goes through work items: 256 rows of the weight, for up to 64 pairs of one expert. The items of a tile of
// pairs follow each other, and so do those of an expert, so that x and the weight come from the L2 cache. Grid:
// any number of CTAs.
template <bool IS_GATED, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE>
__device__ __forceinline__ void multiply_many(const Arguments& a) {
  constexpr int MT = 2, NT = 8, TILE_M = NT * 8, WARP_ROWS = MT * 16;  // tiles of a warp
  constexpr int WEIGHT_ROWS = IS_GATED ? 2 * N : N, ROWS = WARPS * WARP_ROWS;
  constexpr int NUM_TILES = (WEIGHT_ROWS + ROWS - 1) / ROWS, NUM_CHUNKS = (K + CHUNK - 1) / CHUNK;
  constexpr int ROW_BYTES = K / 2, ROW_SCALES = K / 32;
  constexpr int PARTS = LANE_COLUMNS / 8;              // of a lane's columns in a chunk, eight columns each
  constexpr int ROW_UNITS = CHUNK / 8;                 // eight columns of a pair, 16 bytes
  constexpr int UNITS = TILE_M * ROW_UNITS / THREADS;  // of a thread, in different pairs
  __shared__ __align__(16) uint4 stages[2][TILE_M * ROW_UNITS];
  __shared__ int all_pairs[2][TILE_M];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;

  // The place of eight columns in a stage: those of 32 lanes beside each other, in an order in which neither
  // stores nor loads of a warp meet in a bank.
  auto place_of = [](int n, int part, int of_lane) { return (n * PARTS + part) * 32 + (of_lane ^ (part << 1)); };
  const int unit_column = threadIdx.x % ROW_UNITS * 8, first_unit = threadIdx.x / ROW_UNITS;
  constexpr int UNIT_STEP = THREADS / ROW_UNITS;  // pairs between the units of a thread
  static_assert(WEIGHT_ROWS >= WARP_ROWS && WEIGHT_ROWS % 2 == 0 && K % LANE_COLUMNS == 0);
  constexpr u32 NO_UNIT = ~0u;

  wait_for_producers();
  const ExpertTiles<NUM_EXPERTS, TILE_M> tiles(a.counts);
  int stage = 0;
  for (int item = blockIdx.x, set = 0; item < tiles.num_tiles * NUM_TILES; item += gridDim.x, set ^= 1) {
    const ExpertTile tile = tiles.find(item / NUM_TILES);
    // Warps behind the last row compute rows before it again, to the same bits.
    const int first_row = min(item % NUM_TILES * ROWS + warp * WARP_ROWS, WEIGHT_ROWS - WARP_ROWS);
    const int* const listed = a.pairs + static_cast<i64>(tile.expert) * a.num_rows + tile.first;
    int* const pairs = all_pairs[set];
    if (threadIdx.x < TILE_M) pairs[threadIdx.x] = threadIdx.x < tile.num_rows ? load_past_l1(listed + threadIdx.x) : -1;

    u32 x_units[UNITS];  // where the pairs begin in x, in units; NO_UNIT: there is no pair
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      const int of_tile = first_unit + i * UNIT_STEP;
      const int pair = of_tile < tile.num_rows ? load_past_l1(listed + of_tile) : -1;
      x_units[i] = pair < 0 ? NO_UNIT : static_cast<u32>(IS_GATED ? pair / NUM_ACTIVE : pair) * (K / 8);
    }
    const i64 own_row = static_cast<i64>(tile.expert) * WEIGHT_ROWS + first_row + g;
    const u8* const values = a.values + own_row * ROW_BYTES + t * 16;
    const u8* const factors = a.scales + own_row * ROW_SCALES + t;

    uint4 x[UNITS], words[MT][2];
    u32 scales[MT][2];
    auto load = [&](int chunk) {
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (x_units[i] != NO_UNIT && (K % CHUNK == 0 || chunk * CHUNK + unit_column < K))
          x[i] = reinterpret_cast<const uint4*>(a.x)[x_units[i] + (chunk * CHUNK + unit_column) / 8];
      }
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = m * 16 + h * 8;
          words[m][h] = make_uint4(0, 0, 0, 0);
          scales[m][h] = 0;
          if (K % CHUNK == 0 || chunk * CHUNK + t * LANE_COLUMNS < K) {
            words[m][h] = load_weights(values + row * ROW_BYTES + chunk * (CHUNK / 2));
            scales[m][h] = factors[row * ROW_SCALES + chunk * (CHUNK / LANE_COLUMNS)];
          }
        }
    };

    float sum[MT][NT][4] = {}, total[MT][NT][4] = {};
    int chunk = 0, first_chunk = 0;
    load(chunk);
    for (int step = 0; step < NUM_CHUNKS; step++, stage ^= 1) {
      uint4* const own_stage = stages[stage];
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        const int of_tile = first_unit + i * UNIT_STEP, of_lane = (of_tile % 8) * 4 + unit_column / LANE_COLUMNS;
        u32 b[4];
        arrange(b, x[i]);
        own_stage[place_of(of_tile / 8, unit_column % LANE_COLUMNS / 8, of_lane)] = make_uint4(b[0], b[1], b[2], b[3]);
      }
      uint4 w[MT][2];
      u32 factor[MT][2];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) w[m][h] = words[m][h], factor[m][h] = block_factor(scales[m][h]);
      const bool is_last = chunk + WARPS >= NUM_CHUNKS;  // of its part
      chunk = is_last ? first_chunk + 1 : chunk + WARPS;
      // Two stages: who is here has read the other one, which is written next.
      __syncthreads();
      if (step + 1 < NUM_CHUNKS) load(chunk);

#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        u32 f[MT][2][4];  // of rows g and g + 8
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int h = 0; h < 2; h++)
            fragments(f[m][h], reinterpret_cast<const u32*>(&w[m][h])[part], factor[m][h]);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint4 v = own_stage[place_of(n, part, lane)];
          const u32 b[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int m = 0; m < MT; m++) add_products(sum[m][n], f[m], b);
        }
      }
      if (!is_last) continue;
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            total[m][n][e] = first_chunk == 0 ? sum[m][n][e] : __fadd_rn(total[m][n][e], sum[m][n][e]);
            sum[m][n][e] = 0.f;
          }
      first_chunk++;
    }

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = first_row + m * 16 + h * 8 + g;
        const float bias = a.bias != nullptr ? from_bfloat16(a.bias[own_row + m * 16 + h * 8]) : 0.f;
        // Plus the row's bias, rounded.
        auto product = [&](float value) { return rounded(a.bias != nullptr ? __fadd_rn(value, bias) : value); };
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const float first = product(total[m][n][2 * h]), second = product(total[m][n][2 * h + 1]);
          const int place = n * 8 + t * 2;
          if (IS_GATED) {
            // Rows of gate and up alternate. The lane with the gate finishes the first pair, the other one the second.
            const bool is_up = g & 1;
            const float other = __shfl_xor_sync(~0u, is_up ? first : second, 4);
            const int own = pairs[place + is_up];
            if (own >= 0)
              static_cast<u16*>(a.out)[static_cast<i64>(own) * N + row / 2] =
                  gated(a, is_up ? other : first, is_up ? second : other);
            continue;
          }
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int own = pairs[place + i];
            if (own < 0) continue;
            const i64 to = static_cast<i64>(own % NUM_ACTIVE) * a.num_rows + own / NUM_ACTIVE;
            static_cast<float*>(a.out)[to * N + row] = __fmul_rn(i == 0 ? first : second, a.shares[own]);
          }
        }
      }
  }
  start_dependents();
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u16* x, const u8* values, const u8* scales, const u16* bias, const int* counts, const int* pairs,
            const float* shares, void* out, float alpha, float limit, int num_rows) {
  PRODUCT({x, values, scales, bias, counts, pairs, shares, out, alpha, limit, num_rows});
}
