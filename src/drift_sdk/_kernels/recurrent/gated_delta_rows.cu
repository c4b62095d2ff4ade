// Rows that are decoded or verified: at most 4 TILES of each sequence, at most BORDER. Follows gated_delta.cu.
//
// Grid: (value heads times parts of their values, sequences). A CTA of WARPS warps has 16 WARPS values of a head. It
// reads the state, and of the rows since the border what they add. Where the row before the first one has ended a
// chunk of BORDER rows, it folds these into the stored state. Behind a border among the rows it goes on with a state that it
// does not store, since rows may be rejected.

struct SharedRows {
  u16 keys[BORDER * KEY_STRIDE];                  // of the chunk's rows
  u16 queries[4 * TILES * KEY_STRIDE + 32];       // of the new rows, from number 32 on: other banks than keys
  float updates[BORDER * VALUES];
  float update_factors[BORDER * 4 * TILES], output_factors[BORDER * 4 * TILES];
  float key_scales[BORDER], decays[BORDER];
  float sums[WARPS][BORDER];                      // of decays
  float query_scales[4 * TILES], rates[4 * TILES];
};

__device__ __forceinline__ void compute_rows(const Arguments& a, const int* row_slot, const int* row_position,
                                             const int* borders, int rows_per_slot) {
  extern __shared__ __align__(128) u8 memory[];
  SharedRows& shared = *reinterpret_cast<SharedRows*>(memory);
  const int head = blockIdx.x / PARTS, part = blockIdx.x % PARTS, key_head = head / GROUP;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.y * rows_per_slot;
  // Rows, borders, states and rings were written before the launch that this one follows has begun to write.
  const int slot = load_past_l1(row_slot + first_row);
  int num_rows = 0;
  while (num_rows < rows_per_slot && load_past_l1(row_slot + first_row + num_rows) >= 0) num_rows++;
  if (num_rows == 0) {
    wait_for_producers();
    start_dependents();
    return;
  }

  const int start = load_past_l1(row_position + first_row), border = load_past_l1(borders + slot);
  int chunk = start / BORDER * BORDER;
  const i64 state_place = static_cast<i64>(slot) * NUM_VALUE_HEADS + head;
  float* const stored = a.state + state_place * STATE_FLOATS + (part * WARPS + warp) * (KEY_TILES * 128);
  State state;
  load_state(state, stored, border == 0);

  const i64 key_ring = (static_cast<i64>(slot) * NUM_KEY_HEADS + key_head) * RING, ring = state_place * RING;
  // Starts copies of what rows from `first` on have added, `count` of them.
  const auto copy_chunk = [&](int first, int count) {
    for (int i = thread; i < count * KEY_PIECES; i += THREADS) {
      const int row = i / KEY_PIECES, piece = i % KEY_PIECES;
      copy_16(shared.keys + row * KEY_STRIDE + piece * 8, a.keys + (key_ring + (first + row) % RING) * DK + piece * 8);
    }
    for (int i = thread; i < count * (VALUES / 4); i += THREADS) {
      const int row = i / (VALUES / 4), piece = i % (VALUES / 4);
      copy_16(shared.updates + row * VALUES + piece * 4,
              a.updates + (ring + (first + row) % RING) * DV + part * VALUES + piece * 4);
    }
    for (int row = thread; row < count; row += THREADS) {
      shared.key_scales[row] = __ldcg(a.key_scales + key_ring + (first + row) % RING);
      shared.decays[row] = __ldcg(a.decays + ring + (first + row) % RING);
    }
    end_copies();
  };
  const auto update_of = [&](int row, int i) { return shared.updates[row * VALUES + warp * 16 + g + 8 * i]; };

  if (chunk > border) {
    copy_chunk(border, BORDER);
    wait_for_copies();
    __syncthreads();
    shared.sums[warp][lane] = sum_decays(shared.decays[lane]);
    __syncwarp();
    fold<2>(state, shared.keys, shared.key_scales, shared.sums[warp], update_of);
    store_state(state, stored);
    __syncthreads();
  }
  copy_chunk(chunk, start - chunk);
  wait_for_producers();
  start_dependents();

  for (int done = 0;;) {
    const int before = start + done - chunk;  // rows of the chunk before the new ones
    const int count = min(num_rows - done, BORDER - before);
    for (int i = thread; i < 2 * count * KEY_PIECES; i += THREADS) {
      const int row = i / (2 * KEY_PIECES), piece = i % (2 * KEY_PIECES) % KEY_PIECES;
      const bool is_key = i / KEY_PIECES % 2;
      const u16* const from = a.mixed + static_cast<i64>(first_row + done + row) * CHANNELS + key_head * DK + piece * 8;
      u16* const to = is_key ? shared.keys + (before + row) * KEY_STRIDE : shared.queries + 32 + row * KEY_STRIDE;
      copy_16(to + piece * 8, from + (is_key ? NUM_KEY_HEADS * DK : 0));
    }
    end_copies();
    if (thread < count) {
      const int row = first_row + done + thread;
      const float* const scales = a.scales + static_cast<i64>(row) * 2 * NUM_KEY_HEADS + key_head;
      const float* const gates = a.gates + static_cast<i64>(row) * 2 * NUM_VALUE_HEADS + head;
      shared.query_scales[thread] = scales[0], shared.key_scales[before + thread] = scales[NUM_KEY_HEADS];
      shared.decays[before + thread] = gates[0], shared.rates[thread] = gates[NUM_VALUE_HEADS];
    }
    wait_for_copies();
    __syncthreads();
    const float* const sums = shared.sums[warp];
    shared.sums[warp][lane] = sum_decays(lane < before + count ? shared.decays[lane] : 0.f);
    __syncwarp();

    const auto place = [&](int tile, int column) {
      const int row = min(4 * tile + column / 2, count - 1);
      return column % 2 ? shared.queries + 32 + row * KEY_STRIDE : shared.keys + (before + row) * KEY_STRIDE;
    };
    for (int job = warp; job < 2 * TILES; job += WARPS) {
      const int half = job & 1, tile = job >> 1;
      if (16 * half >= before + count || 4 * tile >= count) continue;
      float found[1][4];
      multiply_keys<1>(found, {shared.keys + 16 * half * KEY_STRIDE}, {place(tile, lane & 7)});
      const float* const products = found[0];
      const int row = 4 * tile + t, own = before + row;
      if (row >= count) continue;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int other = 16 * half + g + 8 * i;
        if (other > own) continue;
        const Factors of_row =
            factors(products[2 * i], products[2 * i + 1], shared.key_scales[own], shared.query_scales[row],
                    shared.rates[row], shared.key_scales[other], sums[own], sums[other]);
        shared.update_factors[other * 4 * TILES + row] = other < own ? of_row.update : 0.f;
        shared.output_factors[other * 4 * TILES + row] = of_row.output;
      }
    }
    float products[TILES][4];
    multiply_state<TILES>(products, state, place);
    __syncthreads();

    float update[TILES][2], output[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const int row = min(4 * tile + t, count - 1);
      const float key_scale = shared.key_scales[before + row], query_scale = shared.query_scales[row];
      const float power = power_of_2(sums[before + row]), rate = shared.rates[row];
      const u16* const values = a.mixed + static_cast<i64>(first_row + done + row) * CHANNELS +
                                2 * NUM_KEY_HEADS * DK + head * DV + part * VALUES + warp * 16 + g;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        update[tile][i] = first_update(products[tile][2 * i], from_bfloat16(values[8 * i]), key_scale, rate, power);
        output[tile][i] = first_output(products[tile][2 * i + 1], query_scale, power);
      }
    }
    const auto add = [&](int tile, int other, float first, float second) {
      const int place = other * 4 * TILES + 4 * tile + t;
      const float update_factor = shared.update_factors[place], output_factor = shared.output_factors[place];
      update[tile][0] = __fmaf_rn(-update_factor, first, update[tile][0]);
      update[tile][1] = __fmaf_rn(-update_factor, second, update[tile][1]);
      output[tile][0] = __fmaf_rn(output_factor, first, output[tile][0]);
      output[tile][1] = __fmaf_rn(output_factor, second, output[tile][1]);
    };
