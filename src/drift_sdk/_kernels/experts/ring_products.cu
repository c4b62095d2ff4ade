// Products of MXFP4 experts for a few rows each, from a ring of stages in shared memory: cuda_experts.py describes
// them. Follows common.cu, hopper.cu, expert_rows.cu, mxfp4.cu and expert_arguments.cu.
//
// A CTA goes through items: a tile of 16 rows of an expert's weight, and up to 8 of the expert's pairs. A tile is one
// piece of memory, and so are its scales. One warp copies tiles to the stages, several items ahead, and finishes the
// items; eight warps multiply. Each stage has two barriers:
//   full: ends a phase when the item's bytes have come. The eight warps wait for it.
//   done: ends a phase when the eight warps have read the stage and written their sums. The copying warp waits for
//     it, adds the sums, and then copies the item that is STAGES later to the stage.
//
// The 16 bytes of a lane (mxfp4.cu) are of rows 2 g and 2 g + 1 of a tile, which are the gate and up of a gated
// weight. With rows of 1,440 bytes, eight lanes that read together meet 32 different banks.
//
// Order of summation: that of expert_products.cu, with the same bits.

constexpr int TILE = 16;  // rows of a tile of the weight
constexpr int TILE_PAIRS = 8;
constexpr int BAND = 16;  // tiles of the weight, which all pairs of an expert meet before the next ones

// An item. is_first: its pairs are others than those of the item before. pair: -1 behind the last one.
struct Item {
  int expert, tile, num_pairs, is_first;
  int pair[TILE_PAIRS];
};

// What lies in shared memory.
template <int K, int STAGES> struct Ring {
  static constexpr int CODE_BYTES = TILE * K / 2, SCALE_BYTES = TILE * K / 32;
  static constexpr int STAGE_BYTES = CODE_BYTES + SCALE_BYTES;

  u8* shared;

  __device__ __forceinline__ u8* codes(int stage) const { return shared + stage * STAGE_BYTES; }
  __device__ __forceinline__ u8* scales(int stage) const { return codes(stage) + CODE_BYTES; }
  // The sums of each warp, as its lanes have them.
  __device__ __forceinline__ float4* sums(int stage, int warp) const {
    return reinterpret_cast<float4*>(codes(STAGES)) + (stage * WARPS + warp) * 32;
  }
  __device__ __forceinline__ Item* item(int stage) const { return reinterpret_cast<Item*>(sums(STAGES, 0)) + stage; }
  __device__ __forceinline__ u64* full(int stage) const { return reinterpret_cast<u64*>(item(STAGES)) + stage; }
  __device__ __forceinline__ u64* done(int stage) const { return full(STAGES + stage); }
  __device__ __forceinline__ int* num_items() const { return reinterpret_cast<int*>(done(STAGES)); }
};

// The items of all experts, in order: an expert's, band by band; a band's, by tiles of pairs. A CTA has some that
// follow each other, so that it reads few rows of x. All lanes of a warp have the same.
template <int NUM_EXPERTS, int NUM_TILES> struct Items {
  ExpertTiles<NUM_EXPERTS, TILE_PAIRS> tiles;
  int next, end;             // items of this CTA
  int expert, count, limit;  // the next item's expert, its number of pairs, and the item after its last one
  int tile, band, first;     // the next item's tile, the first tile of its band, and the place of its first pair

  __device__ __forceinline__ explicit Items(const int* counts) : tiles(counts) {
    const int num_items = tiles.num_tiles * NUM_TILES, cta = blockIdx.x, num_ctas = gridDim.x;
    const int each = num_items / num_ctas, more = num_items % num_ctas;
    next = cta * each + min(cta, more), end = next + each + (cta < more ? 1 : 0);
    if (next == end) return;
    const int place = next - enter_expert(next / NUM_TILES), band_items = num_pair_tiles() * BAND;
    band = place / band_items * BAND;
    const int size = min(BAND, NUM_TILES - band);
    tile = band + place % band_items % size, first = place % band_items / size * TILE_PAIRS;
  }

  __device__ __forceinline__ int num_pair_tiles() const { return (count + TILE_PAIRS - 1) / TILE_PAIRS; }

  // Enters the expert of a tile of pairs. Returns its first item.
  __device__ __forceinline__ int enter_expert(int pair_tile) {
    const int owner = __ffs(__ballot_sync(~0u, tiles.end_tile > pair_tile)) - 1;
    int from = tiles.first_tile, found = 0, pairs = 0, begin = 0;
#pragma unroll
    for (int i = 0; i < tiles.EACH; i++) {
      const int to = from + (tiles.count[i] + TILE_PAIRS - 1) / TILE_PAIRS;
      if (pair_tile >= from && pair_tile < to)
        found = (threadIdx.x & 31) * tiles.EACH + i, pairs = tiles.count[i], begin = from;
      from = to;
    }
    expert = __shfl_sync(~0u, found, owner), count = __shfl_sync(~0u, pairs, owner);
    begin = __shfl_sync(~0u, begin, owner) * NUM_TILES;
    limit = begin + num_pair_tiles() * NUM_TILES;
    return begin;
  }

  // Goes to the item after the next one. Returns whether its pairs are others.
  __device__ __forceinline__ bool advance() {
    if (++next == end) return false;
    if (++tile < min(band + BAND, NUM_TILES)) return false;
    first += TILE_PAIRS;
    const bool has_pairs = first < count;  // of the same band
    const bool has_others = has_pairs || count > TILE_PAIRS || next == limit;
    if (!has_pairs) first = 0, band += BAND;
    if (next == limit) band = 0, enter_expert(next / NUM_TILES);
    tile = band;
    return has_others;
  }
};

