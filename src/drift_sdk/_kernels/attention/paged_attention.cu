// Sums of partitions of keys, for a few query rows of each sequence: cuda_attention.py describes it. Follows types.cu,
// dependent_launch.cu and hopper.cu.
//
// Macros: DIM, of a head (64 or 128). ROWS_PER_SEQUENCE and GROUP: rows of a sequence, and query heads that share a KV
// head. COMPANIONS: sequences that may share a tile. NARROW, NARROW_END, NUM_DOUBLINGS: of partitions, which consist
// of whole tiles. NUM_STAGES: tiles of keys and values in shared memory. EARLY_TILES: see `attend`.
//
// A "query row" is one row of the step with one query head of the group.

constexpr int WARPS = 4, KEYS = 64;                      // of a CTA; of a tile
constexpr int QUERY_ROWS = ROWS_PER_SEQUENCE * GROUP;        // of a sequence
constexpr int HALVES = QUERY_ROWS * COMPANIONS > 8 ? 2 : 1;  // groups of 8 query rows that are in use
constexpr int PIECES = DIM / 8;                              // of a row of the cache, 16 bytes each
constexpr int TILE_BYTES = KEYS * DIM * 2;
constexpr int NT = DIM / 8 / WARPS;     // fragments of 8 dimensions of a warp
constexpr int SCORE_STRIDE = KEYS + 8;  // numbers from row to row: without conflicts
constexpr u32 ONES = 0x3f803f80;        // two numbers of bfloat16
#define NOTHING __int_as_float(0xff800000)  // -inf, the maximum of no scores

// What the kernel takes. The tensors are those of `_attend` in paged_attention.py.
struct Arguments {
  const u16 *query, *keys, *values;
  const int *block_table, *row_slot, *row_position, *tiles, *num_tiles;
  float *sums, *maxima, *weights;
  float scale;  // of scores, times log2(e)
  int num_partitions, max_blocks, num_kv_heads, block_bits;  // block_bits: log2 of the keys of a block
};

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers as bfloat16, the first one in the low half.
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Starts a copy of 16 bytes, or of zeros.
__device__ __forceinline__ void copy_piece(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the newest groups of copies of this thread are under way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A tile of the plan's list: the first words of an entry. No entry: first_key is -1.
struct Tile {
  int sequence, slot, num_keys, first_key;

  __device__ __forceinline__ bool has_rows_of(const Tile& other) const {
    return sequence == other.sequence && num_keys == other.num_keys;
  }
};

// An entry of the plan's list, which is read before earlier kernels have ended.
__device__ __forceinline__ Tile load_tile(const int* tiles, int index, int end) {
  Tile tile{-1, 0, 0, -1};
  if (index < end)
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.sequence), "=r"(tile.slot), "=r"(tile.num_keys), "=r"(tile.first_key)
                 : "l"(tiles + 8 * static_cast<u64>(index)));
  return tile;
}

// The partition that a position lies in: its index, its first position, and that of the next one.
struct Partition {
  int index, start, end;

  __device__ __forceinline__ explicit Partition(int position) {
    int doublings = 0;
#pragma unroll
    for (int i = 0; i < NUM_DOUBLINGS; i++) doublings += position >= NARROW_END << i;
    const int number = (position >> doublings) / NARROW;
    index = number + doublings * (NARROW_END / NARROW / 2);
    start = number * NARROW << doublings;
    end = (number + 1) * NARROW << doublings;
  }
};

// The first entry from `index` on at which a partition starts.
__device__ __forceinline__ int next_partition(const int* tiles, int index, int num_tiles) {
  const Tile tile = load_tile(tiles, index, num_tiles);
  if (tile.first_key < 0) return index;
  const Partition partition(tile.first_key);
  if (tile.first_key == partition.start) return index;
  return index + (min(partition.end, tile.num_keys) - tile.first_key + KEYS - 1) / KEYS;
}

// The query row of a sequence that row lane / 4 + 8 * h of a tile is.
__device__ __forceinline__ int query_row(int h) { return ((threadIdx.x & 31) / 4 + 8 * h) % QUERY_ROWS; }

// The query rows of a tile. A thread has numbers of rows lane / 4 and lane / 4 + 8.
struct QueryRows {
  u32 query[DIM / 16][4];
  int sequence[HALVES], last[HALVES];  // -1: no row; the last position that a row sees, -1: none

