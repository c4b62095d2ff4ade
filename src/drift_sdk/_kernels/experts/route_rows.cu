// Routing of a few rows to experts: the router's product, the experts of each row, and the lists of the experts'
// rows, in one launch. cuda_experts.py describes it. Follows common.cu.
//
// A cluster has a CTA for every 16 experts. Each computes the logits of its experts, with the router as
// the A operand of the MMA: warp w sums chunks w, w + 8, ... of 32 columns, and the warps' sums are added in ascending
// order. Each CTA writes its logits to the shared memory of all, and chooses the experts of all rows, so that it can
// list the rows of its own experts.

constexpr int CTA_EXPERTS = 16;
constexpr float LOWEST = -3.40282347e38f;
constexpr int LAST_EXPERT = 0xFFFF;
constexpr float NORM_OFFSET = 1e-20f;  // as in routing.py

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Writes a float to this place of shared memory in the CTA of a rank.
__device__ __forceinline__ void store_to_rank(float* place, u32 rank, float value) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(place));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Bits that are larger for a larger number, and not 0. NaN counts as the lowest number, as minus infinity does, and
// minus zero as zero.
__device__ __forceinline__ u32 ordered(float score) {
  const u32 bits = score > LOWEST ? __float_as_uint(score + 0.f) : 0xFF800000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// `ordered` of a logit, which is a bfloat16, and of equal ones larger for the lower expert.
__device__ __forceinline__ u32 key_of(float logit, int expert) {
  return (ordered(logit) & 0xFFFF0000u) | static_cast<u32>(LAST_EXPERT - expert);
}

// The experts of a row with the largest sums of sigmoid and correction, chosen by a warp, and their sigmoids.
// correction: [E], or null.
template <int NUM_EXPERTS, int NUM_ACTIVE>
__device__ __forceinline__ void choose_by_sigmoids(const float* logits, const float* correction, int lane,
                                                   float (&values)[NUM_ACTIVE], int (&experts)[NUM_ACTIVE]) {
  constexpr int EACH = (NUM_EXPERTS + 31) / 32;
  float value[EACH];
  u32 key[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int expert = i * 32 + lane;
    const bool is_expert = expert < NUM_EXPERTS;
    value[i] = is_expert ? __fdiv_rn(1.f, __fadd_rn(1.f, __expf(-logits[expert]))) : 0.f;
    const float added = is_expert && correction != nullptr ? correction[expert] : 0.f;
    key[i] = is_expert ? ordered(__fadd_rn(value[i], added)) : 0;
  }
#pragma unroll
  for (int r = 0; r < NUM_ACTIVE; r++) {
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) best = max(best, key[i]);
    best = __reduce_max_sync(~0u, best);
    u32 first = LAST_EXPERT;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--)
      if (key[i] == best) first = i * 32 + lane;
    const int expert = static_cast<int>(__reduce_min_sync(~0u, first));
    float mine = value[0];
#pragma unroll
    for (int i = 1; i < EACH; i++)
      if (expert / 32 == i) mine = value[i];
    values[r] = __shfl_sync(~0u, mine, expert % 32), experts[r] = expert;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == expert) key[i] = 0;
  }
}

// What routing takes. x: [R, K] and weight: [E, K], bfloat16. bias: [E] bfloat16, or null. row_slot: [R], -1 for
// padding. For IS_SIGMOID: correction [E], or null, and a factor of shares. Written: experts and shares [R, NUM_JOINED +
// NUM_ACTIVE]; with HAS_LISTS also pairs [E + NUM_JOINED, R] and counts [E + NUM_JOINED].
struct Arguments {
  const u16 *x, *weight, *bias;
  const float* correction;
  const int* row_slot;
  int* experts;
  float* shares;
  int *pairs, *counts;
  float scale;
  int num_rows;
};

// NUM_JOINED: 1 if all rows have expert NUM_EXPERTS, in front of those that are chosen; else 0.
template <int K, int NUM_EXPERTS, int NUM_ACTIVE, int NUM_JOINED, int NT, bool IS_SIGMOID, bool IS_NORMALISED,
          bool HAS_LISTS>
