// What products of MXFP4 experts take, and the gate. Follows common.cu.

// What a product takes. The macro PRODUCT names the function of the kernel, with its template arguments; CTAS is
// how many CTAs a multiprocessor is to have room for.
//   x: [R, K] (gated) or [R * NUM_ACTIVE, K], bfloat16.
//   values: [E, weight rows, K / 2], codes. scales: [E, weight rows, K / 32], at most 128.
//   bias: [E, weight rows] bfloat16, or null.
//   counts: [E], pairs: [E, R]: the rows of each expert, as routing.py lists them.
//   shares: [R, NUM_ACTIVE] fp32; of the down projection.
//   out: [R * NUM_ACTIVE, N] bfloat16 (gated), or [NUM_ACTIVE, R, N] fp32.
struct Arguments {
  const u16* x;
  const u8 *values, *scales;
  const u16* bias;
  const int *counts, *pairs;
  const float* shares;
  void* out;
  float alpha, limit;
  int num_rows;
};

// The activation of a gate and its product with up, rounded once. Comparisons, so that NaN remains NaN.
__device__ __forceinline__ u16 gated(const Arguments& a, float gate, float up) {
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  const float swish = __fdiv_rn(gate, __fadd_rn(1.f, __expf(__fmul_rn(-a.alpha, gate))));
  return to_bfloat16(__fmul_rn(__fadd_rn(up, 1.f), swish));
}
