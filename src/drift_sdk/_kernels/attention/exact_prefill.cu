// Sums of attention of prompts with the bits of decoding: prefill.py describes it. Follows prefill_rows.cu.
// Macros: NARROW, NARROW_END, NUM_DOUBLINGS: of partitions, which consist of whole tiles of KEYS keys.
//
// Order of summation: that of softmax.py, in which a tile has PART_KEYS keys. With a window, the first tile holds
// the first key that a row of the tile sees. Sums of all partitions before are
// in shared memory; those of a partition are in registers.

constexpr int PART_KEYS = KEYS < 64 ? KEYS : 64, PARTS = KEYS / PART_KEYS;  // of a tile of keys

// The softmax of a thread's two rows: of the partition, and of all partitions before it.
struct Softmax {
  float maximum[2], all_maximum[2], all_weight[2];
};

template <int WARPGROUPS, int STAGES>
__device__ __forceinline__ void attend_rows(WarpgroupRows<WARPGROUPS, STAGES>& r) {
  float4* const sums = r.shared.sums(r.warpgroup) + r.thread;
  const u64 ones = descriptor(place_of_rows(r.shared.ones()));
  float total[NT][4], weight[4], rescale[PARTS][2];  // of the partition; in the end, total is that of all partitions
  Softmax softmax;
  bool has_sums = false;
#pragma unroll
  for (int h = 0; h < 2; h++)
    softmax.maximum[h] = softmax.all_maximum[h] = NOTHING, softmax.all_weight[h] = 0.0f;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) total[n][e] = 0.0f;
#pragma unroll
  for (int e = 0; e < 4; e++) weight[e] = 0.0f;

  // The softmax of a part of a tile's scores, which become probabilities.
  auto take_scores = [&](int part) {
    constexpr int FRAGMENTS = PART_KEYS / 8;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = r.template highest_score<FRAGMENTS>(part * FRAGMENTS, h);
      const float maximum = fmaxf(softmax.maximum[h], __fmul_rn(highest, r.a.scale));
      const float reference = maximum == NOTHING ? 0.0f : maximum;
      rescale[part][h] = power_of_two(softmax.maximum[h] - reference);
      softmax.maximum[h] = maximum;
#pragma unroll
      for (int n = part * FRAGMENTS; n < (part + 1) * FRAGMENTS; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++)
          r.score[n][e] = power_of_two(__fmaf_rn(r.score[n][e], r.a.scale, -reference));
    }
  };
  auto rescale_sums = [&](int part) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] = __fmul_rn(total[n][e], rescale[part][e / 2]);
