// Sums of attention of prompts that take all keys as one partition: prefill.py describes it. Follows
// prefill_rows.cu.
//
// Order of summation: tiles of KEYS keys in ascending order.

// Two warpgroups start their products in turns, so that the softmax of one runs beside the products of the other.
__device__ __forceinline__ void wait_for_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(3 + warpgroup) : "memory");
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(4 - warpgroup) : "memory");
}

template <int WARPGROUPS, int STAGES>
__device__ __forceinline__ void attend_rows(WarpgroupRows<WARPGROUPS, STAGES>& r) {
  float total[NT][4], maximum[2] = {NOTHING, NOTHING}, weight[2] = {0.0f, 0.0f}, rescale[2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) total[n][e] = 0.0f;

  // The softmax of a tile's scores, which become probabilities. A thread sums its own columns.
  auto take_scores = [&](int key_tile) {
    r.mask_scores(key_tile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = fmaxf(maximum[h], r.template highest_score<KEYS / 8>(0, h) * r.a.scale);
      rescale[h] = power_of_two(maximum[h] - highest);
      maximum[h] = highest;
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& score = r.score[n][2 * h + e];
          score = power_of_two(__fmaf_rn(score, r.a.scale, -highest));
          sum[e] += score;
        }
      weight[h] = __fmaf_rn(weight[h], rescale[h], sum[0] + sum[1]);
    }
  };
  auto start_values = [&]() {
    fence_wgmma();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) multiply_values(total, r.share[k], r.values_from(k * 16), 1);
    commit_wgmma();
  };
  auto end_values = [&]() {
#pragma unroll
    for (int n = 0; n < NT; n++) keep(total[n]);
    r.end_values();
  };
  auto rescale_total = [&]() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] *= rescale[e / 2];
  };

  const int num_tiles = r.tile.num_tiles();
  const bool has_turns = WARPGROUPS == 2 && r.tile.num_rows > ROWS, is_second = r.warpgroup == 1;
  if (has_turns && is_second) pass_turn(r.warpgroup);
  if (has_turns) wait_for_turn(r.warpgroup);
  r.start_scores();
  if (has_turns) pass_turn(r.warpgroup);
  wait_for_wgmma<0>();
  r.end_scores();
  take_scores(0);
  r.round_probabilities();
#pragma unroll 1
  for (int key_tile = 0; key_tile + 1 < num_tiles; key_tile++) {
    if (has_turns) wait_for_turn(r.warpgroup);
    r.start_scores();
    rescale_total();
    r.wait_for_values(key_tile);
    start_values();
    if (has_turns) pass_turn(r.warpgroup);
    wait_for_wgmma<1>();
    r.end_scores();
    take_scores(key_tile + 1);
    r.settle(__float_as_uint(weight[0] + weight[1]));
    wait_for_wgmma<0>();
    end_values();
    r.round_probabilities();
  }
  rescale_total();
  if (has_turns) wait_for_turn(r.warpgroup);
  r.wait_for_values(num_tiles - 1);
  start_values();
  if (has_turns && !is_second) pass_turn(r.warpgroup);
  wait_for_wgmma<0>();
  end_values();

#pragma unroll
  for (int h = 0; h < 2; h++) {
    weight[h] += __shfl_xor_sync(~0u, weight[h], 1);
    weight[h] += __shfl_xor_sync(~0u, weight[h], 2);
  }
  r.add_sink(total, maximum, weight);
  r.store(total, weight);
}
