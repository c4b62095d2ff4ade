// Sums of products with quantised weights: of a warp's tile, and the shared memory that they are computed from. What
// multiply.cu says of tensor cores and of the order of summation is done here. Follows formats.cu and hopper.cu.

// Bytes of a panel's step in shared memory: its codes, the scales of its groups, and the shifts.
template <int CODES, int SCALES, int SHIFTS, int GROUPS> constexpr int panel_bytes =
    8 * unit_bytes<CODES> + GROUPS * PANEL * (scale_bytes<SCALES> + shift_bytes<SCALES, SHIFTS>);

// The sums of a warp's tile: 16 rows of the weight, 8 * NT rows of x.
template <int CODES, int SCALES, int SHIFTS, int GROUPS, int NT> struct TileSums {
  static constexpr bool HAS_GROUPS = SCALES != CHANNEL, HAS_OFFSETS = SHIFTS == OFFSETS;
  static constexpr bool ARE_HALVES = GROUPS == 8;  // groups of 16 columns, half a chunk
  static constexpr bool IS_ASYNC = NT > 2;  // products of a warpgroup, which run while the next codes are converted
  static constexpr int SCALES_AT = 8 * unit_bytes<CODES>;
  static constexpr int SHIFTS_AT = SCALES_AT + GROUPS * PANEL * scale_bytes<SCALES>;

  float total[NT][4];  // of all groups before
  float sum[NT][4];    // of a group, or of all columns; tensor cores add to it
  u32 a[2][2][4];      // fragments of two chunks of 32 columns, in turn
  float2 scale;        // of the group whose sum is `sum`
  // Of a group with offsets:
  float sum_x[HAS_OFFSETS ? NT : 1][4];  // its columns of x, summed
  u32 ones[4];                           // the fragment that sums them
  float2 offset;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        total[n][e] = sum[n][e] = 0.f;
        if (HAS_OFFSETS) sum_x[n][e] = 0.f;
      }
    scale = offset = make_float2(0.f, 0.f);
    for (int i = 0; i < 4; i++) ones[i] = 0x3F803F80u;
  }

  // Waits for the products that have been started.
  __device__ __forceinline__ void wait() {
    if (!IS_ASYNC) return;
    wait_for_wgmma<0>();
#pragma unroll
    for (int n = 0; n < NT; n++) keep(sum[n]);
    if (HAS_OFFSETS)
#pragma unroll
      for (int n = 0; n < NT; n++) keep(sum_x[n]);
    if (HAS_OFFSETS) keep(ones);
#pragma unroll
    for (int c = 0; c < 2; c++) keep(a[c][0]), keep(a[c][1]);
  }

  // Adds the sum of a group, and begins the next one.
  __device__ __forceinline__ void add_group() {
    wait();
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        total[n][e] = __fmaf_rn(e < 2 ? scale.x : scale.y, sum[n][e], total[n][e]);
        if (!IS_ASYNC) sum[n][e] = 0.f;
        if (HAS_OFFSETS) {
          total[n][e] = __fmaf_rn(e < 2 ? offset.x : offset.y, sum_x[n][e], total[n][e]);
          if (!IS_ASYNC) sum_x[n][e] = 0.f;
        }
      }
  }

  // Ends the sum of a slice: `total`.
  __device__ __forceinline__ void finish() {
    if (HAS_GROUPS) {
      add_group();
      return;
    }
    wait();
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] = sum[n][e];
  }

  // Products of a chunk's fragments FIRST to LAST with their 16 columns of x each. x: the step's rows.
  template <int FIRST, int LAST>
  __device__ __forceinline__ void multiply_chunk(const u32 (&now)[2][4], const u8* x, int chunk, bool is_added) {
    if constexpr (IS_ASYNC) {
      const u32 rows = place_of_rows(x) + chunk / 2 * NT * (1024 / 16) + chunk % 2 * 4;
      fence_wgmma();
#pragma unroll
      for (int j = FIRST; j <= LAST; j++) {
        wgmma<NT>(sum, now[j], descriptor(rows + 2 * j), j > FIRST || is_added);
        if constexpr (HAS_OFFSETS) wgmma<NT>(sum_x, ones, descriptor(rows + 2 * j), j > FIRST || is_added);
      }
      commit_wgmma();
      return;
    }
    // A matrix is 8 rows of 8 columns, a piece of 16 bytes of each row; the pieces are swizzled.
    const int lane = threadIdx.x & 31, row = lane % 8, piece = chunk % 2 * 4 + lane / 8;
    const u32 rows = shared_address(x) + chunk / 2 * NT * 1024 + row * 128 + (piece ^ row) * 16;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      u32 b[4];
      load_matrices(b, rows + n * 1024);
#pragma unroll
      for (int j = FIRST; j <= LAST; j++) {
        mma(sum[n], now[j], b[2 * j], b[2 * j + 1]);
        if (HAS_OFFSETS) mma(sum_x[n], ones, b[2 * j], b[2 * j + 1]);
      }
    }
  }

  // Takes the scales and offsets of a group of the step.
  __device__ __forceinline__ void begin_group(const u8* scales, const u8* shifts, int group) {
    const int g = (threadIdx.x & 31) >> 2;
    scale = scales_of_rows<SCALES>(scales + group * PANEL * scale_bytes<SCALES>, g);
    scale.x *= code_unit<CODES>, scale.y *= code_unit<CODES>;
    if (HAS_OFFSETS) offset = scales_of_rows<SCALES>(shifts + group * PANEL * scale_bytes<SCALES>, g);
  }

  // Starts the products of a step of NUM_CHUNKS times 32 columns. panel: the step's weights in shared memory. x:
  // its rows, 64 columns each in two parts. `release` is called once the products of the step before have ended.
  // All warps of a warpgroup call it.
  template <int NUM_CHUNKS, class Release>
  __device__ __forceinline__ void start_step(const u8* panel, const u8* x, bool is_first_step, Release release) {
    constexpr int CHUNKS = GROUPS == 1 ? NUM_CHUNKS : ARE_HALVES ? 1 : 4 / GROUPS;  // of a group, or two halves
    constexpr int PIECES = are_bytes<CODES> ? NUM_CHUNKS : NUM_CHUNKS / 2, OF_UNIT = are_bytes<CODES> ? 2 : 1;
    constexpr int UNIT_PIECES = 4 * unit_bytes<CODES> / 16;  // pieces of 16 bytes of a unit
    const int lane = threadIdx.x & 31, tile = threadIdx.x >> 5 & 3;
    const uint4* const pieces = reinterpret_cast<const uint4*>(panel + tile * unit_bytes<CODES>) + lane;
    const u8* const scales = panel + SCALES_AT + tile * TILE * scale_bytes<SCALES>;
    const u8* const shifts = panel + SHIFTS_AT + tile * TILE * shift_bytes<SCALES, SHIFTS>;
    uint4 words = pieces[0], next;
#pragma unroll
    for (int i = 0; i < NUM_CHUNKS; i++) {
      u32 minus_zeros[2][2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        minus_zeros[j][0] = minus_zeros[j][1] = minus_zero<SHIFTS>;
        const int group = ARE_HALVES ? 2 * i + j : i / CHUNKS;
        if (SHIFTS == ZEROS) zeros_of_rows(minus_zeros[j], shifts + group * PANEL * 2, lane >> 2);
      }
      const int piece = are_bytes<CODES> ? i : i / 2;
      if (piece + 1 < PIECES)
        next = pieces[(piece + 1) / OF_UNIT * UNIT_PIECES + (piece + 1) % OF_UNIT * (CHUNK_BYTES / 16)];
      u32(&now)[2][4] = a[i % 2];
      if (IS_ASYNC) {
        wait_for_wgmma<1>();
        keep(now[0]), keep(now[1]);
      }
      fragments<CODES>(now, words, i % 2, minus_zeros);
      if (IS_ASYNC) keep(now[0]), keep(now[1]);
      if (are_bytes<CODES> || i % 2 == 1) words = next;
      if (HAS_GROUPS && i % CHUNKS == 0) {
        if (i > 0 || !is_first_step) add_group();
        begin_group(scales, shifts, ARE_HALVES ? 2 * i : i / CHUNKS);
      }
      // The last chunk of the step before has ended: with groups, before its sum was added.
      if (IS_ASYNC && i == (HAS_GROUPS ? 0 : 1) && !is_first_step) release();
      if constexpr (ARE_HALVES) {
        multiply_chunk<0, 0>(now, x, i, false);
        add_group();
        begin_group(scales, shifts, 2 * i + 1);
        multiply_chunk<1, 1>(now, x, i, false);
      } else {
        multiply_chunk<0, 1>(now, x, i, HAS_GROUPS ? i % CHUNKS > 0 : i > 0 || !is_first_step);
      }
    }
  }
};

