// Numbers of MXFP4 in registers, and their products. Follows common.cu.
//
// The weights are the A operand of mma.sync.m16n8k16, and are read in the order in which files have them: of a
// chunk of 128 columns, lane (g, t) has 16 bytes of two rows, number t of four neighbours. They are one block with
// one scale, and the lane's own fragments, because x is read in the same order: which column a place of the MMA
// stands for does not matter, if it is the same in both operands.

constexpr int LANE_COLUMNS = 32, CHUNK = 4 * LANE_COLUMNS;  // columns

// Two codes at bits 0 to 3 and 16 to 19 (SHIFT 0), or 4 to 7 and 20 to 23 (SHIFT 4), times `factor`, as
// bfloat16. One product moves the sign to bit 15 and the magnitude to bits 6 to 8, where it is the number times
// 2^-126; the product with the factor, a power of two, is exact.
template <int SHIFT>
__device__ __forceinline__ u32 numbers(u32 word, u32 factor) {
  const u32 moved = (word & (0x000F000Fu << SHIFT)) * ((1u << (12 - SHIFT)) + (1u << 6 >> SHIFT));
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(moved & 0x81C081C0u), "r"(factor), "r"(0x80008000u));
  return result;
}

// 2^(scale - 1), twice: the block's power of two, times 2^126.
__device__ __forceinline__ u32 block_factor(u32 scale) { return ((scale + 126u) << 7) * 0x00010001u; }

// The fragments of 8 codes: pairs of columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
__device__ __forceinline__ void fragments(u32 (&f)[4], u32 word, u32 factor) {
  const u32 upper = word >> 8;
  f[0] = numbers<0>(word, factor), f[1] = numbers<4>(word, factor);
  f[2] = numbers<0>(upper, factor), f[3] = numbers<4>(upper, factor);
}

// Eight columns of a row of x in the order of `fragments`.
__device__ __forceinline__ void arrange(u32 (&b)[4], const uint4& x) {
  b[0] = __byte_perm(x.x, x.z, 0x5410), b[1] = __byte_perm(x.x, x.z, 0x7632);
  b[2] = __byte_perm(x.y, x.w, 0x5410), b[3] = __byte_perm(x.y, x.w, 0x7632);
}

// sum += the products of a lane's fragments of two rows with those of x: 8 columns of each lane, 32 in all.
__device__ __forceinline__ void add_products(float (&sum)[4], const u32 (&f)[2][4], const u32 (&b)[4]) {
  mma(sum, f[0][0], f[1][0], f[0][1], f[1][1], b[0], b[1]);
  mma(sum, f[0][2], f[1][2], f[0][3], f[1][3], b[2], b[3]);
}