  // Loads which sequences and positions the rows have, of the entry of an index.
  __device__ __forceinline__ void find(const Arguments& a, const Tile& tile, int index) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const int place = lane / 4 + 8 * h, companion = place / QUERY_ROWS;
      sequence[h] = companion == 0 ? tile.sequence : -1;
      if (COMPANIONS > 1 && companion < COMPANIONS)
        sequence[h] = load_past_l1(a.tiles + 8 * static_cast<u64>(index) + 4 + companion);
      last[h] = -1;
      if (sequence[h] >= 0 && load_past_l1(a.row_slot + row(h)) >= 0) last[h] = load_past_l1(a.row_position + row(h));
    }
  }

  __device__ __forceinline__ int row(int h) const { return sequence[h] * ROWS_PER_SEQUENCE + query_row(h) / GROUP; }

  // The first position that a live row of the step has, in any thread of the warp: the keys before it are older.
  __device__ __forceinline__ int first_position() const {
    u32 first = static_cast<u32>(last[0]);  // -1 is the highest number
    if (HALVES == 2) first = min(first, static_cast<u32>(last[HALVES - 1]));
    return static_cast<int>(__reduce_min_sync(~0u, first) & 0x7fffffff);
  }

  __device__ __forceinline__ void load(const Arguments& a, int head) {
    const int column = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) query[k][i] = 0;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      if (last[h] < 0) continue;
      const u64 heads = (static_cast<u64>(row(h)) * a.num_kv_heads + head) * GROUP + query_row(h) % GROUP;
      const u32* const from = reinterpret_cast<const u32*>(a.query + heads * DIM + column);
#pragma unroll
      for (int k = 0; k < DIM / 16; k++) query[k][h] = from[k * 8], query[k][h + 2] = from[k * 8 + 4];
    }
  }
};

// The keys of a tile in the cache, as a thread copies them: where its first piece lies, in numbers, and how many keys
// there are; 0: no tile.
struct Place {
  u64 offset;
  int num_keys;
};

// The shared memory of a CTA: NUM_STAGES tiles of keys, and of values, and the scores of two tiles, [16, SCORE_STRIDE].
struct Shared {
  u8* base;

  __device__ __forceinline__ u8* keys(int stage) const { return base + stage * TILE_BYTES; }
  __device__ __forceinline__ u8* values(int stage) const { return keys(NUM_STAGES + stage); }
  __device__ __forceinline__ float* scores(int parity) const {
    return reinterpret_cast<float*>(keys(2 * NUM_STAGES)) + parity * 16 * SCORE_STRIDE;
  }
};

constexpr int STEP = WARPS * 32 / PIECES;  // rows from a thread's piece of a tile to its next one, a multiple of 8

// The block of the cache in which a tile lies.
__device__ __forceinline__ int block_of(const Arguments& a, const Tile& tile) {
  if (tile.first_key < 0) return 0;
  return load_past_l1(a.block_table + static_cast<u64>(tile.slot) * a.max_blocks + (tile.first_key >> a.block_bits));
}

__device__ __forceinline__ Place place_of(const Arguments& a, const Tile& tile, int block, int head) {
  if (tile.first_key < 0) return {0, 0};
  const int in_block = tile.first_key & ((1 << a.block_bits) - 1);
  const u64 row = (static_cast<u64>(block) * a.num_kv_heads + head << a.block_bits) + in_block + threadIdx.x / PIECES;
  return {row * DIM + threadIdx.x % PIECES * 8, min(tile.num_keys - tile.first_key, KEYS)};
}

// Starts the copies of a tile of keys or values. Keys that do not exist become zeros.
__device__ __forceinline__ void start_copy(u8* to, const u16* cache, const Place& place) {
  if (place.num_keys == 0) return;
  const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  const u32 own = shared_address(to) + row * (DIM * 2) + ((piece ^ (row & 7)) << 4);
  const u16* const from = cache + place.offset;
  if (place.num_keys == KEYS) {
#pragma unroll
    for (int i = 0; i < KEYS / STEP; i++) copy_piece(own + i * STEP * DIM * 2, from + i * STEP * DIM, true);
    return;
  }
#pragma unroll
  for (int i = 0; i < KEYS / STEP; i++)
    copy_piece(own + i * STEP * DIM * 2, from + i * STEP * DIM, row + i * STEP < place.num_keys);
}

// The sums of a partition: of rows lane / 4 and lane / 4 + 8, and NT * 8 dimensions of each warp.
struct Sums {
  float total[NT][4], weight[4], maximum[HALVES];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) weight[e] = 0.0f;
