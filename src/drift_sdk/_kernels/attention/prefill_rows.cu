// A warpgroup's share of attention of prompts: its rows, and the pipeline of a tile of keys after another. Follows
// prefill_stages.cu and prefill_products.cu. The order in which a program adds tiles up is in exact_prefill.cu or
// prefill.cu.

constexpr float LOG2_E = 1.4426950408889634f;
#define NOTHING __int_as_float(0xff800000)  // -inf, the maximum of no scores

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// As Triton divides.
__device__ __forceinline__ float divided(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Two numbers as bfloat16, the first one in the low half.
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The rows of a warpgroup in a tile of rows, for a query head. A thread has numbers of two rows, `row` and row + 8: the
// elements 0 and 1, 2 and 3 of each fragment.
//   score: of the tile of keys that is taken, then probabilities. share: probabilities, rounded.
template <int WARPGROUPS, int STAGES> struct WarpgroupRows {
  const PrefillArguments& a;
  const Shared<WARPGROUPS, STAGES>& shared;
  const RowTile tile, rows;  // of the CTA, and those of them that this warpgroup has, maybe none
  const int head, value_share, warpgroup, thread, lane, row;
  Turn<STAGES>&keys, &values;
  u8* const queries;
  float score[KEYS / 8][4];
  u32 share[KEYS / 16][4];

  __device__ __forceinline__ WarpgroupRows(const PrefillArguments& a, const Shared<WARPGROUPS, STAGES>& shared,
                                           const RowTiles& tiles, int warpgroup, Turn<STAGES>& keys,
                                           Turn<STAGES>& values)
      : a(a), shared(shared), tile(tiles.tile), rows(tile.from(warpgroup * ROWS)), head(tiles.head),
        value_share(tiles.share), warpgroup(warpgroup), thread(threadIdx.x & 127), lane(threadIdx.x & 31),
        row(thread / 32 * 16 + lane / 4), keys(keys), values(values), queries(shared.queries(warpgroup)) {}

  __device__ __forceinline__ void load_queries() {
    const u16* const query = a.query + static_cast<u64>(rows.first_row) * a.query_stride + head * DIM;
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / 128; i++) {
      const int r = (i * 128 + thread) / PIECES, piece = thread % PIECES;
      uint4 numbers{0, 0, 0, 0};
      if (r < rows.num_rows)
        numbers = *reinterpret_cast<const uint4*>(query + static_cast<u64>(r) * a.query_stride + piece * 8);
      *reinterpret_cast<uint4*>(queries + place_of<ROWS>(r, piece)) = numbers;
    }
    fence_stores();
    sync_warpgroup(warpgroup);
  }

  // Starts the products of queries and the next tile of keys.
  __device__ __forceinline__ void start_scores() {
    wait_for_phase(shared.barrier(KEYS_FULL, keys.stage), keys.parity);
    const u32 queries_place = place_of_rows(queries), keys_place = place_of_rows(shared.keys(keys.stage));
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
      const u32 half = k >> 2, step = (k & 3) * 2;  // in units of 16 bytes
      multiply_keys(score, descriptor(queries_place + half * (QUERY_HALF_BYTES >> 4) + step),
                    descriptor(keys_place + half * (HALF_BYTES >> 4) + step), k > 0);
    }
    commit_wgmma();
  }

  __device__ __forceinline__ void end_scores() {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) keep(score[n]);
    if (lane == 0) arrive(shared.barrier(KEYS_EMPTY, keys.stage));
    keys.advance(1);
  }

  // Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void mask_scores(int key_tile) {
    const int first_key = key_tile * KEYS;
    const bool is_early = WINDOW > 0 && first_key <= rows.position + ROWS - 1 - WINDOW;
    if (first_key + KEYS <= rows.position + 1 && !is_early) return;
    const int seen = rows.position + row - first_key - lane % 4 * 2;  // the last column that the row sees
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int column = n * 8 + e % 2, last = seen + e / 2 * 8;
        if (column > last || (WINDOW > 0 && column <= last - WINDOW)) score[n][e] = NOTHING;
      }
  }

  // The highest score of row + 8 * h in fragments from `first` on.
  template <int NUM_FRAGMENTS> __device__ __forceinline__ float highest_score(int first, int h) const {
    float highest = score[first][2 * h];
#pragma unroll
    for (int n = first; n < first + NUM_FRAGMENTS; n++)
      highest = fmaxf(highest, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    return fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  }

  // Has the compiler compute a number that has no sign before what follows: probabilities, before the products of
  // values have ended.
  __device__ __forceinline__ void settle(u32 number) const {
    if (static_cast<int>(number) < 0) *shared.nowhere() = number;
  }

  // Rounds the probabilities of NUM times 16 keys, from `first` times 16 on.
  template <int NUM = KEYS / 16> __device__ __forceinline__ void round_probabilities(int first = 0) {
#pragma unroll
    for (int k = first; k < first + NUM; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        share[k][i] = pair_of(score[2 * k + i / 2][i % 2 * 2], score[2 * k + i / 2][i % 2 * 2 + 1]);
  }

  // Waits for the values of a tile. Those of keys that were never written become zeros, since 0 * NaN is NaN.
  __device__ __forceinline__ void wait_for_values(int key_tile) {
    wait_for_phase(shared.barrier(VALUES_FULL, values.stage), values.parity);
    const int num_valid = tile.num_keys() - key_tile * KEYS;
    if (num_valid >= KEYS) return;
#pragma unroll 1
    for (int i = thread; i < (KEYS - num_valid) * VALUE_PIECES; i += 128)
      *reinterpret_cast<uint4*>(shared.values(values.stage) +
                                place_of<KEYS>(num_valid + i / VALUE_PIECES, i % VALUE_PIECES)) = uint4{0, 0, 0, 0};
    fence_stores();
    sync_warpgroup(warpgroup);
  }

  // The place of values from a key of the tile on, see `values_at`.
  __device__ __forceinline__ u64 values_from(int key) const {
    return values_at(shared_address(shared.values(values.stage)) + key * ROW_BYTES);
  }

  __device__ __forceinline__ void end_values() {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) keep(share[k]);
    if (lane == 0) arrive(shared.barrier(VALUES_EMPTY, values.stage));
    values.advance(1);
  }

  // Lets the tiles of keys pass, of which this warpgroup needs none.
  __device__ __forceinline__ void pass_tiles() {
#pragma unroll 1
    for (int key_tile = tile.first_tile(); key_tile < tile.num_tiles(); key_tile++) {
      wait_for_phase(shared.barrier(KEYS_FULL, keys.stage), keys.parity);
      if (lane == 0) arrive(shared.barrier(KEYS_EMPTY, keys.stage));
      keys.advance(1);
      wait_for_phase(shared.barrier(VALUES_FULL, values.stage), values.parity);
      if (lane == 0) arrive(shared.barrier(VALUES_EMPTY, values.stage));
      values.advance(1);
    }
  }

  // The sink's share of the softmax, to which it adds no value.
  __device__ __forceinline__ void add_sink(float (&total)[NT][4], const float (&maximum)[2], float (&weight)[2]) const {
    if (a.sinks == nullptr) return;
    const float sink = __int_as_float(a.sinks[head] << 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = fmaxf(maximum[h], __fmul_rn(sink, LOG2_E));
      const float rescale = power_of_two(maximum[h] - highest);
      weight[h] = __fmaf_rn(weight[h], rescale, power_of_two(__fmaf_rn(sink, LOG2_E, -highest)));
#pragma unroll
      for (int n = 0; n < NT; n++) total[n][2 * h] *= rescale, total[n][2 * h + 1] *= rescale;
    }
  }

  // Stores total over weight, through shared memory, where the queries were: a thread has few neighbouring numbers.
  __device__ __forceinline__ void store(const float (&total)[NT][4], const float (&weight)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float divisor = row + 8 * h < rows.num_rows ? weight[h] : 1.0f;
#pragma unroll
      for (int n = 0; n < NT; n++)
        *reinterpret_cast<u32*>(queries + place_of<ROWS>(row + 8 * h, n) + lane % 4 * 4) =
            pair_of(divided(total[n][2 * h], divisor), divided(total[n][2 * h + 1], divisor));
    }
    sync_warpgroup(warpgroup);
    const int num_heads = a.num_kv_heads * a.group;
    u16* const out = a.out + (static_cast<u64>(rows.first_row) * num_heads + head) * DIM + value_share * VALUE_DIM;
#pragma unroll
    for (int i = 0; i < ROWS * VALUE_PIECES / 128; i++) {
      const int r = (i * 128 + thread) / VALUE_PIECES, piece = thread % VALUE_PIECES;
      if (r < rows.num_rows)
        *reinterpret_cast<uint4*>(out + static_cast<u64>(r) * num_heads * DIM + piece * 8) =
            *reinterpret_cast<const uint4*>(queries + place_of<ROWS>(r, piece));
    }
    sync_warpgroup(warpgroup);  // the next tile's queries take the place
  }
};
