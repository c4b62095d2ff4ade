// Products of MXFP4 experts for a few rows each, in bfloat16 with fp32 sums: cuda_experts.py describes them.
// Follows common.cu, expert_rows.cu, mxfp4.cu and expert_arguments.cu.
//
// The 16 bytes of a lane (mxfp4.cu) are of rows g and g + 8 of a tile of 16 rows of the weight.
//
// Order of summation: warp w sums chunks w, w + 8, w + 16, ... by the MMA, and the sums of the eight warps are
// added in ascending order. The number of rows and of tiles does not change it.

// A CTA goes through work items: MT * 16 rows of the weight, for up to NT * 8 pairs of one expert. N: columns of
// the output; K: inner dimension. DEPTH: chunks of a warp that are loaded ahead, also those of the next item; it
// divides the number of a warp's chunks. Items of a weight's tile follow each other, so that the tiles of an
// expert's rows run together. Grid: any number of CTAs.
template <bool IS_GATED, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE, int MT, int NT, int DEPTH>
__device__ __forceinline__ void multiply_experts(const Arguments& a) {
  constexpr int ROWS = MT * 16, COLUMNS = IS_GATED ? ROWS / 2 : ROWS, TILE_M = NT * 8;
  constexpr int WEIGHT_ROWS = IS_GATED ? 2 * N : N, NUM_TILES = (N + COLUMNS - 1) / COLUMNS;
  constexpr bool IS_EVEN = N % COLUMNS == 0;
  constexpr int NUM_CHUNKS = (K + CHUNK - 1) / CHUNK, ROUNDS = (NUM_CHUNKS + WARPS - 1) / WARPS;
  constexpr int ROW_BYTES = K / 2, ROW_SCALES = K / 32, TURN_BYTES = WARPS * 64;
  constexpr int STRIDE = TILE_M + 1;  // floats of a weight row in shared memory
  static_assert(ROUNDS % DEPTH == 0, "the rounds of an item end with the last slot");
  static_assert(THREADS % COLUMNS == 0, "a thread finishes the same rows of the weight for all pairs");
  constexpr int NUM_PARTS = ROWS * TILE_M <= 512 ? 2 : 1;  // sets of parts that shared memory has room for
  __shared__ float all_parts[NUM_PARTS][WARPS * ROWS * STRIDE];
  __shared__ int all_pairs[NUM_PARTS][TILE_M];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int lane_column = warp * CHUNK + t * LANE_COLUMNS;

  if (IS_GATED) wait_for_producers();  // the kernel before lists the rows
  const ExpertTiles<NUM_EXPERTS, TILE_M> tiles(a.counts);
  if (blockIdx.x >= NUM_TILES * tiles.num_tiles) {
    if (!IS_GATED) wait_for_producers();
    return;
  }

  // The row of the weight, in its expert's matrix, that lane (g, t) has of tile m, half h of tile 0.
  auto weight_row = [&](int tile_n, int m, int h) {
    const int row = tile_n * ROWS + m * 16 + h * 8 + g;
    return IS_EVEN ? row : min(row, WEIGHT_ROWS - 1);
  };
  uint4 words[DEPTH][MT][2];
  u32 scales[DEPTH][MT][2];
  auto load = [&](int round, const u8* values, const u8* factors, int tile_n) {
    const bool is_inner = (round + 1) * WARPS * CHUNK <= K || round * WARPS * CHUNK + lane_column < K;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = weight_row(tile_n, m, h);
        words[round % DEPTH][m][h] = make_uint4(0, 0, 0, 0);
        scales[round % DEPTH][m][h] = 0;
        if (is_inner) {
          words[round % DEPTH][m][h] = load_weights(values + row * ROW_BYTES + round * TURN_BYTES);
          scales[round % DEPTH][m][h] = factors[row * ROW_SCALES + round * WARPS * 4];
        }
      }
  };
  auto values_of = [&](int expert) {
    return a.values + static_cast<i64>(expert) * (static_cast<i64>(WEIGHT_ROWS) * ROW_BYTES) + warp * 64 + t * 16;
  };
  auto factors_of = [&](int expert) {
    return a.scales + static_cast<i64>(expert) * (WEIGHT_ROWS * ROW_SCALES) + warp * 4 + t;
  };
  auto read_pairs = [&](int (&pair)[NT], const ExpertTile& tile) {
    const int* from = a.pairs + static_cast<i64>(tile.expert) * a.num_rows + tile.first + g;
#pragma unroll
    for (int n = 0; n < NT; n++) pair[n] = n * 8 + g < tile.num_rows ? load_past_l1(from + n * 8) : -1;
  };

  int tile_n = blockIdx.x / tiles.num_tiles, row_tile = blockIdx.x % tiles.num_tiles;
  const int step_n = gridDim.x / tiles.num_tiles, step_row = gridDim.x % tiles.num_tiles;
  ExpertTile next = tiles.find(row_tile);
  const u8 *next_values = values_of(next.expert), *next_factors = factors_of(next.expert);
  int next_pair[NT];
  read_pairs(next_pair, next);