// The warp that copies, and finishes the items. A down projection copies the first ones before it waits.
template <bool IS_GATED, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE, int STAGES>
__device__ __forceinline__ void copy_and_finish(const Arguments& a, const Ring<K, STAGES>& ring) {
  constexpr int WEIGHT_ROWS = IS_GATED ? 2 * N : N;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  Items<NUM_EXPERTS, WEIGHT_ROWS / TILE> items(a.counts);
  const int num_items = items.end - items.next;
  int pair = -1;
  bool is_first = true;
  // Copies the next item to a stage.
  auto copy_next = [&](int stage) {
    const int num_pairs = min(items.count - items.first, TILE_PAIRS);
    if (is_first) {
      const int* pairs = a.pairs + static_cast<i64>(items.expert) * a.num_rows + items.first;
      pair = lane < num_pairs ? load_past_l1(pairs + lane) : -1;
    }
    Item& item = *ring.item(stage);
    if (lane == 0) {
      const i64 tile = static_cast<i64>(items.expert) * (WEIGHT_ROWS / TILE) + items.tile;
      copy_bytes(ring.codes(stage), a.values + tile * ring.CODE_BYTES, ring.CODE_BYTES, ring.full(stage));
      copy_bytes(ring.scales(stage), a.scales + tile * ring.SCALE_BYTES, ring.SCALE_BYTES, ring.full(stage));
      item.expert = items.expert, item.tile = items.tile, item.num_pairs = num_pairs, item.is_first = is_first;
    }
    if (lane < TILE_PAIRS) item.pair[lane] = pair;
    __syncwarp();
    if (lane == 0) arrive_expecting(ring.full(stage), ring.STAGE_BYTES);
    is_first = items.advance();
  };

  if (lane == 0) *ring.num_items() = num_items;
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) {
    if (stage < num_items) copy_next(stage);
    if (stage == 0) sync_first<THREADS + 32>();  // the first item is known
  }
  wait_for_producers();
  if (num_items <= STAGES) start_dependents();

