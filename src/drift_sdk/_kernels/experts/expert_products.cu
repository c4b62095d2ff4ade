// Products of MXFP4 experts for a few rows each, in bfloat16 with fp32 sums: cuda_products.py describes them.
// Follows common.cu.
//
// The weights are the A operand of mma.sync.m16n8k16, and are read in the order in which files have them: of a
// chunk of 128 columns, lane (g, t) has 16 bytes of row g and 16 of row g + 8, number t of four neighbours. They
// are one block with one scale, and the lane's own fragments, because x is read in the same order: which column
// a place of the MMA stands for does not matter, if it is the same in both operands.
//
// Order of summation: a warp sums all chunks by the MMA, in ascending order: columns 0 and 1 of each four in one
// sum, columns 2 and 3 in another, which are added at the end. The number of rows and of tiles does not change it.

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

// A hint that weights be the first to leave the L2 cache: a step reads them once.
__device__ __forceinline__ u64 evict_first() {
  u64 hint;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(hint));
  return hint;
}

// Copies 16 bytes to shared memory without waiting for them, or writes 16 zero bytes.
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool is_copied, u64 hint) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                   static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "r"(is_copied ? 16 : 0), "l"(hint) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the newest groups of copies of this thread are under way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

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

// A warp goes through work items by itself: MT * 16 rows of the weight, for up to NT * 8 pairs of one expert. N:
// columns of the output; K: inner dimension. Each lane copies the codes that it will read to shared memory, STAGES - 1
// chunks ahead, also those of the next item; the warp copies an item's scales with its first chunk. Items of a
// weight's tile follow each other, so that the tiles of an expert's rows run together. Grid: any number of CTAs.
template <bool IS_GATED, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE, int MT, int NT, int STAGES>
__device__ __forceinline__ void multiply_experts(const Arguments& a) {
  constexpr int ROWS = MT * 16, COLUMNS = IS_GATED ? ROWS / 2 : ROWS, TILE_M = NT * 8;
  constexpr int WEIGHT_ROWS = IS_GATED ? 2 * N : N, NUM_TILES = (N + COLUMNS - 1) / COLUMNS;
  constexpr bool IS_EVEN = N % COLUMNS == 0;
  constexpr int LANE_COLUMNS = 32, CHUNK = 4 * LANE_COLUMNS, NUM_CHUNKS = (K + CHUNK - 1) / CHUNK;
  constexpr int ROW_BYTES = K / 2, ROW_SCALES = K / 32, X_PIECES = LANE_COLUMNS / 8;
  constexpr int SCALE_BYTES = ROWS * ROW_SCALES + 16;  // as in CudaTiles, as the ring's size
  static_assert(STAGES >= 2 && STAGES <= NUM_CHUNKS + 1, "only the next item's chunks are copied ahead");
  extern __shared__ uint4 ring[];  // [WARPS][STAGES][MT][2][32], then scales [WARPS][2][SCALE_BYTES]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  uint4* const own_ring = ring + warp * (STAGES * MT * 64) + lane;
  u8* const own_scales = reinterpret_cast<u8*>(ring + WARPS * STAGES * MT * 64) + warp * 2 * SCALE_BYTES;

  if (IS_GATED) wait_for_producers();  // the kernel before lists the rows
  const ExpertTiles<NUM_EXPERTS, TILE_M> tiles(a.counts);
  // Warps of neighbouring CTAs take neighbouring items.
  const int first_item = warp * gridDim.x + blockIdx.x, num_warps = WARPS * gridDim.x;
  if (first_item >= NUM_TILES * tiles.num_tiles) {
    if (!IS_GATED) wait_for_producers();
    return;
  }

  const int step_n = num_warps / tiles.num_tiles, step_row = num_warps % tiles.num_tiles;
  auto advance = [&](int& tile_n, int& row_tile) {
    tile_n += step_n, row_tile += step_row;
    if (row_tile >= tiles.num_tiles) row_tile -= tiles.num_tiles, tile_n++;
  };
  auto first_row = [&](int expert, int tile_n) { return static_cast<i64>(expert) * WEIGHT_ROWS + tile_n * ROWS; };
  // Scales of a tile may begin within 16 bytes, which are copied whole.
  auto offset_of = [&](i64 row) { return static_cast<int>(reinterpret_cast<i64>(a.scales + row * ROW_SCALES) & 15); };
  auto rows_of = [&](int tile_n) { return IS_EVEN ? ROWS : min(ROWS, WEIGHT_ROWS - tile_n * ROWS); };
  auto read_pairs = [&](int (&pair)[NT], const ExpertTile& tile) {
    const int* from = a.pairs + static_cast<i64>(tile.expert) * a.num_rows + tile.first + g;
#pragma unroll
    for (int n = 0; n < NT; n++) pair[n] = n * 8 + g < tile.num_rows ? load_past_l1(from + n * 8) : -1;
  };
  auto rows_of_x = [&](const u16* (&x_rows)[NT], const int (&pair)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
      x_rows[n] = a.x + static_cast<i64>(IS_GATED ? pair[n] / NUM_ACTIVE : pair[n]) * K + t * LANE_COLUMNS;
  };
  auto load_x = [&](const u16* from, bool is_loaded) {
    return is_loaded ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  };

  // What is copied next: a chunk of an item, to a stage; the set of the item's scales.
  int copied_n = first_item / tiles.num_tiles, copied_row = first_item % tiles.num_tiles;
  int copied_chunk = 0, copied_stage = 0, copied_set = 0;
  i64 copied_from = first_row(tiles.find(copied_row).expert, copied_n);
  auto codes_of = [&](i64 row) { return a.values + row * ROW_BYTES + g * ROW_BYTES + t * 16; };
  const u8* copied_codes = codes_of(copied_from);  // of the first of this lane's rows
  const u64 hint = evict_first();
  auto copy_next = [&]() {
    if (copied_n < NUM_TILES) {
      const bool is_inner = copied_chunk * CHUNK + t * LANE_COLUMNS < K;
      const int num_rows = rows_of(copied_n);
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          copy16_or_zero(own_ring + copied_stage * (MT * 64) + (m * 2 + h) * 32, copied_codes + (m * 16 + h * 8) * ROW_BYTES,
                         is_inner && (IS_EVEN || m * 16 + h * 8 + g < num_rows), hint);
      copied_codes += CHUNK / 2;
      if (copied_chunk == 0) {
        const int offset = offset_of(copied_from), size = offset + num_rows * ROW_SCALES;
        const u8* from = a.scales + copied_from * ROW_SCALES - offset;
        for (int place = lane * 16; place < size; place += 32 * 16)
          copy16_or_zero(own_scales + copied_set * SCALE_BYTES + place, from + place, true, hint);
      }
      if (++copied_stage == STAGES) copied_stage = 0;
      if (++copied_chunk == NUM_CHUNKS) {
        copied_chunk = 0, copied_set ^= 1;
        advance(copied_n, copied_row);
        if (copied_n < NUM_TILES) {
          copied_from = first_row(tiles.find(copied_row).expert, copied_n);
          copied_codes = codes_of(copied_from);
        }
      }
    }
    end_copies();
  };

  int tile_n = copied_n, row_tile = copied_row;
  ExpertTile next = tiles.find(row_tile);
  int next_pair[NT];
  read_pairs(next_pair, next);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; stage++) copy_next();
  if (!IS_GATED) wait_for_producers();
  const u16* next_x[NT];
  rows_of_x(next_x, next_pair);
  uint4 x[NT][X_PIECES];  // of the next chunk: each piece is loaded when that of the chunk before has been used
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < X_PIECES; i++) x[n][i] = load_x(next_x[n] + i * 8, next_pair[n] >= 0 && t * LANE_COLUMNS < K);

  int stage = 0;