__device__ __forceinline__ void route_rows(const Arguments& a) {
  constexpr int TILE_M = NT * 8, NUM_CTAS = NUM_EXPERTS / CTA_EXPERTS, STRIDE = TILE_M + 1;
  constexpr int NUM_CHUNKS = (K + 31) / 32, ROUNDS = (NUM_CHUNKS + WARPS - 1) / WARPS;
  constexpr int EACH = (NUM_EXPERTS + 31) / 32;  // experts of a lane
  constexpr int OF_ROW = NUM_JOINED + NUM_ACTIVE;  // experts of a row
  __shared__ float parts[WARPS * CTA_EXPERTS * STRIDE];
  __shared__ float logits[TILE_M * NUM_EXPERTS];  // of all CTAs
  __shared__ int chosen[TILE_M * OF_ROW];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int rank = cluster_rank(), first_expert = rank * CTA_EXPERTS;
  const int first_row = blockIdx.x / NUM_CTAS * TILE_M, num_rows = min(a.num_rows - first_row, TILE_M);
  arrive_in_cluster();  // this CTA runs

  uint4 words[ROUNDS][2];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = (round * WARPS + warp) * 32 + t * 8;
      const u16* from = a.weight + static_cast<i64>(first_expert + h * 8 + g) * K + column;
      words[round][h] = column < K ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
  // Of the logit that this thread adds up.
  float bias = 0.f;
  if (a.bias != nullptr && threadIdx.x < TILE_M * CTA_EXPERTS)
    bias = from_bfloat16(a.bias[first_expert + threadIdx.x % CTA_EXPERTS]);
  wait_for_producers();
  start_dependents();
  float sum[NT][4] = {};
#pragma unroll
  for (int round = 0; round < ROUNDS; round++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int column = (round * WARPS + warp) * 32 + t * 8, row = n * 8 + g;
      const u16* from = a.x + static_cast<i64>(first_row + row) * K + column;
      const uint4 x = row < num_rows && column < K ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      mma(sum[n], words[round][0].x, words[round][1].x, words[round][0].y, words[round][1].y, x.x, x.y);
      mma(sum[n], words[round][0].z, words[round][1].z, words[round][0].w, words[round][1].w, x.z, x.w);
    }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      parts[(warp * CTA_EXPERTS + (e >> 1) * 8 + g) * STRIDE + n * 8 + t * 2 + (e & 1)] = sum[n][e];
  __syncthreads();
  wait_for_cluster();  // the others run too, and have shared memory
  static_assert(TILE_M * CTA_EXPERTS <= THREADS, "a thread adds up one logit at most");
  if (threadIdx.x < TILE_M * CTA_EXPERTS) {
    const int expert = threadIdx.x % CTA_EXPERTS, row = threadIdx.x / CTA_EXPERTS;
    float total = parts[expert * STRIDE + row];
#pragma unroll
    for (int w = 1; w < WARPS; w++) total = __fadd_rn(total, parts[(w * CTA_EXPERTS + expert) * STRIDE + row]);
    if (a.bias != nullptr) total = __fadd_rn(total, bias);
    float* const place = logits + row * NUM_EXPERTS + first_expert + expert;
    if (row < num_rows) {
#pragma unroll
      for (int other = 0; other < NUM_CTAS; other++) store_to_rank(place, other, IS_SIGMOID ? total : rounded(total));
    }
  }
  arrive_in_cluster();
  wait_for_cluster();

  // Without lists, the CTAs share the rows.
  for (int row = HAS_LISTS ? warp : warp + rank * WARPS; row < num_rows; row += HAS_LISTS ? WARPS : WARPS * NUM_CTAS) {
    const bool is_live = a.row_slot[first_row + row] >= 0;
    float ranked[NUM_ACTIVE];
    int ranked_expert[NUM_ACTIVE];
    float highest = 0.f, norm = 0.f;
    if constexpr (IS_SIGMOID) {
      choose_by_sigmoids<NUM_EXPERTS>(logits + row * NUM_EXPERTS, a.correction, lane, ranked, ranked_expert);
#pragma unroll
      for (int r = 0; r < NUM_ACTIVE; r++) norm = __fadd_rn(norm, ranked[r]);
      norm = IS_NORMALISED ? __fadd_rn(norm, NORM_OFFSET) : 1.f;
    } else {
      float logit[EACH];
      u32 key[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int expert = i * 32 + lane;
        logit[i] = expert < NUM_EXPERTS ? logits[row * NUM_EXPERTS + expert] : LOWEST;
        key[i] = expert < NUM_EXPERTS ? key_of(logit[i], expert) : 0;
      }
#pragma unroll
      for (int r = 0; r < NUM_ACTIVE; r++) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
        const int expert = LAST_EXPERT - static_cast<int>(best & LAST_EXPERT);
        float value = logit[0];
#pragma unroll
        for (int i = 1; i < EACH; i++)
          if (expert / 32 == i) value = logit[i];
        ranked[r] = __shfl_sync(~0u, value, expert % 32), ranked_expert[r] = expert;
#pragma unroll
        for (int i = 0; i < EACH; i++)
          if (key[i] == best) key[i] = 0;
      }
      highest = ranked[0];
      if (IS_NORMALISED) {
#pragma unroll
        for (int r = 0; r < NUM_ACTIVE; r++) norm = __fadd_rn(norm, __expf(ranked[r] - highest));
      } else {
#pragma unroll
        for (int i = 0; i < EACH; i++)
          if (i * 32 + lane < NUM_EXPERTS) norm = __fadd_rn(norm, __expf(logit[i] - highest));
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) norm = __fadd_rn(norm, __shfl_xor_sync(~0u, norm, distance));
      }
    }
    const i64 first_pair = static_cast<i64>(first_row + row) * OF_ROW;
    if (NUM_JOINED > 0 && lane == NUM_ACTIVE % 32) {
      const int expert = is_live ? NUM_EXPERTS : -1;
      chosen[row * OF_ROW] = expert;
      if (!HAS_LISTS || rank == 0) a.experts[first_pair] = expert, a.shares[first_pair] = 1.f;
    }
