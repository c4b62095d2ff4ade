// Attention of prompt chunks over a paged cache, with the bits of decoding: cuda_prefill.py describes it. Follows
// dependent_launch.cu, hopper.cu, prefill_stages.cu and prefill_products.cu.
// Macros: DIM, of a head (64 or 128); NARROW, NARROW_END, WIDE: of partitions.
//
// A CTA has WARPGROUPS times 64 rows of a chunk, for a query head, and a warpgroup for every 64. One more warp copies
// tiles of 64 keys and of their values to shared memory, up to STAGES ahead. A warpgroup starts the products of its
// queries with the next keys together with those of its probabilities with the values before, and computes the softmax
// of the former while the latter are under way.
//
// Order of summation: that of online_softmax.py.

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

// The softmax of a thread's two rows: of the partition, and of all partitions before it.
struct Softmax {
  float maximum[2], all_maximum[2], all_weight[2];
};

// Attention of the rows of a warpgroup, of which there may be none: `rows` of a tile that sees `num_keys` keys.
template <int WARPGROUPS, int STAGES>
__device__ __forceinline__ void attend_rows(const PrefillArguments& a, const Shared<WARPGROUPS, STAGES>& shared,
                                            const RowTile& rows, int num_keys, int warpgroup, Turn<STAGES>& keys,
                                            Turn<STAGES>& values) {
  const int head = blockIdx.x, thread = threadIdx.x & 127, lane = thread & 31;
  const int row = thread / 32 * 16 + lane / 4;  // and row + 8
  const int num_heads = a.num_kv_heads * a.group;
  u8* const queries = shared.queries(warpgroup);

  const u16* const query = a.query + static_cast<u64>(rows.first_row) * a.query_stride + head * DIM;
#pragma unroll
  for (int i = 0; i < ROWS * PIECES / 128; i++) {
    const int r = (i * 128 + thread) / PIECES, piece = thread % PIECES;
    uint4 numbers{0, 0, 0, 0};
    if (r < rows.num_rows)
      numbers = *reinterpret_cast<const uint4*>(query + static_cast<u64>(r) * a.query_stride + piece * 8);
    *reinterpret_cast<uint4*>(queries + place_of(r, piece)) = numbers;
  }
  fence_stores();
  sync_warpgroup(warpgroup);

  const int own_tiles = rows.num_rows > 0 ? rows.num_tiles() : 0;
  const u32 queries_place = place_of_rows(queries);
  const u64 ones = descriptor(place_of_rows(shared.ones()));
  float score[8][4], part[NT][4], total[NT][4], weight[4];
  u32 share[4][4];
  Softmax softmax;
#pragma unroll
  for (int h = 0; h < 2; h++)
    softmax.maximum[h] = softmax.all_maximum[h] = NOTHING, softmax.all_weight[h] = 0.0f;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) total[n][e] = 0.0f, part[n][e] = 0.0f;