#pragma unroll 1
  for (int set = 0;; set ^= 1) {
    const ExpertTile tile = next;
    const int own_tile_n = tile_n;
    const i64 row_of_tile = first_row(tile.expert, own_tile_n);
    int pair[NT];
    float share[NT] = {};
    const u16* x_rows[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      pair[n] = next_pair[n];
      x_rows[n] = next_x[n];
      if (!IS_GATED && pair[n] >= 0) share[n] = a.shares[pair[n]];
    }
    float bias[MT][2] = {};
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = m * 16 + h * 8 + g;
        if (a.bias != nullptr && row < rows_of(own_tile_n)) bias[m][h] = from_bfloat16(a.bias[row_of_tile + row]);
      }
    advance(tile_n, row_tile);
    const bool has_next = tile_n < NUM_TILES;
    if (has_next) {
      next = tiles.find(row_tile);
      read_pairs(next_pair, next);
      rows_of_x(next_x, next_pair);
    }

    const u8* const scales = own_scales + set * SCALE_BYTES + offset_of(row_of_tile) + g * ROW_SCALES + t;
    float sum[2][MT][NT][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < NUM_CHUNKS; chunk++) {
      const bool is_inner = chunk * CHUNK + t * LANE_COLUMNS < K, is_last = chunk + 1 == NUM_CHUNKS;
      wait_for_copies<STAGES - 2>();
      if (chunk == 0) __syncwarp();  // other lanes have copied scales
      uint4 w[MT][2];
      u32 factor[MT][2];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          w[m][h] = own_ring[stage * (MT * 64) + (m * 2 + h) * 32];
          factor[m][h] = block_factor(is_inner ? scales[(m * 16 + h * 8) * ROW_SCALES + chunk * 4] : 0);
        }
      if (++stage == STAGES) stage = 0;
      copy_next();
      const u16* x_from[NT];
      bool has_x[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        x_rows[n] += CHUNK;
        x_from[n] = is_last ? next_x[n] : x_rows[n];
        has_x[n] = (is_last ? next_pair[n] : pair[n]) >= 0 && (is_last ? 0 : (chunk + 1) * CHUNK) + t * LANE_COLUMNS < K;
      }
