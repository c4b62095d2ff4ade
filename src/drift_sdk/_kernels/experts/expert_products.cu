// Products of experts for a few rows each, in bfloat16 with fp32 sums: cuda_products.py describes them. Follows
// common.cu.
//
// The weights are the A operand of mma.sync.m16n8k16, and are read in the order in which files have them: of a
// chunk of columns, lane (g, t) loads 16 bytes of row g and 16 of row g + 8, number t of four neighbours. They
// are its own fragments, because x is read in the same order: which column a place of the MMA stands for does
// not matter, if it is the same in both operands. 16 bytes are 8 columns of bfloat16, or 32 of MXFP4, which are
// one block with one scale.
//
// Order of summation: warp w sums chunks w, w + 8, w + 16, ... by the MMA, and the sums of the eight warps are
// added in ascending order. The number of rows and of tiles does not change it.

enum Format { BFLOAT16, MXFP4 };
enum Epilogue { SHARES, SILU, CLAMPED };

// What a product takes. The macro PRODUCT names the function of the kernel, with its template arguments; CTAS is
// how many CTAs a multiprocessor is to have room for.
//   x: [R, K] (gated) or [R * NUM_ACTIVE, K], bfloat16.
//   values: [E, weight rows, K] bfloat16, or [E, weight rows, K / 2] MXFP4 codes.
//   scales: [E, weight rows, K / 32], at most 128; of MXFP4. bias: [E, weight rows] bfloat16, or null.
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
  int num_rows, num_row_tiles;
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

// The expert of a tile of up to TILE_M rows: its number, the tile's first place in its list, and how many rows
// the tile has; 0 behind the last tile. All lanes of a warp get the same.
struct ExpertTile {
  int expert, first, num_rows;
};

template <int NUM_EXPERTS, int TILE_M>
__device__ __forceinline__ ExpertTile find_tile(const int* counts, int tile) {
  constexpr int EACH = (NUM_EXPERTS + 31) / 32;  // experts of a lane
  const int lane = threadIdx.x & 31;
  int count[EACH], num_tiles = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = lane * EACH + i;
    count[i] = expert < NUM_EXPERTS ? load_past_l1(counts + expert) : 0;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) num_tiles += (count[i] + TILE_M - 1) / TILE_M;
  int end = num_tiles;  // of the tiles of this lane's experts
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, end, distance);
    if (lane >= distance) end += before;
  }
  const u32 behind = __ballot_sync(~0u, end > tile);
  const int owner = behind == 0 ? 31 : __ffs(behind) - 1;
  int first_tile = end - num_tiles, expert = 0, first = 0, num_rows = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int last = first_tile + (count[i] + TILE_M - 1) / TILE_M;
    if (tile >= first_tile && tile < last) {
      expert = lane * EACH + i;
      first = (tile - first_tile) * TILE_M;
      num_rows = min(count[i] - first, TILE_M);
    }
    first_tile = last;
  }
  return {__shfl_sync(~0u, expert, owner), __shfl_sync(~0u, first, owner), __shfl_sync(~0u, num_rows, owner)};
}