// Where a CTA's stages lie in shared memory: x, in two parts of 64 columns, then the weights of its panels; after
// all stages the barriers.
template <int CODES, int SCALES, int SHIFTS, int GROUPS, int WM, int NT, int STAGES> struct Stages {
  static constexpr int NUM = STAGES, ROWS = NT * 8;
  static constexpr int BYTES = panel_bytes<CODES, SCALES, SHIFTS, GROUPS>, X_BYTES = ROWS * STEP * 2;
  static constexpr int STAGE_BYTES = (X_BYTES + WM * BYTES + 1023) / 1024 * 1024;

  u8* shared;

  __device__ __forceinline__ u8* x(int stage) const { return shared + stage * STAGE_BYTES; }
  __device__ __forceinline__ u8* panel(int stage, int panel) const { return x(stage) + X_BYTES + panel * BYTES; }
  // The barrier of a stage whose bytes have come, and of one that has been read.
  __device__ __forceinline__ u64* full(int stage) const {
    return reinterpret_cast<u64*>(shared + STAGES * STAGE_BYTES) + stage;
  }
  __device__ __forceinline__ u64* empty(int stage) const { return full(STAGES + stage); }
};

// The sums of a warp's tile over every SPLIT-th step from `part` on. panel: the warpgroup's one of the stages. Each
// warp arrives at the barrier of a stage that it has read: of one before the next step's products, of the last ones if
// no other warpgroup takes turns.
template <int SPLIT, class Sums, class StagesOfCta>
__device__ __forceinline__ void sum_steps(Sums& sums, const StagesOfCta& stages, Turn<StagesOfCta::NUM>& turn,
                                          int panel, int part, int num_whole, int num_steps) {
  sums.clear();
  int step = part, last = 0;
  auto release = [&] {
    if ((threadIdx.x & 31) == 0) arrive(stages.empty(last));
  };
  auto end_step = [&] {
    last = turn.stage;
    if (!Sums::IS_ASYNC) {
      __syncwarp();
      release();
    }
    turn.advance(SPLIT);
  };
  for (; step < num_whole; step += SPLIT) {
    wait_for_phase(stages.full(turn.stage), turn.parity);
    sums.template start_step<4>(stages.panel(turn.stage, panel), stages.x(turn.stage), step == part, release);
    end_step();
  }
  if (step < num_steps) {  // half a step
    wait_for_phase(stages.full(turn.stage), turn.parity);
    sums.template start_step<2>(stages.panel(turn.stage, panel), stages.x(turn.stage), step == part, release);
    end_step();
  }
  sums.finish();
  if (SPLIT == 1 && Sums::IS_ASYNC) release();
}

