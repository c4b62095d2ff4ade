// Formats of quantised weights, as packing.py arranges them, and the conversion of their codes to bfloat16.

enum Codes { E4M3, INT8, INT4, E2M1 };
enum Scales { CHANNEL, GROUP_FLOAT32, GROUP_BFLOAT16, GROUP_FLOAT16 };
enum Shifts { NO_SHIFTS, ZEROS, OFFSETS };  // of a group: zero points of its codes, or offsets of its numbers

constexpr int STEP = 128;         // columns of a step
constexpr int UNIT = 64;          // columns that every slice is a multiple of
constexpr int TILE = 16;          // rows of a tile of the weight
constexpr int PANEL = 64;         // rows of a panel, four tiles
constexpr int CHUNK_BYTES = 512;  // 16 bytes for each lane

template <int CODES> constexpr bool are_bytes = CODES == E4M3 || CODES == INT8;
template <int CODES> constexpr int unit_bytes = are_bytes<CODES> ? 1024 : 512;  // of a tile
template <int SCALES> constexpr int scale_bytes = SCALES == CHANNEL ? 0 : SCALES == GROUP_FLOAT32 ? 4 : 2;
template <int SCALES, int SHIFTS> constexpr int shift_bytes =
    SHIFTS == ZEROS ? 2 : SHIFTS == OFFSETS ? scale_bytes<SCALES> : 0;
// -8 * 2^-6, the shift of 4-bit codes without zero points; -0 beside offsets.
template <int SHIFTS> constexpr u32 minus_zero = SHIFTS == OFFSETS ? 0x80008000u : 0xBE00BE00u;

__device__ __forceinline__ u32 fma_bfloat16x2(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Two e4m3 numbers in the upper bytes of 16 bits each: exponent and mantissa are moved to their places in
// bfloat16, which is the number times 2^-120. The product with 2^120 is exact, also for subnormal numbers.
// `shifted`: the word, shifted right by 4.
__device__ __forceinline__ u32 from_e4m3(u32 word, u32 shifted) {
  return fma_bfloat16x2((word & 0x80008000u) | (shifted & 0x07F007F0u), 0x7B807B80u, 0x80008000u);
}

// Two numbers of int8 in the lower bytes of 16 bits each. 128 plus the lower seven bits, minus 128, or minus 256 if the
// sign is set: both are bfloat16, and so is the difference.
__device__ __forceinline__ u32 from_int8(u32 word) {
  return fma_bfloat16x2((word & 0x007F007Fu) | 0x43004300u, 0x3F803F80u, (word & 0x00800080u) | 0xC300C300u);
}

// Two codes of 4 bits, in bits 0 to 3 (half 0) or 4 to 7 of 16 bits each, minus their zero point, times 2^-6. As a
// bfloat16 of exponent 0, or 1 if bit 7 is set, code q is q * 2^-133 or q * 2^-129. The fused product is exact.
__device__ __forceinline__ u32 from_int4(u32 word, int half, u32 minus_zero) {
  return fma_bfloat16x2(word & (half ? 0x00F000F0u : 0x000F000Fu), half ? 0x7D007D00u : 0x7F007F00u, minus_zero);
}

// Two e2m1 numbers, in bits 0 to 3 (half 0) or 4 to 7 of 16 bits each: exponent and mantissa are moved to their places in
// bfloat16, which is the number times 2^-126. The product with 2^126 is exact, also for subnormal numbers.
__device__ __forceinline__ u32 from_e2m1(u32 word, int half) {
  const u32 signs = half ? (word & 0x00800080u) << 8 : (word & 0x00080008u) << 12;
  const u32 sizes = half ? (word & 0x00700070u) << 2 : (word & 0x00070007u) << 6;
  return fma_bfloat16x2(signs | sizes, 0x7E807E80u, 0x80008000u);
}

// Two codes of 4 bits as `from_int4` and `from_e2m1` take them.
template <int CODES> __device__ __forceinline__ u32 from_nibbles(u32 word, int half, u32 minus_zero) {
  return CODES == INT4 ? from_int4(word, half, minus_zero) : from_e2m1(word, half);
}

// What a code counts: `fragments` gives numbers divided by it.
template <int CODES> constexpr float code_unit = CODES == INT4 ? 64.f : 1.f;

// The fragments of 16 rows and 32 columns: two of 16 columns each. minus_zeros: of rows g and g + 8, for each of them.
template <int CODES>
__device__ __forceinline__ void fragments(u32 (&a)[2][4], const uint4& words, int half,
                                          const u32 (&minus_zeros)[2][2]) {
  if (CODES == E4M3) {
    const u32 rows0[2] = {words.x, words.y}, rows8[2] = {words.z, words.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      a[j][0] = from_e4m3(rows0[j] << 8, rows0[j] << 4);
      a[j][1] = from_e4m3(rows8[j] << 8, rows8[j] << 4);
      a[j][2] = from_e4m3(rows0[j], rows0[j] >> 4);
      a[j][3] = from_e4m3(rows8[j], rows8[j] >> 4);
    }
  } else if (CODES == INT8) {
    const u32 rows0[2] = {words.x, words.y}, rows8[2] = {words.z, words.w};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      a[j][0] = from_int8(rows0[j]);
      a[j][1] = from_int8(rows8[j]);
      a[j][2] = from_int8(rows0[j] >> 8);
      a[j][3] = from_int8(rows8[j] >> 8);
    }
  } else {
    const u32 rows0 = half ? words.y : words.x, rows8 = half ? words.w : words.z;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 word0 = rows0 >> (8 * j), word8 = rows8 >> (8 * j);
      a[j][0] = from_nibbles<CODES>(word0, 0, minus_zeros[j][0]);
      a[j][1] = from_nibbles<CODES>(word8, 0, minus_zeros[j][1]);
      a[j][2] = from_nibbles<CODES>(word0, 1, minus_zeros[j][0]);
      a[j][3] = from_nibbles<CODES>(word8, 1, minus_zeros[j][1]);
    }
  }
}

// The zero points of rows g and g + 8, each twice, from a tile's zero points of one group.
__device__ __forceinline__ void zeros_of_rows(u32 (&minus_zeros)[2], const u8* zeros, int g) {
  const u32 pair = reinterpret_cast<const u32*>(zeros)[g];
  minus_zeros[0] = __byte_perm(pair, 0, 0x1010), minus_zeros[1] = __byte_perm(pair, 0, 0x3232);
}

// The scales of rows g and g + 8, or their offsets, from a tile's ones of one group.
template <int SCALES> __device__ __forceinline__ float2 scales_of_rows(const u8* scales, int g) {
  if (SCALES == GROUP_FLOAT32) return reinterpret_cast<const float2*>(scales)[g];
  const u32 pair = reinterpret_cast<const u32*>(scales)[g];
  if (SCALES == GROUP_BFLOAT16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  float2 result;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(result.x), "=f"(result.y) : "r"(pair));
  return result;
}
