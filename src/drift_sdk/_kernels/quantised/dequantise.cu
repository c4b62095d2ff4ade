// Numbers of quantised weights: out[n, k] = number[n, k] * scale, rounded once to bfloat16.
//
// A warp converts UNITS units of a tile. The four lanes that have the same rows exchange their numbers, so that each
// writes 16 bytes of a row.

constexpr int UNITS = 4;

// Two products, rounded: `low` in the low half.
__device__ __forceinline__ u32 rounded_products(u32 numbers, float scale) {
  const float low = __fmul_rn(__uint_as_float(numbers << 16), scale);
  const float high = __fmul_rn(__uint_as_float(numbers & 0xFFFF0000u), scale);
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Lane t of four has word q of place t; it gets the words of its own place, of lanes 0 to 3.
__device__ __forceinline__ uint4 exchanged(u32 (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & distance) continue;
      u32 &low = words[i], &high = words[i + distance];
      const u32 got = __shfl_xor_sync(0xFFFFFFFFu, t & distance ? low : high, distance);
      if (t & distance) low = got;
      else high = got;
    }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// codes, scales, zeros, channel_scale, N, K: as in multiply.cu. out: [N, K] bfloat16.
// Grid: (groups of THREADS / 32 * UNITS units, tiles).
template <int CODES, int SCALES, bool HAS_ZEROS, int GROUPS, bool IS_GATED>
__device__ __forceinline__ void dequantise(const u8* codes, const u8* scales, const u8* zeros,
                                           const float* channel_scale, u16* out, int N, int K) {
  constexpr int COLUMNS = STEP / GROUPS, PIECES = CODES == E4M3 ? 2 : 1;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.y, units = K / UNIT;
  const int first = (blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5)) * UNITS;
  const int packed[2] = {tile * TILE + g, tile * TILE + g + 8};
  float2 scale = make_float2(0.f, 0.f);
  if (SCALES == CHANNEL)
    scale = make_float2(packed[0] < N ? channel_scale[packed[0]] : 0.f, packed[1] < N ? channel_scale[packed[1]] : 0.f);
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const int unit = first + i;
    if (unit >= units) return;  // of the whole warp
    const u64 place = (static_cast<u64>(tile / 4) * units + unit) * 4 + tile % 4;
    uint4 words[PIECES];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
      words[piece] = reinterpret_cast<const uint4*>(codes + place * unit_bytes<CODES> + piece * CHUNK_BYTES)[lane];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = unit * UNIT + half * 32;
      const u64 group = (static_cast<u64>(tile / 4) * (K / COLUMNS) + column / COLUMNS) * 4 + tile % 4;
      u32 zero0 = 0xBE00BE00u, zero1 = 0xBE00BE00u;  // -8 * 2^-6
      if (HAS_ZEROS) {
        const u32 pair = reinterpret_cast<const u32*>(zeros)[group * 8 + g];
        zero0 = __byte_perm(pair, 0, 0x1010), zero1 = __byte_perm(pair, 0, 0x3232);
      }
      if (SCALES != CHANNEL) scale = scales_of_rows<SCALES>(scales + group * TILE * scale_bytes<SCALES>, g);
      u32 a[2][4];
      fragments<CODES>(a, words[CODES == E4M3 ? half : 0], half, zero0, zero1);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float s = (e ? scale.y : scale.x) * code_unit<CODES>;
        u32 row_words[4] = {rounded_products(a[0][e], s), rounded_products(a[0][e + 2], s),
                            rounded_products(a[1][e], s), rounded_products(a[1][e + 2], s)};
        const uint4 numbers = exchanged(row_words, t);
        const int row = IS_GATED ? e * (N / 2) + tile * 8 + g : packed[e];
        if (packed[e] < N)
          reinterpret_cast<uint4*>(out + static_cast<u64>(row) * K + column)[t] = numbers;
      }
    }
  }
}

// The kernel that a program is compiled for: DEQUANTISE is the function above with its template arguments.
extern "C" __global__ void __launch_bounds__(THREADS)
    numbers(const u8* codes, const u8* scales, const u8* zeros, const float* channel_scale, u16* out, int N, int K) {
  wait_for_producers();  // they may read `out`
  start_dependents();
  DEQUANTISE(codes, scales, zeros, channel_scale, out, N, K);
}