#pragma unroll
    for (int h = 0; h < HALVES; h++) maximum[h] = NOTHING;
  }

  // Takes the scores of a tile, [16, SCORE_STRIDE], in. They become probabilities, as the A operand of a product.
  __device__ __forceinline__ void take_scores(const float* scores, float scale, u32 (&share)[KEYS / 16][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const float* const own = scores + (lane / 4 + 8 * h) * SCORE_STRIDE + lane % 4 * 2;
      float2 score[KEYS / 8];
      float high[KEYS / 8];
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        score[n] = *reinterpret_cast<const float2*>(own + n * 8);
        high[n] = fmaxf(score[n].x, score[n].y);
      }
#pragma unroll
      for (int half = KEYS / 16; half > 0; half /= 2)
#pragma unroll
        for (int n = 0; n < half; n++) high[n] = fmaxf(high[n], high[n + half]);
      float highest = fmaxf(high[0], __shfl_xor_sync(~0u, high[0], 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      const float new_maximum = fmaxf(maximum[h], __fmul_rn(highest, scale));
      const float reference = new_maximum == NOTHING ? 0.0f : new_maximum;
      const float rescale = power_of_two(maximum[h] - reference);
      maximum[h] = new_maximum;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
        share[n / 2][n % 2 * 2 + h] = pair_of(power_of_two(__fmaf_rn(score[n].x, scale, -reference)),
                                              power_of_two(__fmaf_rn(score[n].y, scale, -reference)));
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) total[n][e] = __fmul_rn(total[n][e], rescale);
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; e++) weight[e] = __fmul_rn(weight[e], rescale);
    }
    if (HALVES == 1)
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) share[k][1] = share[k][3] = 0;
  }

  __device__ __forceinline__ void add_values(const u32 (&share)[KEYS / 16][4], const u8* values) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, key = lane % 16;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      mma(weight, share[k], ONES, ONES);
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        const int piece = warp * NT + n + lane / 16;
        u32 value[4];
        load_transposed(value, shared_address(values) + (k * 16 + key) * (DIM * 2) + ((piece ^ (key & 7)) << 4));
        mma(total[n], share[k], value[0], value[1]);
        mma(total[n + 1], share[k], value[2], value[3]);
      }
    }
  }

  __device__ __forceinline__ void store(const Arguments& a, const int (&sequence)[HALVES], int head,
                                        int partition) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      if (sequence[h] < 0) continue;
      const u64 first = (static_cast<u64>(sequence[h]) * a.num_kv_heads + head) * a.num_partitions + partition;
      const u64 place = first * QUERY_ROWS + query_row(h);
      float* const to = a.sums + place * DIM + warp * (NT * 8) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < NT; n++)
        *reinterpret_cast<float2*>(to + n * 8) = float2{total[n][2 * h], total[n][2 * h + 1]};
      if (threadIdx.x % 4 == 0 && warp == 0) a.maxima[place] = maximum[h], a.weights[place] = weight[2 * h];
    }
  }
};

// Scores of the query rows and of 16 keys of a tile in each warp, [16, SCORE_STRIDE]; -inf of keys that a row does
// not see.
__device__ __forceinline__ void compute_scores(const QueryRows& rows, const Tile& tile, const u8* keys, float* scores) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int key = warp * 16 + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
  float score[2][4] = {};
#pragma unroll
  for (int k = 0; k < DIM / 16; k++) {
    u32 numbers[4];
    load_matrices(numbers, shared_address(keys) + key * (DIM * 2) + (((2 * k + half) ^ (key & 7)) << 4));
    mma(score[0], rows.query[k], numbers[0], numbers[1]);
    mma(score[1], rows.query[k], numbers[2], numbers[3]);
  }
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int column = warp * 16 + n * 8 + lane % 4 * 2, seen = rows.last[h] - tile.first_key;
      const float2 pair{column <= seen ? score[n][2 * h] : NOTHING, column + 1 <= seen ? score[n][2 * h + 1] : NOTHING};
      *reinterpret_cast<float2*>(scores + (lane / 4 + 8 * h) * SCORE_STRIDE + column) = pair;
    }
}

