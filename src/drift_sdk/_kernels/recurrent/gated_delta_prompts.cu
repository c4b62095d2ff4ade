// Rows of prompts: runs of any number of rows of a sequence, none of which will be rejected. Follows gated_delta.cu.
//
// Grid: (value heads times parts of their values, runs). A CTA of WARPS warps has 16 WARPS values of a head, and computes
// the chunks of BORDER rows of its run one after the other. While it computes one, the next is copied to
// shared memory. The state stays in registers; at the end it is stored, with the updates of the rows since the border.
// Their keys and decays, which other CTAs may still read, are added to the rings by gated_delta.py.

constexpr int ROW_TILES = BORDER / 4, VALUE_STRIDE = VALUES + 8;
constexpr int JOBS = ROW_TILES + ROW_TILES / 2;  // products of keys with rows
constexpr int JOBS_AT_ONCE = (JOBS + WARPS - 1) / WARPS < 3 ? (JOBS + WARPS - 1) / WARPS : 3;

struct Chunk {
  u16 keys[BORDER * KEY_STRIDE];
  u16 queries[BORDER * KEY_STRIDE + 64];          // from number 32 on: other banks than keys
  u16 values[BORDER * VALUE_STRIDE];              // then the outputs
  float key_scales[BORDER], query_scales[BORDER], decays[BORDER], rates[BORDER];
};

struct SharedChunks {
  Chunk chunks[2];
  float update_factors[BORDER * BORDER], output_factors[BORDER * BORDER];  // [other, row % 4, row / 4]
  float sums[2][WARPS][BORDER];                                            // of decays
};