// Where a weight lies. K: its columns.
struct Weight {
  const u8 *codes, *scales, *shifts;
  int K;
};

// Copies the weights of all steps from a column on, by one thread. They never change, so that it waits for no
// producers. Panels behind the last one are copies of that one.
template <int CODES, int SCALES, int SHIFTS, int GROUPS, int WM, int NT, int STAGES>
__device__ __forceinline__ void copy_weights(const Weight& weight, int first_panel, int last_panel, int column,
                                             Stages<CODES, SCALES, SHIFTS, GROUPS, WM, NT, STAGES> stages,
                                             Turn<STAGES>& turn, int num_whole, int num_steps) {
  constexpr u32 CODE_BYTES = 8 * unit_bytes<CODES>, SCALE_BYTES = GROUPS * PANEL * scale_bytes<SCALES>;
  constexpr u32 SHIFT_BYTES = GROUPS * PANEL * shift_bytes<SCALES, SHIFTS>;
  const u8 *codes[WM], *scales[WM], *shifts[WM];
#pragma unroll
  for (int i = 0; i < WM; i++) {
    const u64 panel = min(first_panel + i, last_panel);
    codes[i] = weight.codes + (panel * (weight.K / UNIT) + column / UNIT) * (CODE_BYTES / 2);
    const u64 group = panel * (weight.K / (STEP / GROUPS)) + column / (STEP / GROUPS);
    scales[i] = weight.scales + group * (SCALE_BYTES / GROUPS);
    shifts[i] = weight.shifts + group * (SHIFT_BYTES / GROUPS);
  }
  for (int step = 0; step < num_steps; step++) {
    const u32 half = step < num_whole ? 0 : 1;
    u64* const barrier = stages.full(turn.stage);
    wait_for_phase(stages.empty(turn.stage), turn.parity);
    arrive_expecting(barrier, WM * (CODE_BYTES + SCALE_BYTES + SHIFT_BYTES) >> half);
#pragma unroll
    for (int i = 0; i < WM; i++) {
      u8* const to = stages.panel(turn.stage, i);
      copy_bytes(to, codes[i], CODE_BYTES >> half, barrier);
      if (SCALES != CHANNEL) copy_bytes(to + CODE_BYTES, scales[i], SCALE_BYTES >> half, barrier);
      if (SHIFTS != NO_SHIFTS) copy_bytes(to + CODE_BYTES + SCALE_BYTES, shifts[i], SHIFT_BYTES >> half, barrier);
      codes[i] += CODE_BYTES, scales[i] += SCALE_BYTES, shifts[i] += SHIFT_BYTES;
    }
    turn.advance(1);
  }
}