// A CTA computes MT * 16 rows of the weight for up to NT * 8 pairs of one expert. N: columns of the output; K:
// inner dimension. DEPTH: chunks of a warp that are loaded ahead. Grid: weight tiles times row tiles, in bands
// of 8 weight tiles, so that the tiles of an expert's rows run together.
template <int FORMAT, int EPILOGUE, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE, int MT, int NT, int DEPTH>
__device__ __forceinline__ void multiply_experts(const Arguments& a) {
  constexpr bool IS_GATED = EPILOGUE != SHARES;
  constexpr int ROWS = MT * 16, COLUMNS = IS_GATED ? ROWS / 2 : ROWS, TILE_M = NT * 8;
  constexpr int WEIGHT_ROWS = IS_GATED ? 2 * N : N, NUM_TILES = (N + COLUMNS - 1) / COLUMNS, BAND = 8;
  constexpr int LANE_COLUMNS = FORMAT == MXFP4 ? 32 : 8, CHUNK = 4 * LANE_COLUMNS;  // columns
  constexpr int NUM_CHUNKS = (K + CHUNK - 1) / CHUNK, ROUNDS = (NUM_CHUNKS + WARPS - 1) / WARPS;
  constexpr int BUFFERED = DEPTH < ROUNDS ? DEPTH : ROUNDS;
  constexpr i64 ROW_BYTES = FORMAT == MXFP4 ? K / 2 : 2 * K;
  constexpr int STRIDE = TILE_M + 1;  // floats of a weight row in shared memory
  __shared__ float parts[WARPS * ROWS * STRIDE];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int band = blockIdx.x / (BAND * a.num_row_tiles) * BAND, place = blockIdx.x % (BAND * a.num_row_tiles);
  const int band_size = min(NUM_TILES - band, BAND), tile_n = band + place % band_size;

  if (IS_GATED) wait_for_producers();  // the kernel before lists the rows
  const ExpertTile tile = find_tile<NUM_EXPERTS, TILE_M>(a.counts, place / band_size);
  if (tile.num_rows == 0) {
    if (!IS_GATED) wait_for_producers();
    return;
  }

  int pair[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const bool is_row = n * 8 + g < tile.num_rows;
    const int* from = a.pairs + static_cast<i64>(tile.expert) * a.num_rows + tile.first + n * 8 + g;
    pair[n] = is_row ? load_past_l1(from) : -1;
  }
  // The row of the weight, in its expert's matrix, that lane (g, t) has of tile m, half h.
  auto weight_row = [&](int m, int h) {
    const int row = EPILOGUE == SILU ? (m < MT / 2 ? 0 : N) + tile_n * COLUMNS + m % (MT / 2) * 16 + h * 8 + g
                                     : tile_n * ROWS + m * 16 + h * 8 + g;
    return min(row, WEIGHT_ROWS - 1);
  };
  uint4 words[BUFFERED][MT][2];
  u32 scales[BUFFERED][MT][2];
  auto load = [&](int slot, int round) {
    const int chunk = round * WARPS + warp;
    const bool is_inner = chunk * CHUNK + t * LANE_COLUMNS < K;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const i64 row = static_cast<i64>(tile.expert) * WEIGHT_ROWS + weight_row(m, h);
        const u8* from = a.values + row * ROW_BYTES + chunk * 64 + t * 16;
        words[slot][m][h] = is_inner ? load_weights(from) : make_uint4(0, 0, 0, 0);
        if (FORMAT == MXFP4) scales[slot][m][h] = is_inner ? a.scales[row * (K / 32) + chunk * 4 + t] : 0;
      }
  };