#pragma unroll
  for (int e = 0; e < 4; e++) weight[e] = 0.0f;

  auto start_scores = [&]() {
    wait_for_phase(shared.barrier(KEYS_FULL, keys.stage), keys.parity);
    const u32 place = place_of_rows(shared.keys(keys.stage));
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
      const u32 step = (k >> 2) * (HALF_BYTES >> 4) + (k & 3) * 2;
      multiply_keys(score, descriptor(queries_place + step), descriptor(place + step), k > 0);
    }
    commit_wgmma();
  };
  auto end_scores = [&]() {
#pragma unroll
    for (int n = 0; n < 8; n++) keep(score[n]);
    if (lane == 0) arrive(shared.barrier(KEYS_EMPTY, keys.stage));
    keys.advance(1);
  };
  // Values of a tile; is_first: of a partition.
  auto start_values = [&](int tile, bool is_first) {
    wait_for_phase(shared.barrier(VALUES_FULL, values.stage), values.parity);
    u8* const tile_values = shared.values(values.stage);
    const int num_valid = num_keys - tile * KEYS;
    if (num_valid < KEYS) {  // of keys that were never written: zeros, since 0 * NaN is NaN
#pragma unroll 1
      for (int i = thread; i < (KEYS - num_valid) * PIECES; i += 128)
        *reinterpret_cast<uint4*>(tile_values + place_of(num_valid + i / PIECES, i % PIECES)) = uint4{0, 0, 0, 0};
      fence_stores();
      sync_warpgroup(warpgroup);
    }
    const u32 address = shared_address(tile_values);
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_ones(weight, share[k], ones, k > 0 || !is_first);
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_values(part, share[k], values_at(address + k * 16 * 128), k > 0 || !is_first);
    commit_wgmma();
  };
  auto end_values = [&]() {
#pragma unroll
    for (int n = 0; n < NT; n++) keep(part[n]);
    keep(weight);
#pragma unroll
    for (int k = 0; k < 4; k++) keep(share[k]);
    if (lane == 0) arrive(shared.barrier(VALUES_EMPTY, values.stage));
    values.advance(1);
  };
  // The partition's sums, added to those before.
  auto add_partition = [&](const float (&maximum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = fmaxf(softmax.all_maximum[h], maximum[h]);
      const float reference = highest == NOTHING ? 0.0f : highest;
      const float rescale = power_of_two(softmax.all_maximum[h] - reference);
      const float factor = power_of_two(maximum[h] - reference);
      softmax.all_weight[h] = __fmaf_rn(weight[2 * h], factor, __fmul_rn(softmax.all_weight[h], rescale));
      softmax.all_maximum[h] = highest;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++)
          total[n][e] = __fmaf_rn(part[n][e], factor, __fmul_rn(total[n][e], rescale));
    }
  };
  // Whether a partition ends behind a tile.
  auto is_last = [&](int tile) {
    const int end = (tile + 1) * KEYS;
    return end <= NARROW_END ? end % NARROW == 0 : (end - NARROW_END) % WIDE == 0;
  };
  // The softmax of a tile's scores, which become probabilities. rescale: of the partition's sums before.
  auto take_scores = [&](int tile, float (&rescale)[2]) {
    const int first_key = tile * KEYS;
    if (first_key + KEYS > rows.position + 1) {
      const int seen = rows.position + row - first_key - lane % 4 * 2;  // the last column that the row sees
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (n * 8 + e % 2 > seen + e / 2 * 8) score[n][e] = NOTHING;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float highest = score[0][2 * h];
#pragma unroll
      for (int n = 0; n < 8; n++) highest = fmaxf(highest, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      const float maximum = fmaxf(softmax.maximum[h], __fmul_rn(highest, a.scale));
      const float reference = maximum == NOTHING ? 0.0f : maximum;
      rescale[h] = power_of_two(softmax.maximum[h] - reference);
      softmax.maximum[h] = maximum;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++)
          score[n][e] = power_of_two(__fmaf_rn(score[n][e], a.scale, -reference));
    }
  };
  auto round_scores = [&]() {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        share[k][i] = pair_of(score[2 * k + i / 2][i % 2 * 2], score[2 * k + i / 2][i % 2 * 2 + 1]);
  };

  if (own_tiles > 0) {
    float rescale[2];
    start_scores();
    wait_for_wgmma<0>();
    end_scores();
    take_scores(0, rescale);
    round_scores();
    bool is_first = true;
#pragma unroll 1
    for (int tile = 0; tile + 1 < own_tiles; tile++) {
      start_scores();
      start_values(tile, is_first);
      wait_for_wgmma<1>();
      end_scores();
      is_first = is_last(tile);
      const float maximum[2] = {softmax.maximum[0], softmax.maximum[1]};
      if (is_first) softmax.maximum[0] = softmax.maximum[1] = NOTHING;
      take_scores(tile + 1, rescale);
      // No probability has a sign. Without this condition, which needs all of them, the compiler waits for the values
      // before it computes the softmax.
      u32 signs = 0;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) signs |= __float_as_uint(score[n][e]);
      if (static_cast<int>(signs) < 0) *reinterpret_cast<u32*>(shared.ones()) = 0;
      wait_for_wgmma<0>();
      end_values();
      if (is_first) {
        add_partition(maximum);
      } else {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) part[n][e] = __fmul_rn(part[n][e], rescale[e / 2]);
#pragma unroll
        for (int e = 0; e < 4; e++) weight[e] = __fmul_rn(weight[e], rescale[e / 2]);
      }
      round_scores();
    }
    start_values(own_tiles - 1, is_first);
    wait_for_wgmma<0>();
    end_values();
    add_partition(softmax.maximum);
  }

  // Tiles of keys that only other warpgroups see.