#pragma unroll
  for (int round = 0; round < DEPTH; round++) load(round, next_values, next_factors, tile_n);
  if (!IS_GATED) wait_for_producers();

  for (int set = 0;; set = (set + 1) % NUM_PARTS) {
    const ExpertTile tile = next;
    const u8 *values = next_values, *factors = next_factors;
    const int own_tile_n = tile_n;
    int pair[NT];
    const u16* x_rows[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      pair[n] = next_pair[n];
      x_rows[n] = a.x + static_cast<i64>(IS_GATED ? pair[n] / NUM_ACTIVE : pair[n]) * K + lane_column;
    }
    tile_n += step_n, row_tile += step_row;
    if (row_tile >= tiles.num_tiles) row_tile -= tiles.num_tiles, tile_n++;
    const bool has_next = tile_n < NUM_TILES;
    if (has_next) {
      next = tiles.find(row_tile);
      next_values = values_of(next.expert), next_factors = factors_of(next.expert);
      read_pairs(next_pair, next);
    }

    // Of the weight rows whose sums this thread finishes, which are the same for all of the item's pairs.
    constexpr int FINISHED = IS_GATED ? 2 : 1;
    const int own_row = (own_tile_n * COLUMNS + threadIdx.x % COLUMNS) * FINISHED;
    float bias[FINISHED] = {};
#pragma unroll
    for (int i = 0; i < FINISHED; i++)
      if (a.bias != nullptr && (IS_EVEN || own_row < WEIGHT_ROWS))
        bias[i] = from_bfloat16(a.bias[tile.expert * WEIGHT_ROWS + own_row + i]);

    float sum[MT][NT][4] = {};
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const bool is_inner = (round + 1) * WARPS * CHUNK <= K || round * WARPS * CHUNK + lane_column < K;
      uint4 w[MT][2];
      u32 factor[MT][2];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          w[m][h] = words[round % DEPTH][m][h];
          factor[m][h] = block_factor(scales[round % DEPTH][m][h]);
        }
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS / 8; i++) {
        u32 b[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (is_inner && pair[n] >= 0) v = *reinterpret_cast<const uint4*>(x_rows[n] + round * WARPS * CHUNK + i * 8);
          arrange(b[n], v);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
          u32 f[2][4];  // of rows g and g + 8
#pragma unroll
          for (int h = 0; h < 2; h++) fragments(f[h], reinterpret_cast<const u32*>(&w[m][h])[i], factor[m][h]);
#pragma unroll
          for (int n = 0; n < NT; n++) add_products(sum[m][n], f, b[n]);
        }
      }
      if (round + DEPTH < ROUNDS)
        load(round + DEPTH, values, factors, own_tile_n);
      else if (has_next)
        load(round + DEPTH - ROUNDS, next_values, next_factors, tile_n);
    }
    if (!has_next) start_dependents();

    float* const parts = all_parts[set];
    int* const pairs = all_pairs[set];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = m * 16 + (e >> 1) * 8 + g, place = n * 8 + t * 2 + (e & 1);
          if (place < tile.num_rows) parts[(warp * ROWS + row) * STRIDE + place] = sum[m][n][e];
        }
    if (warp == 0 && t == 0) {
#pragma unroll
      for (int n = 0; n < NT; n++) pairs[n * 8 + g] = pair[n];
    }
    __syncthreads();

    // The product of a row of the tile with a row of the weight, plus its bias, rounded.
    auto product = [&](int row, float row_bias, int n) {
      float total = parts[row * STRIDE + n];
#pragma unroll
      for (int w = 1; w < WARPS; w++) total = __fadd_rn(total, parts[(w * ROWS + row) * STRIDE + n]);
      if (a.bias != nullptr) total = __fadd_rn(total, row_bias);
      return rounded(total);
    };
    for (int entry = threadIdx.x; entry < COLUMNS * tile.num_rows; entry += THREADS) {
      const int n = entry / COLUMNS, place = entry % COLUMNS, column = own_tile_n * COLUMNS + place;
      if (!IS_EVEN && column >= N) continue;
      const int own = pairs[n];
      if (!IS_GATED) {
        const i64 row = static_cast<i64>(own % NUM_ACTIVE) * a.num_rows + own / NUM_ACTIVE;
        static_cast<float*>(a.out)[row * N + column] = __fmul_rn(product(place, bias[0], n), a.shares[own]);
        continue;
      }
      // Rows of gate and up alternate.
      u16* out = static_cast<u16*>(a.out) + static_cast<i64>(own) * N;
      out[column] = gated(a, product(2 * place, bias[0], n), product(2 * place + 1, bias[FINISHED - 1], n));
    }
    if (!has_next) break;
    // With two sets, nobody writes to this one again before all have left the other.
    if (NUM_PARTS == 1) __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u16* x, const u8* values, const u8* scales, const u16* bias, const int* counts, const int* pairs,
            const float* shares, void* out, float alpha, float limit, int num_rows) {
  PRODUCT({x, values, scales, bias, counts, pairs, shares, out, alpha, limit, num_rows});
}