#pragma unroll 4
    for (int other = 0; other < before; other++) {
      const float first = update_of(other, 0), second = update_of(other, 1);
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) add(tile, other, first, second);
    }
#pragma unroll
    for (int row = 0; row < 4 * TILES; row++) {
      if (row >= count) break;
      const int from = (lane & ~3) | (row & 3);
      const float first = __shfl_sync(~0u, update[row / 4][0], from);
      const float second = __shfl_sync(~0u, update[row / 4][1], from);
#pragma unroll
      for (int tile = row / 4; tile < TILES; tile++)
        if (4 * tile + t >= row) add(tile, before + row, first, second);
    }

#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const int row = 4 * tile + t;
      if (row >= count) continue;
      const int value = part * VALUES + warp * 16 + g;
      float* const added = a.updates + (ring + (chunk + before + row) % RING) * DV + value;
      u16* const out = a.out + static_cast<i64>(first_row + done + row) * NUM_VALUE_HEADS * DV + head * DV + value;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        added[8 * i] = update[tile][i];
        shared.updates[(before + row) * VALUES + warp * 16 + g + 8 * i] = update[tile][i];
        out[8 * i] = to_bfloat16(output[tile][i]);
      }
    }
    if (part == 0) {
      if (thread < count) a.decays[ring + (chunk + before + thread) % RING] = shared.decays[before + thread];
      if (head % GROUP == 0) {
        for (int i = thread; i < count * KEY_PIECES; i += THREADS) {
          const int row = before + i / KEY_PIECES, piece = i % KEY_PIECES;
          *reinterpret_cast<uint4*>(a.keys + (key_ring + (chunk + row) % RING) * DK + piece * 8) =
              *reinterpret_cast<const uint4*>(shared.keys + row * KEY_STRIDE + piece * 8);
        }
        if (thread < count) a.key_scales[key_ring + (chunk + before + thread) % RING] = shared.key_scales[before + thread];
      }
    }
    done += count;
    if (done == num_rows) return;

    __syncwarp();
    fold<2>(state, shared.keys, shared.key_scales, sums, update_of);
    chunk += BORDER;
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    gated_delta_rows(const u16* mixed, const float* scales, const float* gates, float* state, u16* keys,
                     float* key_scales, float* updates, float* decays, u16* out, const int* row_slot,
                     const int* row_position, const int* borders, int rows_per_slot) {
  compute_rows(Arguments{mixed, scales, gates, state, keys, key_scales, updates, decays, out}, row_slot, row_position,
               borders, rows_per_slot);
}