#pragma unroll
      for (int i = 0; i < X_PIECES; i++) {
        u32 b[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint4 v = x[n][i];
          b[n][0] = __byte_perm(v.x, v.z, 0x5410), b[n][1] = __byte_perm(v.x, v.z, 0x7632);
          b[n][2] = __byte_perm(v.y, v.w, 0x5410), b[n][3] = __byte_perm(v.y, v.w, 0x7632);
          x[n][i] = load_x(x_from[n] + i * 8, has_x[n]);
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
            mma(sum[0][m][n], f[0][0], f[1][0], f[0][1], f[1][1], b[n][0], b[n][1]);
            mma(sum[1][m][n], f[0][2], f[1][2], f[0][3], f[1][3], b[n][2], b[n][3]);
          }
        }
      }
    }
    if (!has_next) start_dependents();

    // Lane (g, t) has rows g and g + 8 of each tile, for pairs 2t and 2t + 1 of each eight.
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int m = 0; m < MT; m++) {
        float product[4];  // with bias, rounded
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float total = __fadd_rn(sum[0][m][n][e], sum[1][m][n][e]);
          if (a.bias != nullptr) total = __fadd_rn(total, bias[m][e >> 1]);
          product[e] = rounded(total);
        }
        if (IS_GATED) {
          // Rows of gate and up alternate: of two lanes, the even one takes pair 2t and the odd one pair 2t + 1.
          const bool is_odd = g & 1;
          const int place = n * 8 + t * 2 + is_odd, own = __shfl_sync(~0u, pair[n], (t * 2 + is_odd) * 4);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float even = product[h * 2], odd = product[h * 2 + 1];
            const float mine = is_odd ? odd : even, other = __shfl_xor_sync(~0u, is_odd ? even : odd, 4);
            float gate = is_odd ? other : mine, up = is_odd ? mine : other;
            // Comparisons, so that NaN remains NaN. The activation is rounded once.
            gate = gate > a.limit ? a.limit : gate;
            up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
            const float swish = __fdiv_rn(gate, __fadd_rn(1.f, __expf(__fmul_rn(-a.alpha, gate))));
            const int column = own_tile_n * COLUMNS + m * 8 + h * 4 + (g >> 1);
            if (place < tile.num_rows && (IS_EVEN || column < N))
              static_cast<u16*>(a.out)[static_cast<i64>(own) * N + column] =
                  to_bfloat16(__fmul_rn(__fadd_rn(up, 1.f), swish));
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int source = (t * 2 + (e & 1)) * 4, place = n * 8 + t * 2 + (e & 1);
            const int own = __shfl_sync(~0u, pair[n], source), column = own_tile_n * COLUMNS + m * 16 + (e >> 1) * 8 + g;
            const float own_share = __shfl_sync(~0u, share[n], source);
            const i64 row = static_cast<i64>(own % NUM_ACTIVE) * a.num_rows + own / NUM_ACTIVE;
            if (place < tile.num_rows && (IS_EVEN || column < N))
              static_cast<float*>(a.out)[row * N + column] = __fmul_rn(product[e], own_share);
          }
        }
      }
    }
    if (!has_next) break;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u16* x, const u8* values, const u8* scales, const u16* bias, const int* counts, const int* pairs,
            const float* shares, void* out, float alpha, float limit, int num_rows) {
  PRODUCT({x, values, scales, bias, counts, pairs, shares, out, alpha, limit, num_rows});
}