#pragma unroll 1
  for (int tile = own_tiles; tile < (num_keys + KEYS - 1) / KEYS; tile++) {
    wait_for_phase(shared.barrier(KEYS_FULL, keys.stage), keys.parity);
    if (lane == 0) arrive(shared.barrier(KEYS_EMPTY, keys.stage));
    keys.advance(1);
    wait_for_phase(shared.barrier(VALUES_FULL, values.stage), values.parity);
    if (lane == 0) arrive(shared.barrier(VALUES_EMPTY, values.stage));
    values.advance(1);
  }
  if (own_tiles == 0) return;

  if (a.sinks != nullptr) {
    const float sink = __fmul_rn(__int_as_float(a.sinks[head] << 16), LOG2_E);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = fmaxf(softmax.all_maximum[h], sink);
      const float rescale = power_of_two(softmax.all_maximum[h] - highest);
      softmax.all_weight[h] = __fmaf_rn(softmax.all_weight[h], rescale, power_of_two(sink - highest));
#pragma unroll
      for (int n = 0; n < NT; n++) total[n][2 * h] *= rescale, total[n][2 * h + 1] *= rescale;
    }
  }
  // Through shared memory, where the queries were: a thread has few neighbouring numbers of a row.
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float divisor = row + 8 * h < rows.num_rows ? softmax.all_weight[h] : 1.0f;
#pragma unroll
    for (int n = 0; n < NT; n++)
      *reinterpret_cast<u32*>(queries + place_of(row + 8 * h, n) + lane % 4 * 4) =
          pair_of(divided(total[n][2 * h], divisor), divided(total[n][2 * h + 1], divisor));
  }
  sync_warpgroup(warpgroup);
  u16* const out = a.out + (static_cast<u64>(rows.first_row) * num_heads + head) * DIM;
#pragma unroll
  for (int i = 0; i < ROWS * PIECES / 128; i++) {
    const int r = (i * 128 + thread) / PIECES, piece = thread % PIECES;
    if (r < rows.num_rows)
      *reinterpret_cast<uint4*>(out + static_cast<u64>(r) * num_heads * DIM + piece * 8) =
          *reinterpret_cast<const uint4*>(queries + place_of(r, piece));
  }
  sync_warpgroup(warpgroup);  // the next tile's queries take the place
}

template <int WARPGROUPS, int STAGES, int COPY_REGISTERS, int REGISTERS>
__device__ __forceinline__ void attend(const PrefillArguments& a, const TensorMap* keys_map,
                                       const TensorMap* values_map) {
  extern __shared__ __align__(1024) u8 memory[];
  const Shared<WARPGROUPS, STAGES> shared{memory};
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same in a warp, for the compiler
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(shared.barrier(KEYS_FULL, stage), 1);
      init_barrier(shared.barrier(VALUES_FULL, stage), 1);
      init_barrier(shared.barrier(KEYS_EMPTY, stage), WARPGROUPS * 4);
      init_barrier(shared.barrier(VALUES_EMPTY, stage), WARPGROUPS * 4);
    }
    fence_barriers();
  }
  for (int i = threadIdx.x; i < 256; i += blockDim.x) reinterpret_cast<u32*>(shared.ones())[i] = 0x3f803f80;
  fence_stores();
  wait_for_producers();
  __syncthreads();

  RowTiles tiles(a);
  if (warpgroup == WARPGROUPS) {
    give_registers<COPY_REGISTERS>();
    if (threadIdx.x / 32 > WARPGROUPS * 4) return;
    Turn<STAGES> keys{0, 1}, values{0, 1};
    while (tiles.advance()) copy_tiles(a, shared, keys_map, values_map, tiles.tile, keys, values);
    return;
  }
  take_registers<REGISTERS>();
  Turn<STAGES> keys{0, 0}, values{0, 0};
  auto attend_tile = [&]() {
    const RowTile& tile = tiles.tile;
    const int before = warpgroup * ROWS;
    const RowTile rows{tile.slot, tile.first_row + before, min(tile.num_rows - before, ROWS), tile.position + before};
    attend_rows(a, shared, rows, tile.num_keys(), warpgroup, keys, values);
  };
  // Outside of the loop, the compiler knows more of the first tile, which is the only one of most CTAs.
  if (tiles.advance()) attend_tile();
#pragma unroll 1
  while (tiles.advance()) attend_tile();
}

// The kernel that a program is compiled for: ATTEND is the function above with its template arguments. Grid: (query
// heads, any number). keys_map, values_map: of the cache as a matrix of rows, in boxes of 64 rows and 64 columns.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    exact_prefill(const u16* query, const __grid_constant__ TensorMap keys_map,
                  const __grid_constant__ TensorMap values_map, const int* block_table, const int* tiles,
                  const u16* sinks, u16* out, float scale, int query_stride, int table_stride, int num_tiles,
                  int num_kv_heads, int group, int block_size) {
  ATTEND(PrefillArguments{query, block_table, tiles, sinks, out, scale, query_stride, table_stride, num_tiles,
                          num_kv_heads, group, block_size},
         &keys_map, &values_map);
}