#pragma unroll 1
  for (int i = 0, stage = 0, parity = 0; i < num_items; i++) {
    // This lane finishes rows 2 g and 2 g + 1 of the tile, for pairs 2 t and 2 t + 1.
    const Item& item = *ring.item(stage);
    const int num_pairs = item.num_pairs, tile = item.tile, own[2] = {item.pair[2 * t], item.pair[2 * t + 1]};
    float bias[2] = {};
    if (a.bias != nullptr)
#pragma unroll
      for (int h = 0; h < 2; h++)
        bias[h] = from_bfloat16(a.bias[static_cast<i64>(item.expert) * WEIGHT_ROWS + tile * TILE + 2 * g + h]);
    wait_for_phase(ring.done(stage), parity);
    float4 total = ring.sums(stage, 0)[lane];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) {
      const float4 sum = ring.sums(stage, warp)[lane];
      total.x = __fadd_rn(total.x, sum.x), total.y = __fadd_rn(total.y, sum.y);
      total.z = __fadd_rn(total.z, sum.z), total.w = __fadd_rn(total.w, sum.w);
    }
    __syncwarp();  // all lanes have read the item and the sums
    if (i + STAGES < num_items) copy_next(stage);
    if (i + STAGES + 1 == num_items) start_dependents();

    const float totals[2][2] = {{total.x, total.y}, {total.z, total.w}};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (2 * t + e >= num_pairs) continue;
      float value[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        value[h] = rounded(a.bias != nullptr ? __fadd_rn(totals[h][e], bias[h]) : totals[h][e]);
      if (IS_GATED) {
        static_cast<u16*>(a.out)[static_cast<i64>(own[e]) * N + tile * (TILE / 2) + g] = gated(a, value[0], value[1]);
      } else {
        const i64 row = static_cast<i64>(own[e] % NUM_ACTIVE) * a.num_rows + own[e] / NUM_ACTIVE;
        const float share = a.shares[own[e]];
        *reinterpret_cast<float2*>(static_cast<float*>(a.out) + row * N + tile * TILE + 2 * g) =
            make_float2(__fmul_rn(value[0], share), __fmul_rn(value[1], share));
      }
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// One of the warps that multiply. It has the rows of x of its columns in registers, as B operands.
template <bool IS_GATED, int K, int NUM_ACTIVE, int STAGES>
__device__ __forceinline__ void multiply_items(const Arguments& a, const Ring<K, STAGES>& ring) {
  constexpr int NUM_CHUNKS = (K + CHUNK - 1) / CHUNK, ROUNDS = (NUM_CHUNKS + WARPS - 1) / WARPS;
  constexpr int TURN = WARPS * CHUNK, PIECES = LANE_COLUMNS / 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int column = warp * CHUNK + t * LANE_COLUMNS;  // this lane's first one
  auto is_inner = [&](int round) { return (round + 1) * TURN <= K || round * TURN + column < K; };
  const int num_items = *ring.num_items();
  u32 b[ROUNDS][PIECES][4];
#pragma unroll 1
  for (int i = 0, stage = 0, parity = 0; i < num_items; i++) {
    if (i > 0) wait_for_phase(ring.full(stage), parity);
    if (ring.item(stage)->is_first) {
      const int pair = ring.item(stage)->pair[g];
      const u16* row = a.x + static_cast<i64>(IS_GATED ? pair / NUM_ACTIVE : pair) * K + column;
#pragma unroll
      for (int round = 0; round < ROUNDS; round++)
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
          uint4 x = make_uint4(0, 0, 0, 0);
          if (is_inner(round) && pair >= 0) x = *reinterpret_cast<const uint4*>(row + round * TURN + piece * 8);
          arrange(b[round][piece], x);
        }
    }
    if (i == 0) wait_for_phase(ring.full(stage), parity);  // the item itself was known before

    float sum[4] = {};
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      uint4 words[2];
      u32 factor[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u8* codes = ring.codes(stage) + (2 * g + h) * (K / 2) + (round * TURN + column) / 2;
        const u8* scales = ring.scales(stage) + (2 * g + h) * (K / 32) + (round * TURN + column) / 32;
        words[h] = is_inner(round) ? *reinterpret_cast<const uint4*>(codes) : make_uint4(0, 0, 0, 0);
        factor[h] = block_factor(is_inner(round) ? *scales : 0);
      }
#pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        u32 f[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) fragments(f[h], reinterpret_cast<const u32*>(&words[h])[piece], factor[h]);
        add_products(sum, f, b[round][piece]);
      }
    }
    ring.sums(stage, warp)[lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncwarp();
    if (lane == 0) arrive(ring.done(stage));
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// N: columns of the output; K: inner dimension. Grid: any number of CTAs of THREADS + 32 threads.
template <bool IS_GATED, int N, int K, int NUM_EXPERTS, int NUM_ACTIVE, int STAGES>
__device__ __forceinline__ void multiply_experts_by_ring(const Arguments& a) {
  static_assert((IS_GATED ? 2 * N : N) % TILE == 0 && K % 32 == 0, "tiles are whole, and copies multiples of 16 bytes");
  extern __shared__ __align__(128) u8 shared[];
  const Ring<K, STAGES> ring{shared};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(ring.full(stage), 1);
      init_barrier(ring.done(stage), WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  const bool copies = threadIdx.x >= THREADS;
  if (IS_GATED || !copies) wait_for_producers();  // rows of a gated product are listed right before
  if (copies) {
    copy_and_finish<IS_GATED, N, K, NUM_EXPERTS, NUM_ACTIVE, STAGES>(a, ring);
    return;
  }
  sync_first<THREADS + 32>();
  multiply_items<IS_GATED, K, NUM_ACTIVE, STAGES>(a, ring);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, CTAS)
    product(const u16* x, const u8* values, const u8* scales, const u16* bias, const int* counts, const int* pairs,
            const float* shares, void* out, float alpha, float limit, int num_rows) {
  PRODUCT({x, values, scales, bias, counts, pairs, shares, out, alpha, limit, num_rows});
}
