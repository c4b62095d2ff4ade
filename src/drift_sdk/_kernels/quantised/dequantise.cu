// Numbers of quantised weights: out[n, k] = number[n, k] * scale + offset, in fp32 and rounded to bfloat16.
//
// A warp converts UNITS units of a tile. The four lanes that have the same rows exchange their numbers, so that each
// writes 16 bytes of a row.

constexpr int UNITS = 4;

// Two numbers with their scale and offset, rounded: `low` in the low half.
template <bool HAS_OFFSETS> __device__ __forceinline__ u32 scaled_numbers(u32 numbers, float scale, float offset) {
  float low = __fmul_rn(__uint_as_float(numbers << 16), scale);
  float high = __fmul_rn(__uint_as_float(numbers & 0xFFFF0000u), scale);
  if (HAS_OFFSETS) low = __fadd_rn(low, offset), high = __fadd_rn(high, offset);
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

// codes, scales, shifts, channel_scale, N, K: as in multiply.cu. out: [N, K] bfloat16.
// Grid: (groups of THREADS / 32 * UNITS units, tiles).
template <int CODES, int SCALES, int SHIFTS, int GROUPS, bool IS_GATED>
__device__ __forceinline__ void dequantise(const u8* codes, const u8* scales, const u8* shifts,
                                           const float* channel_scale, u16* out, int N, int K) {
  constexpr int COLUMNS = STEP / GROUPS, PIECES = are_bytes<CODES> ? 2 : 1;
  constexpr bool HAS_OFFSETS = SHIFTS == OFFSETS;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = blockIdx.y, units = K / UNIT;
  const int first = (blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5)) * UNITS;
  const int packed[2] = {tile * TILE + g, tile * TILE + g + 8};
  float2 scale[2], offset[2];  // of the halves of 32 columns
  scale[0] = scale[1] = offset[0] = offset[1] = make_float2(0.f, 0.f);
  if (SCALES == CHANNEL)
    scale[0] = scale[1] =
        make_float2(packed[0] < N ? channel_scale[packed[0]] : 0.f, packed[1] < N ? channel_scale[packed[1]] : 0.f);
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
      u32 minus_zeros[2][2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u64 group = (static_cast<u64>(tile / 4) * (K / COLUMNS) + (column + 16 * j) / COLUMNS) * 4 + tile % 4;
        minus_zeros[j][0] = minus_zeros[j][1] = minus_zero<SHIFTS>;
        if (SHIFTS == ZEROS) zeros_of_rows(minus_zeros[j], shifts + group * TILE * 2, g);
        if (SCALES != CHANNEL) scale[j] = scales_of_rows<SCALES>(scales + group * TILE * scale_bytes<SCALES>, g);
        if (HAS_OFFSETS) offset[j] = scales_of_rows<SCALES>(shifts + group * TILE * scale_bytes<SCALES>, g);
      }
      u32 a[2][4];
      fragments<CODES>(a, words[are_bytes<CODES> ? half : 0], half, minus_zeros);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        u32 row_words[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const float s = (e ? scale[q / 2].y : scale[q / 2].x) * code_unit<CODES>;
          const float added = e ? offset[q / 2].y : offset[q / 2].x;
          row_words[q] = scaled_numbers<HAS_OFFSETS>(a[q / 2][e + q % 2 * 2], s, added);
        }
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
    numbers(const u8* codes, const u8* scales, const u8* shifts, const float* channel_scale, u16* out, int N, int K) {
  wait_for_producers();  // they may read `out`
  start_dependents();
  DEQUANTISE(codes, scales, shifts, channel_scale, out, N, K);
}