#pragma unroll
    for (int r = 0; r < NUM_ACTIVE; r++) {
      if (lane != r % 32) continue;
      const int expert = is_live ? ranked_expert[r] : -1;
      chosen[row * OF_ROW + NUM_JOINED + r] = expert;
      if (HAS_LISTS && rank > 0) continue;
      const i64 pair = first_pair + NUM_JOINED + r;
      a.experts[pair] = expert;
      const float share = __fdiv_rn(IS_SIGMOID ? ranked[r] : __expf(ranked[r] - highest), norm);
      a.shares[pair] = IS_SIGMOID ? __fmul_rn(share, a.scale) : share;
    }
  }
  if (HAS_LISTS) {
    __syncthreads();
    const int end_expert = first_expert + CTA_EXPERTS + (rank + 1 == NUM_CTAS ? NUM_JOINED : 0);
    for (int expert = first_expert + warp; expert < end_expert; expert += WARPS) {
      int count = 0;
      for (int first = 0; first < num_rows * OF_ROW; first += 32) {
        const int pair = first + lane;
        const bool is_mine = pair < num_rows * OF_ROW && chosen[pair] == expert;
        const u32 mine = __ballot_sync(~0u, is_mine);
        if (is_mine) a.pairs[static_cast<i64>(expert) * a.num_rows + count + __popc(mine & ((1u << lane) - 1))] = pair;
        count += __popc(mine);
      }
      if (lane == 0) a.counts[expert] = count;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route(const u16* x, const u16* weight, const u16* bias, const float* correction, const int* row_slot,
          int* experts, float* shares, int* pairs, int* counts, float scale, int num_rows) {
  ROUTE({x, weight, bias, correction, row_slot, experts, shares, pairs, counts, scale, num_rows});
}
