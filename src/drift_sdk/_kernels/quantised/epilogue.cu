// What products with quantised weights take, and what follows their sums: scales of rows, biases, gates. Follows
// formats.cu.

enum Epilogue { SUMS, SILU, GELU_TANH };

__device__ __forceinline__ u16 to_bfloat16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float from_bfloat16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

__device__ __forceinline__ float rounded(float value) { return from_bfloat16(to_bfloat16(value)); }

// activation(gate) * up; gate, up, the activation and the product are each rounded to bfloat16.
template <int EPILOGUE> __device__ __forceinline__ u16 gated(float gate, float up) {
  const float wide = rounded(gate);
  float argument = wide;
  if (EPILOGUE == GELU_TANH) {
    const float bounded = fminf(fmaxf(wide, -10.f), 10.f);
    const float cubic = __fmul_rn(__fmul_rn(bounded, bounded), __fmul_rn(bounded, 0.044715f));
    argument = __fmul_rn(__fadd_rn(bounded, cubic), 1.5957691216057308f);
  }
  const float activated = __fdiv_rn(wide, __fadd_rn(1.f, __expf(-argument)));
  return to_bfloat16(__fmul_rn(rounded(activated), rounded(up)));
}

// What the kernel takes.
//   codes, scales, shifts: as packing.py arranges them; scales of groups, and their zero points or offsets, or null.
//   channel_scale: [N] of weights with a scale a row, in the order of packed rows; or null.
//   bias: of a gated product, [N], the gate before up; or null.
//   out: [num_slices, M, N] fp32; of a gated product [M, N / 2] bfloat16.
//   N: rows of the weight that exist. K: columns. slice_size: of all slices but the last.
// A tile of a gated weight has 8 rows of the gate, and then the same rows of up.
struct Arguments {
  const u8 *codes, *scales, *shifts;
  const float* channel_scale;
  const u16* bias;
  void* out;
  int M, N, K, slice_size;
};

// Returns the value of packed row `row` of the weight with its channel scale and bias.
template <int CODES, int SCALES> __device__ __forceinline__ float finished(const Arguments& a, float sum, int row) {
  if (SCALES == CHANNEL) sum = __fmul_rn(sum, a.channel_scale[row] * code_unit<CODES>);
  if (a.bias != nullptr) {
    const int column = row / TILE * 8 + row % 8 + row % TILE / 8 * (a.N / 2);
    sum = __fadd_rn(sum, from_bfloat16(a.bias[column]));
  }
  return sum;
}

// Writes the sums of a warp's tile.
template <int CODES, int SCALES, int EPILOGUE, int NT>
__device__ __forceinline__ void store_sums(const Arguments& a, const float (&total)[NT][4], int tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, column = tile * TILE + g;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = (blockIdx.x * NT + n) * 8 + t * 2 + e;
      if (row >= a.M) continue;
      if (EPILOGUE == SUMS) {
        float* out = static_cast<float*>(a.out) + (static_cast<u64>(blockIdx.z) * a.M + row) * a.N;
        if (column < a.N) out[column] = finished<CODES, SCALES>(a, total[n][e], column);
        if (column + 8 < a.N) out[column + 8] = finished<CODES, SCALES>(a, total[n][e + 2], column + 8);
      } else if (column < a.N) {
        u16* out = static_cast<u16*>(a.out) + static_cast<u64>(row) * (a.N / 2);
        out[tile * 8 + g] = gated<EPILOGUE>(finished<CODES, SCALES>(a, total[n][e], column),
                                            finished<CODES, SCALES>(a, total[n][e + 2], column + 8));
      }
    }
}