#pragma unroll
  for (int round = 0; round < BUFFERED; round++) load(round, round);
  if (!IS_GATED) wait_for_producers();

  float sum[MT][NT][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[m][n][e] = 0.f;

#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const int column = (round * WARPS + warp) * CHUNK + t * LANE_COLUMNS, slot = round % BUFFERED;
    uint4 w[MT][2];
    u32 factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        w[m][h] = words[slot][m][h];
        if (FORMAT == MXFP4) factor[m][h] = block_factor(scales[slot][m][h]);
      }
    if (round + BUFFERED < ROUNDS) load(slot, round + BUFFERED);
    uint4 x[NT][LANE_COLUMNS / 8];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < LANE_COLUMNS / 8; i++) {
        const i64 row = IS_GATED ? pair[n] / NUM_ACTIVE : pair[n];
        const bool is_read = pair[n] >= 0 && column < K;
        x[n][i] = is_read ? *reinterpret_cast<const uint4*>(a.x + row * K + column + i * 8) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 8; i++) {  // words of MXFP4; for bfloat16 one round
#pragma unroll
      for (int m = 0; m < MT; m++) {
        u32 f[2][4];  // of rows g and g + 8: pairs of columns
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (FORMAT == MXFP4) {
            const u32 word = reinterpret_cast<const u32*>(&w[m][h])[i], upper = word >> 8;
            f[h][0] = numbers<0>(word, factor[m][h]);   // columns 0 and 4 of 8
            f[h][1] = numbers<4>(word, factor[m][h]);   // 1 and 5
            f[h][2] = numbers<0>(upper, factor[m][h]);  // 2 and 6
            f[h][3] = numbers<4>(upper, factor[m][h]);  // 3 and 7
          } else {
            f[h][0] = w[m][h].x, f[h][1] = w[m][h].y, f[h][2] = w[m][h].z, f[h][3] = w[m][h].w;
          }
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint4 v = x[n][i];
          u32 b[4];
          if (FORMAT == MXFP4) {
            b[0] = __byte_perm(v.x, v.z, 0x5410), b[1] = __byte_perm(v.x, v.z, 0x7632);
            b[2] = __byte_perm(v.y, v.w, 0x5410), b[3] = __byte_perm(v.y, v.w, 0x7632);
          } else {
            b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
          }
          mma(sum[m][n], f[0][0], f[1][0], f[0][1], f[1][1], b[0], b[1]);
          mma(sum[m][n], f[0][2], f[1][2], f[0][3], f[1][3], b[2], b[3]);
        }
      }
    }
  }

  start_dependents();
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = m * 16 + (e >> 1) * 8 + g;
        parts[(warp * ROWS + row) * STRIDE + n * 8 + t * 2 + (e & 1)] = sum[m][n][e];
      }
  __syncthreads();

  // The product of a row of the tile with a row of the weight, plus its bias, rounded.
  auto product = [&](int row, int weight, int n) {
    float total = parts[row * STRIDE + n];
#pragma unroll
    for (int w = 1; w < WARPS; w++) total = __fadd_rn(total, parts[(w * ROWS + row) * STRIDE + n]);
    const i64 index = static_cast<i64>(tile.expert) * WEIGHT_ROWS + weight;
    if (a.bias != nullptr) total = __fadd_rn(total, from_bfloat16(a.bias[index]));
    return rounded(total);
  };
  for (int entry = threadIdx.x; entry < COLUMNS * tile.num_rows; entry += THREADS) {
    const int n = entry / COLUMNS, place = entry % COLUMNS, column = tile_n * COLUMNS + place;
    if (column >= N) continue;
    const int own = load_past_l1(a.pairs + static_cast<i64>(tile.expert) * a.num_rows + tile.first + n);
    if (EPILOGUE == SHARES) {
      const float share = a.shares[own];
      float* out = static_cast<float*>(a.out) + (static_cast<i64>(own % NUM_ACTIVE) * a.num_rows + own / NUM_ACTIVE) * N;
      out[column] = __fmul_rn(product(place, column, n), share);
      continue;
    }
    u16* out = static_cast<u16*>(a.out) + static_cast<i64>(own) * N;
    if (EPILOGUE == SILU) {
      const float gate = product(place, column, n), up = product(ROWS / 2 + place, N + column, n);
      const float activated = rounded(__fdiv_rn(gate, __fadd_rn(1.f, __expf(-gate))));
      out[column] = to_bfloat16(__fmul_rn(activated, up));
    } else {
      // Comparisons, so that NaN remains NaN. The activation is rounded once.
      float gate = product(2 * place, 2 * column, n), up = product(2 * place + 1, 2 * column + 1, n);
      gate = gate > a.limit ? a.limit : gate;
      up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
      const float swish = __fdiv_rn(gate, __fadd_rn(1.f, __expf(__fmul_rn(-a.alpha, gate))));
      out[column] = to_bfloat16(__fmul_rn(__fadd_rn(up, 1.f), swish));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    product(const u16* x, const u8* values, const u8* scales, const u16* bias, const int* counts, const int* pairs,
            const float* shares, void* out, float alpha, float limit, int num_rows, int num_row_tiles) {
  PRODUCT({x, values, scales, bias, counts, pairs, shares, out, alpha, limit, num_rows, num_row_tiles});
}
