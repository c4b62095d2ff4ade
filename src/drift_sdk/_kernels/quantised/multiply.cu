// Products with quantised weights: out[m, n] = sum over k of x[m, k] * weight[n, k], in bfloat16 with fp32 sums.
//
// The weights are the A operand of wgmma.m64nNk16 and are converted in registers, exactly. packing.py has
// arranged them so that the 16 bytes that a thread loads are its own fragments: a chunk of 512 bytes holds 16
// rows and 32 columns (a byte each) or 64 (4 bits), 16 bytes for each lane. The codes that a warpgroup needs for some
// columns are one piece of memory, and so are the scales. x is the B operand, in shared memory.
//
// One thread starts copies of weights to shared memory, another one those of x, several steps ahead. Each copy
// costs them time, so they are few and large. Barriers in shared memory connect them to the warpgroups that
// multiply, which do not wait for each other. With more than 16 rows, a warpgroup converts a chunk while tensor
// cores multiply by the one before; with fewer rows, each warp multiplies by itself, with the same bits.
//
// Order of summation: tensor cores sum the columns of a group, from zero, 16 at a time; with a scale a row, all
// columns. Sums of groups, times their scale, are added in ascending order, from zero, in fp32; of a group with
// offsets, then the sum of its columns of x, which tensor cores compute likewise, times the offset. Warpgroups with
// the same rows of the weight take steps in turn; their totals are added last, in ascending order. The number of
// these is a function of the weight's shape. Tiles, stages and rows do not change the order.

// Copies x for all steps of a slice, by another thread.
template <int CODES, int SCALES, int SHIFTS, int GROUPS, int WM, int NT, int STAGES>
__device__ __forceinline__ void copy_x(const Arguments& a, const TensorMap* x_map,
                                       Stages<CODES, SCALES, SHIFTS, GROUPS, WM, NT, STAGES> stages, int num_whole,
                                       int num_steps) {
  constexpr int ROWS = NT * 8;
  const int first_row = blockIdx.x * ROWS;
  const u32 unit_bytes_ = min(ROWS, a.M) * UNIT * 2;  // rows beyond are left as they are: they change no other row
  int column = blockIdx.z * a.slice_size;
  Turn<STAGES> turn{0, 1};
  for (int step = 0; step < num_steps; step++) {
    const int num_units = step < num_whole ? 2 : 1;
    u64* const barrier = stages.full(turn.stage);
    wait_for_phase(stages.empty(turn.stage), turn.parity);
    arrive_expecting(barrier, num_units * unit_bytes_);
    copy_rows(stages.x(turn.stage), x_map, column, first_row, barrier);
    if (num_units == 2) copy_rows(stages.x(turn.stage) + ROWS * UNIT * 2, x_map, column + UNIT, first_row, barrier);
    column += STEP;
    turn.advance(1);
  }
}

// Adds the totals of warpgroups 1 to SPLIT - 1 with the same tiles to those of warpgroup 0, in ascending order.
// shared: memory for them, which no thread reads any more once all have come here.
template <int WM, int SPLIT, int NT>
__device__ __forceinline__ void add_splits(float (&total)[NT][4], float4* shared, int part) {
  constexpr int THREADS_OF_PART = WM * 128;
  const int thread = threadIdx.x % THREADS_OF_PART;
  sync_first<SPLIT * THREADS_OF_PART>();
  if (part > 0)
#pragma unroll
    for (int n = 0; n < NT; n++)
      shared[((part - 1) * NT + n) * THREADS_OF_PART + thread] =
          make_float4(total[n][0], total[n][1], total[n][2], total[n][3]);
  sync_first<SPLIT * THREADS_OF_PART>();
  if (part > 0) return;
#pragma unroll
  for (int other = 0; other < SPLIT - 1; other++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float4 sum = shared[(other * NT + n) * THREADS_OF_PART + thread];
      total[n][0] = __fadd_rn(total[n][0], sum.x), total[n][1] = __fadd_rn(total[n][1], sum.y);
      total[n][2] = __fadd_rn(total[n][2], sum.z), total[n][3] = __fadd_rn(total[n][3], sum.w);
    }
}

// WM * 64 rows of the weight times 8 * NT rows of x, of one slice, by WM * SPLIT warpgroups and two warps that
// copy, up to STAGES steps ahead. SPLIT warpgroups with the same rows take the steps in turn. STAGES is a multiple of
// SPLIT, so that a stage is read by the same warpgroups each time, and more than SPLIT, because a warpgroup keeps a
// stage until its next step has begun.
// Grid: (groups of 8 * NT rows, groups of WM panels of the weight, slices).
template <int CODES, int SCALES, int SHIFTS, int GROUPS, int EPILOGUE, int WM, int SPLIT, int NT, int STAGES>
__device__ __forceinline__ void multiply(const Arguments& a, const TensorMap* x_map) {
  static_assert(STAGES % SPLIT == 0 && STAGES > SPLIT);
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int WARPS = WM * 4;  // with the same steps
  const Stages<CODES, SCALES, SHIFTS, GROUPS, WM, NT, STAGES> stages{shared};
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slice_columns = min(a.K, static_cast<int>(blockIdx.z + 1) * a.slice_size) - blockIdx.z * a.slice_size;
  const int num_whole = slice_columns / STEP, num_steps = (slice_columns + STEP - 1) / STEP;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init_barrier(stages.full(i), 2);
      init_barrier(stages.empty(i), WARPS);
    }
    fence_barriers();
  }
  __syncthreads();

  if (warp == WARPS * SPLIT) {
    const int first = blockIdx.y * WM, last = (a.N + PANEL - 1) / PANEL - 1;
    const Weight weight{a.codes, a.scales, a.shifts, a.K};
    Turn<STAGES> turn{0, 1};
    if (lane == 0) copy_weights(weight, first, last, blockIdx.z * a.slice_size, stages, turn, num_whole, num_steps);
    wait_for_producers();  // as every thread does before it ends
    return;
  }
  if (warp == WARPS * SPLIT + 1) {
    wait_for_producers();
    if (lane == 0) copy_x<CODES, SCALES, SHIFTS, GROUPS, WM, NT, STAGES>(a, x_map, stages, num_whole, num_steps);
    __syncwarp();
    start_dependents();  // all copies have been started
    return;
  }

  wait_for_producers();  // they may read `out`
  TileSums<CODES, SCALES, SHIFTS, GROUPS, NT> sums;
  const int part = SPLIT == 1 ? 0 : warp / WARPS, panel = warp % WARPS / 4;
  Turn<STAGES> turn{part, 0};
  sum_steps<SPLIT>(sums, stages, turn, panel, part, num_whole, num_steps);
  if (SPLIT > 1) {
    add_splits<WM, SPLIT, NT>(sums.total, reinterpret_cast<float4*>(shared), part);
    if (part > 0) return;
  }
  store_sums<CODES, SCALES, EPILOGUE, NT>(a, sums.total, blockIdx.y * WARPS + warp);
}

// The kernel that a program is compiled for: MULTIPLY is the function above with its
// template arguments. x_map: of x [M, K], in boxes of 64 columns and the rows that a CTA copies, at most M.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    product(const u8* codes, const u8* scales, const u8* shifts, const float* channel_scale,
            const __grid_constant__ TensorMap x_map, const u16* bias, void* out, int M, int N, int K,
            int slice_size) {
  MULTIPLY(Arguments{codes, scales, shifts, channel_scale, bias, out, M, N, K, slice_size}, &x_map);
}