#pragma unroll
    for (int e = 0; e < 4; e++) weight[e] = __fmul_rn(weight[e], rescale[part][e / 2]);
  };
  // Starts the products of a part's probabilities; is_first: of the partition.
  auto start_values = [&](int part, bool is_first) {
    fence_wgmma();
#pragma unroll
    for (int k = part * PART_KEYS / 16; k < (part + 1) * PART_KEYS / 16; k++) {
      const bool is_added = k > part * PART_KEYS / 16 || !is_first;
      multiply_ones(weight, r.share[k], ones, is_added);
    }
#pragma unroll
    for (int k = part * PART_KEYS / 16; k < (part + 1) * PART_KEYS / 16; k++) {
      const bool is_added = k > part * PART_KEYS / 16 || !is_first;
      multiply_values(total, r.share[k], r.values_from(k * 16), is_added);
    }
    commit_wgmma();
  };
  // After the products of a part's probabilities have ended.
  auto keep_sums = [&](int part) {
#pragma unroll
    for (int n = 0; n < NT; n++) keep(total[n]);
    keep(weight);
#pragma unroll
    for (int k = part * PART_KEYS / 16; k < (part + 1) * PART_KEYS / 16; k++) keep(r.share[k]);
  };
  // The partition's sums, added to those before; is_end: of the last partition.
  auto add_partition = [&](const float (&maximum)[2], bool is_end) {
    float all_rescale[2], factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float highest = fmaxf(softmax.all_maximum[h], maximum[h]);
      const float reference = highest == NOTHING ? 0.0f : highest;
      all_rescale[h] = power_of_two(softmax.all_maximum[h] - reference);
      factor[h] = power_of_two(maximum[h] - reference);
      softmax.all_weight[h] = __fmaf_rn(weight[2 * h], factor[h], __fmul_rn(softmax.all_weight[h], all_rescale[h]));
      softmax.all_maximum[h] = highest;
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float4 before = has_sums ? sums[n * 128] : float4{0.0f, 0.0f, 0.0f, 0.0f};
      const float4 sum{__fmaf_rn(total[n][0], factor[0], __fmul_rn(before.x, all_rescale[0])),
                       __fmaf_rn(total[n][1], factor[0], __fmul_rn(before.y, all_rescale[0])),
                       __fmaf_rn(total[n][2], factor[1], __fmul_rn(before.z, all_rescale[1])),
                       __fmaf_rn(total[n][3], factor[1], __fmul_rn(before.w, all_rescale[1]))};
      if (is_end)
        total[n][0] = sum.x, total[n][1] = sum.y, total[n][2] = sum.z, total[n][3] = sum.w;
      else
        sums[n * 128] = sum;
    }
    has_sums = true;
  };
  auto settle_probabilities = [&](int part) {
    u32 signs = 0;
#pragma unroll
    for (int n = part * PART_KEYS / 8; n < (part + 1) * PART_KEYS / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) signs |= __float_as_uint(r.score[n][e]);
    r.settle(signs);
  };
  auto round_probabilities = [&](int part) {
    r.template round_probabilities<PART_KEYS / 16>(part * PART_KEYS / 16);
  };
  // Whether a partition ends behind a tile.
  auto is_last = [&](int key_tile) {
    const int end = (key_tile + 1) * KEYS;
    int width = NARROW;
#pragma unroll
    for (int i = 0; i < NUM_DOUBLINGS; i++)
      if (end > NARROW_END << i) width *= 2;
    return end % width == 0;
  };

  const int first_tile = r.tile.first_tile(), num_tiles = r.tile.num_tiles();
  r.start_scores();
  wait_for_wgmma<0>();
  r.end_scores();
  r.mask_scores(first_tile);
  take_scores(0);
  if constexpr (PARTS == 2) take_scores(1);
  r.round_probabilities();
  bool is_first = true;
#pragma unroll 1
  for (int key_tile = first_tile; key_tile + 1 < num_tiles; key_tile++) {
    r.start_scores();
    if (!is_first) rescale_sums(0);
    r.wait_for_values(key_tile);
    start_values(0, is_first);
    wait_for_wgmma<1>();
    r.end_scores();
    is_first = is_last(key_tile);
    const float maximum[2] = {softmax.maximum[0], softmax.maximum[1]};
    if (is_first) softmax.maximum[0] = softmax.maximum[1] = NOTHING;
    r.mask_scores(key_tile + 1);
    // The softmax of a part is computed while the values of the same part of the tile before are multiplied.
    take_scores(0);
    settle_probabilities(0);
    wait_for_wgmma<0>();
    keep_sums(0);
    if constexpr (PARTS == 2) {
      rescale_sums(1);
      start_values(1, false);
      round_probabilities(0);
      take_scores(1);
      settle_probabilities(1);
      wait_for_wgmma<0>();
      keep_sums(1);
    }
    r.end_values();
    if (is_first) add_partition(maximum, false);
    round_probabilities(PARTS - 1);
  }
  r.wait_for_values(num_tiles - 1);
  if (!is_first) rescale_sums(0);
  start_values(0, is_first);
  wait_for_wgmma<0>();
  keep_sums(0);
  if constexpr (PARTS == 2) {
    rescale_sums(1);
    start_values(1, false);
    wait_for_wgmma<0>();
    keep_sums(1);
  }
  r.end_values();
  add_partition(softmax.maximum, true);

  r.add_sink(total, softmax.all_maximum, softmax.all_weight);
  r.store(total, softmax.all_weight);
}
