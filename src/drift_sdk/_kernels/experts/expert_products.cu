// Products of MXFP4 experts for a few rows each, in bfloat16 with fp32 sums: cuda_products.py describes them.
// Follows common.cu.
//
// The weights are the A operand of mma.sync.m16n8k16, and are read in the order in which files have them: of a
// chunk of 128 columns, lane (g, t) has 16 bytes of row g and 16 of row g + 8, number t of four neighbours. They
// are one block with one scale, and the lane's own fragments, because x is read in the same order: which column
// a place of the MMA stands for does not matter, if it is the same in both operands.
//
// Order of summation: warp w sums chunks w, w + 8, w + 16, ... by the MMA, and the sums of the eight warps are
// added in ascending order. The number of rows and of tiles does not change it.

// What a product takes. The macro PRODUCT names the function of the kernel, with its template arguments; CTAS is
// how many CTAs a multiprocessor is to have room for.
//   x: [R, K] (gated) or [R * NUM_ACTIVE, K], bfloat16.
//   values: [E, weight rows, K / 2], codes. scales: [E, weight rows, K / 32], at most 128.
//   bias: [E, weight rows] bfloat16, or null.
//   counts: [E], pairs: [E, R]: the rows of each expert, as routing.py lists them.
//   shares: [R, NUM_ACTIVE] fp32; of the down projection.
//   out: [R * NUM_ACTIVE, N] bfloat16 (gated), or [NUM_ACTIVE, R, N] fp32.
struct Arguments {
  const u16* x;
  const u8 *values, *scales;
  const u16* bias;
  const int *counts, *pairs;
  const float* shares;
  void* out;
  float alpha, limit;
  int num_rows;
};

// Two codes at bits 0 to 3 and 16 to 19 (SHIFT 0), or 4 to 7 and 20 to 23 (SHIFT 4), times `factor`, as
// bfloat16. One product moves the sign to bit 15 and the magnitude to bits 6 to 8, where it is the number times
// 2^-126; the product with the factor, a power of two, is exact.
template <int SHIFT> __device__ __forceinline__ u32 numbers(u32 word, u32 factor) {
  const u32 moved = (word & (0x000F000Fu << SHIFT)) * ((1u << (12 - SHIFT)) + (1u << 6 >> SHIFT));
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(moved & 0x81C081C0u), "r"(factor), "r"(0x80008000u));
  return result;
}

// 2^(scale - 1), twice: the block's power of two, times 2^126.
__device__ __forceinline__ u32 block_factor(u32 scale) { return ((scale + 126u) << 7) * 0x00010001u; }

// Up to TILE_M rows of an expert: its number, the tile's first place in its list, and how many rows it has.
struct ExpertTile {
  int expert, first, num_rows;
};

// The tiles of all experts, one after the other. Each lane of a warp holds the counts of some experts.
template <int NUM_EXPERTS, int TILE_M> struct ExpertTiles {
  static constexpr int EACH = (NUM_EXPERTS + 31) / 32;  // experts of a lane
  int count[EACH], first_tile, end_tile, num_tiles;     // of this lane's experts; of all

  __device__ __forceinline__ explicit ExpertTiles(const int* counts) {
    const int lane = threadIdx.x & 31;
    int own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int expert = lane * EACH + i;
      count[i] = expert < NUM_EXPERTS ? load_past_l1(counts + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) own += (count[i] + TILE_M - 1) / TILE_M;
    end_tile = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end_tile, distance);
      if (lane >= distance) end_tile += before;
    }
    first_tile = end_tile - own;
    num_tiles = __shfl_sync(~0u, end_tile, 31);
  }

  // All lanes get the same.
  __device__ __forceinline__ ExpertTile find(int tile) const {
    const int owner = __ffs(__ballot_sync(~0u, end_tile > tile)) - 1;
    int from = first_tile, expert = 0, first = 0, num_rows = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int end = from + (count[i] + TILE_M - 1) / TILE_M;
      if (tile >= from && tile < end) {
        expert = (threadIdx.x & 31) * EACH + i;
        first = (tile - from) * TILE_M;
        num_rows = min(count[i] - first, TILE_M);
      }
      from = end;
    }
    return {__shfl_sync(~0u, expert, owner), __shfl_sync(~0u, first, owner), __shfl_sync(~0u, num_rows, owner)};
  }
};

// A CTA goes through work items: MT * 16 rows of the weight, for up to NT * 8 pairs of one expert. N: columns of
// the output; K: inner dimension. DEPTH: chunks of a warp that are loaded ahead, also those of the next item; it
// divides the number of a warp's chunks. Items of a weight's tile follow each other, so that the tiles of an
// expert's rows run together. Grid: any number of CTAs.
template <bool IS_GATED, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE, int MT, int NT, int DEPTH>
__device__ __forceinline__ void multiply_experts(const Arguments& a) {
  constexpr int ROWS = MT * 16, COLUMNS = IS_GATED ? ROWS / 2 : ROWS, TILE_M = NT * 8;
  constexpr int WEIGHT_ROWS = IS_GATED ? 2 * N : N, NUM_TILES = (N + COLUMNS - 1) / COLUMNS;
  constexpr bool IS_EVEN = N % COLUMNS == 0;
  constexpr int LANE_COLUMNS = 32, CHUNK = 4 * LANE_COLUMNS;  // columns
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
          b[n][0] = __byte_perm(v.x, v.z, 0x5410), b[n][1] = __byte_perm(v.x, v.z, 0x7632);
          b[n][2] = __byte_perm(v.y, v.w, 0x5410), b[n][3] = __byte_perm(v.y, v.w, 0x7632);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
          u32 f[2][4];  // of rows g and g + 8: pairs of columns
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const u32 word = reinterpret_cast<const u32*>(&w[m][h])[i], upper = word >> 8;
            f[h][0] = numbers<0>(word, factor[m][h]);   // columns 0 and 4 of 8
            f[h][1] = numbers<4>(word, factor[m][h]);   // 1 and 5
            f[h][2] = numbers<0>(upper, factor[m][h]);  // 2 and 6
            f[h][3] = numbers<4>(upper, factor[m][h]);  // 3 and 7
          }
#pragma unroll
          for (int n = 0; n < NT; n++) {
            mma(sum[m][n], f[0][0], f[1][0], f[0][1], f[1][1], b[n][0], b[n][1]);
            mma(sum[m][n], f[0][2], f[1][2], f[0][3], f[1][3], b[n][2], b[n][3]);
          }
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
      // Rows of gate and up alternate. Comparisons, so that NaN remains NaN. The activation is rounded once.
      u16* out = static_cast<u16*>(a.out) + static_cast<i64>(own) * N;
      float gate = product(2 * place, bias[0], n), up = product(2 * place + 1, bias[FINISHED - 1], n);
      gate = gate > a.limit ? a.limit : gate;
      up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
      const float swish = __fdiv_rn(gate, __fadd_rn(1.f, __expf(__fmul_rn(-a.alpha, gate))));
      out[column] = to_bfloat16(__fmul_rn(__fadd_rn(up, 1.f), swish));
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