__device__ __forceinline__ void compute_prompts(const Arguments& a, const int* runs, const int* places,
                                                float* checkpoints, int checkpoint_stride) {
  extern __shared__ __align__(128) u8 memory[];
  SharedChunks& shared = *reinterpret_cast<SharedChunks*>(memory);
  const int head = blockIdx.x / PARTS, part = blockIdx.x % PARTS, key_head = head / GROUP;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  wait_for_producers();
  start_dependents();
  const int* const run = runs + 4 * blockIdx.y;
  const int slot = run[0], start = run[1], first_row = run[2], end = start + run[3];
  if (slot < 0 || start == end) return;

  int chunk = start / BORDER * BORDER;
  const int first_chunk = chunk;
  const int* const run_places = places + first_row / BORDER + blockIdx.y - (chunk / BORDER + 1);
  const i64 state_place = static_cast<i64>(slot) * NUM_VALUE_HEADS + head;
  const i64 warp_state = static_cast<i64>(part * WARPS + warp) * (KEY_TILES * 128);
  float* const stored = a.state + state_place * STATE_FLOATS + warp_state;
  const i64 key_ring = (static_cast<i64>(slot) * NUM_KEY_HEADS + key_head) * RING, ring = state_place * RING;
  State state;
  load_state(state, stored, chunk == 0);

  // Starts copies of the rows of a chunk. Rows before the run have keys alone.
  const auto copy_chunk = [&](int chunk, Chunk& to) {
    const int first = max(start, chunk), last = min(end, chunk + BORDER);
    const i64 row_of = static_cast<i64>(first_row) - start;  // of a position
    for (int i = thread; i < (first - chunk) * KEY_PIECES; i += THREADS) {
      const int row = i / KEY_PIECES, piece = i % KEY_PIECES;
      copy_16(to.keys + row * KEY_STRIDE + piece * 8, a.keys + (key_ring + (chunk + row) % RING) * DK + piece * 8);
    }
    for (int i = thread; i < (last - first) * 2 * KEY_PIECES; i += THREADS) {
      const int position = first + i / (2 * KEY_PIECES), piece = i % KEY_PIECES;
      const bool is_key = i / KEY_PIECES % 2;
      const u16* const from = a.mixed + (row_of + position) * CHANNELS + key_head * DK + piece * 8;
      u16* const rows = is_key ? to.keys : to.queries + 32;
      copy_16(rows + (position - chunk) * KEY_STRIDE + piece * 8, from + (is_key ? NUM_KEY_HEADS * DK : 0));
    }
    for (int i = thread; i < (last - first) * (VALUES / 8); i += THREADS) {
      const int position = first + i / (VALUES / 8), piece = i % (VALUES / 8);
      copy_16(to.values + (position - chunk) * VALUE_STRIDE + piece * 8,
              a.mixed + (row_of + position) * CHANNELS + 2 * NUM_KEY_HEADS * DK + head * DV + part * VALUES + piece * 8);
    }
    for (int row = thread; row < last - chunk; row += THREADS) {
      const int position = chunk + row;
      if (position < first) {
        copy_4(to.key_scales + row, a.key_scales + key_ring + position % RING);
        copy_4(to.decays + row, a.decays + ring + position % RING);
      } else {
        const float* const scales = a.scales + (row_of + position) * 2 * NUM_KEY_HEADS + key_head;
        const float* const gates = a.gates + (row_of + position) * 2 * NUM_VALUE_HEADS + head;
        copy_4(to.query_scales + row, scales), copy_4(to.key_scales + row, scales + NUM_KEY_HEADS);
        copy_4(to.decays + row, gates), copy_4(to.rates + row, gates + NUM_VALUE_HEADS);
      }
    }
    end_copies();
  };

  copy_chunk(chunk, shared.chunks[0]);
  for (int number = 0;; number++, chunk += BORDER) {
    Chunk& rows = shared.chunks[number & 1];
    const int before = max(start - chunk, 0), last = min(end - chunk, BORDER);  // rows of the chunk: before, and all
    wait_for_copies();
    __syncthreads();
    if (chunk + BORDER < end) copy_chunk(chunk + BORDER, shared.chunks[(number + 1) & 1]);
    float* const sums = shared.sums[number & 1][warp];
    sums[lane] = sum_decays(rows.decays[lane]);
    __syncwarp();

    const auto place = [&](int tile, int column) {
      return (column % 2 ? rows.queries + 32 : rows.keys) + (4 * tile + column / 2) * KEY_STRIDE;
    };
    // Rows 0 to 15 with all tiles, rows 16 to 31 with the tiles behind.
    for (int first = warp * JOBS_AT_ONCE; first < JOBS; first += WARPS * JOBS_AT_ONCE) {
      float products[JOBS_AT_ONCE][4];
      const u16 *keys[JOBS_AT_ONCE], *columns[JOBS_AT_ONCE];
      int halves[JOBS_AT_ONCE], tiles[JOBS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < JOBS_AT_ONCE; i++) {
        const int job = min(first + i, JOBS - 1);
        halves[i] = job >= ROW_TILES, tiles[i] = halves[i] ? job - ROW_TILES / 2 : job;
        keys[i] = rows.keys + 16 * halves[i] * KEY_STRIDE, columns[i] = place(tiles[i], lane & 7);
      }
      multiply_keys<JOBS_AT_ONCE>(products, keys, columns);
#pragma unroll
      for (int i = 0; i < JOBS_AT_ONCE; i++) {
        if (first + i >= JOBS) break;
        const int own = 4 * tiles[i] + t;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int other = 16 * halves[i] + g + 8 * j;
          const Factors found =
              factors(products[i][2 * j], products[i][2 * j + 1], rows.key_scales[own], rows.query_scales[own],
                      rows.rates[own], rows.key_scales[other], sums[own], sums[other]);
          const int at = other * BORDER + t * ROW_TILES + tiles[i];
          shared.update_factors[at] = other < own && own >= before ? found.update : 0.f;
          shared.output_factors[at] = other <= own && own >= before ? found.output : 0.f;
        }
      }
    }
    float products[ROW_TILES][4];
    multiply_state<ROW_TILES>(products, state, place);
    __syncthreads();

    // What the state gives becomes updates and outputs.
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      const int row = 4 * tile + t;
      const float key_scale = rows.key_scales[row], query_scale = rows.query_scales[row];
      const float power = power_of_2(sums[row]), rate = rows.rates[row];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float value = from_bfloat16(rows.values[row * VALUE_STRIDE + warp * 16 + g + 8 * i]);
        products[tile][2 * i] = first_update(products[tile][2 * i], value, key_scale, rate, power);
        products[tile][2 * i + 1] = first_output(products[tile][2 * i + 1], query_scale, power);
      }
    }
    if (number == 0 && before > 0)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++) {
        const int row = 4 * tile + t;
        const float* const added = a.updates + (ring + (chunk + row) % RING) * DV + part * VALUES + warp * 16 + g;
        if (row < before) products[tile][0] = __ldcg(added), products[tile][2] = __ldcg(added + 8);
      }
    // Adds what row `other` has added to the state to all rows behind it.
    const auto add = [&](int other) {
      const int from = (lane & ~3) | (other & 3);
      const float first = __shfl_sync(~0u, products[other / 4][0], from);
      const float second = __shfl_sync(~0u, products[other / 4][2], from);
      const float4* const update_factors =
          reinterpret_cast<const float4*>(shared.update_factors + other * BORDER + t * ROW_TILES);
      const float4* const output_factors =
          reinterpret_cast<const float4*>(shared.output_factors + other * BORDER + t * ROW_TILES);
#pragma unroll
      for (int four = other / 16; four < 2; four++) {
        const float4 update_four = update_factors[four], output_four = output_factors[four];
        const float update[4] = {update_four.x, update_four.y, update_four.z, update_four.w};
        const float output[4] = {output_four.x, output_four.y, output_four.z, output_four.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int tile = 4 * four + i;
          if (tile < other / 4) continue;
          products[tile][0] = __fmaf_rn(-update[i], first, products[tile][0]);
          products[tile][2] = __fmaf_rn(-update[i], second, products[tile][2]);
          products[tile][1] = __fmaf_rn(output[i], first, products[tile][1]);
          products[tile][3] = __fmaf_rn(output[i], second, products[tile][3]);
        }
      }
    };
    if (last == BORDER) {
#pragma unroll
      for (int other = 0; other < BORDER; other++) add(other);
    } else {
#pragma unroll
      for (int other = 0; other < BORDER; other++) {
        if (other >= last) break;
        add(other);
      }
    }

#pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        rows.values[(4 * tile + t) * VALUE_STRIDE + warp * 16 + g + 8 * i] = to_bfloat16(products[tile][2 * i + 1]);
    __syncwarp();
    if (lane >= before && lane < last) {
      const uint4* const from = reinterpret_cast<const uint4*>(rows.values + lane * VALUE_STRIDE + warp * 16);
      uint4* const to = reinterpret_cast<uint4*>(
          a.out + (static_cast<i64>(first_row) - start + chunk + lane) * NUM_VALUE_HEADS * DV + head * DV +
          part * VALUES + warp * 16);
      to[0] = from[0], to[1] = from[1];
    }

    if (last < BORDER) {
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++) {
        const int row = 4 * tile + t;
        float* const added = a.updates + (ring + (chunk + row) % RING) * DV + part * VALUES + warp * 16 + g;
        if (row >= before && row < last) added[0] = products[tile][0], added[8] = products[tile][2];
      }
      break;
    }

    fold<4>(state, rows.keys, rows.key_scales, sums,
         [&](int row, int i) { return products[row / 4][2 * i]; });
    const int checkpoint = run_places[chunk / BORDER + 1];
    if (checkpoint >= 0)
      store_state(state, checkpoints + static_cast<i64>(checkpoint) * checkpoint_stride + head * STATE_FLOATS + warp_state);
    if (chunk + BORDER == end) {
      chunk += BORDER;
      break;
    }
  }
  if (chunk > first_chunk) store_state(state, stored);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    gated_delta_prompts(const u16* mixed, const float* scales, const float* gates, float* state, u16* keys,
                        float* key_scales, float* updates, float* decays, u16* out, const int* runs,
                        const int* places, float* checkpoints, int checkpoint_stride) {
  compute_prompts(Arguments{mixed, scales, gates, state, keys, key_scales, updates, decays, out}, runs,
                                places, checkpoints, checkpoint_stride);
}