// Grid: (KV heads, shares). A CTA has a share of the plan's tiles. It computes the scores of a tile together with the
// softmax and the values of the tile before: neither waits for the other. Copies run ahead of both, and entries of the
// list and of the block table ahead of the copies. Where shares have at most EARLY_TILES, dependents start at once.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3)
    attend(const u16* query, const u16* keys, const u16* values, const int* block_table, const int* row_slot,
           const int* row_position, const int* tiles, const int* num_tiles, float* sums, float* maxima, float* weights,
           float scale, int num_partitions, int max_blocks, int num_kv_heads, int block_bits) {
  const Arguments a{query, keys, values, block_table, row_slot, row_position, tiles, num_tiles, sums, maxima, weights,
                    scale, num_partitions, max_blocks, num_kv_heads, block_bits};
  extern __shared__ __align__(128) u8 memory[];
  const Shared shared{memory};
  const int head = blockIdx.x, share = blockIdx.y, num_shares = gridDim.y;
  const int num_listed = load_past_l1(a.num_tiles);
  const auto border = [&](int number) {
    const int index = static_cast<int>(static_cast<long long>(num_listed) * number / num_shares);
    return next_partition(a.tiles, index, num_listed);
  };
  int index = border(share);
  const int end = border(share + 1);

  Tile ahead[NUM_STAGES + 2];  // the tile whose values are added, and those after it
  Place place[NUM_STAGES];
#pragma unroll
  for (int i = 0; i < NUM_STAGES + 2; i++) ahead[i] = load_tile(a.tiles, index + i, end);
#pragma unroll
  for (int i = 0; i < NUM_STAGES; i++) place[i] = place_of(a, ahead[i], block_of(a, ahead[i]), head);
  int next_block = block_of(a, ahead[NUM_STAGES]);
  const auto start = [&](int i) {  // the copies of a tile at the start
    start_copy(shared.keys(i), a.keys, place[i]);
    if (i < NUM_STAGES - 1) start_copy(shared.values(i), a.values, place[i]);
    end_copies();
  };
  QueryRows rows;
  int num_started = 0;
  if (index < end) {
    rows.find(a, ahead[0], index);
    // Keys of earlier steps, which no kernel of this step writes.
    const int first_position = rows.first_position();
#pragma unroll
    for (int i = 0; i < NUM_STAGES; i++) {
      const bool is_old = ahead[i].has_rows_of(ahead[0]) && ahead[i].first_key + KEYS <= first_position;
      if (num_started != i || !is_old) continue;
      start(i);
      num_started++;
    }
  }
  wait_for_producers();
  if (num_listed <= EARLY_TILES * num_shares) start_dependents();
  if (index >= end) return;
#pragma unroll
  for (int i = 0; i < NUM_STAGES; i++)
    if (i >= num_started) start(i);
  rows.load(a, head);
  Place last_place = place[NUM_STAGES - 1];
  int stage = 0, parity = 0, sequence[HALVES], partition_end;
  Sums partition;
  const auto begin_partition = [&](const Tile& tile) {
    partition.clear();
    partition_end = min(Partition(tile.first_key).end, tile.num_keys);
#pragma unroll
    for (int h = 0; h < HALVES; h++) sequence[h] = rows.sequence[h];
  };
  begin_partition(ahead[0]);
  wait_for_copies<NUM_STAGES - 1>();
  __syncthreads();
  compute_scores(rows, ahead[0], shared.keys(0), shared.scores(0));
#pragma unroll 1
  for (; index < end; index++) {
    const Tile tile = ahead[0];
    const int next_stage = stage + 1 == NUM_STAGES ? 0 : stage + 1;
    wait_for_copies<NUM_STAGES - 2>();
    // The next tile's keys, this one's values and scores are there, and all warps have done with what was before.
    __syncthreads();
    const Place new_place = place_of(a, ahead[NUM_STAGES], next_block, head);
    start_copy(shared.keys(stage), a.keys, new_place);
    start_copy(shared.values(stage == 0 ? NUM_STAGES - 1 : stage - 1), a.values, last_place);
    end_copies();
    last_place = new_place;
    next_block = block_of(a, ahead[NUM_STAGES + 1]);
#pragma unroll
    for (int i = 0; i < NUM_STAGES + 1; i++) ahead[i] = ahead[i + 1];
    ahead[NUM_STAGES + 1] = load_tile(a.tiles, index + NUM_STAGES + 2, end);
    if (ahead[0].first_key >= 0 && !ahead[0].has_rows_of(tile)) {
      rows.find(a, ahead[0], index + 1);
      rows.load(a, head);
    }

    u32 probabilities[KEYS / 16][4];
    compute_scores(rows, ahead[0], shared.keys(next_stage), shared.scores(parity ^ 1));  // of no tile: not read
    partition.take_scores(shared.scores(parity), a.scale, probabilities);
    partition.add_values(probabilities, shared.values(stage));
    if (tile.first_key + KEYS >= partition_end) {
      partition.store(a, sequence, head, Partition(tile.first_key).index);
      begin_partition(ahead[0]);
    }
    stage = next_stage;
    parity ^= 1;
  }
}
