// Products of a warpgroup in attention of prompts. Follows prefill_stages.cu.

#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define EIGHT(n) FOUR(n), FOUR(n + 1), FOUR(n + 2), FOUR(n + 3), FOUR(n + 4), FOUR(n + 5), FOUR(n + 6), FOUR(n + 7)
// Scores of 64 queries and 128, 64 or 32 keys: d += a * b, or d = a * b. Both are rows of shared memory, see `descriptor`.
__device__ __forceinline__ void multiply_keys(float (&d)[16][4], u64 a, u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;}"
      : EIGHT(0), EIGHT(8)
      : "l"(a), "l"(b), "r"(is_added));
}

__device__ __forceinline__ void multiply_keys(float (&d)[8][4], u64 a, u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;}"
      : EIGHT(0)
      : "l"(a), "l"(b), "r"(is_added));
}

__device__ __forceinline__ void multiply_keys(float (&d)[4][4], u64 a, u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 0, 0;}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
      : "l"(a), "l"(b), "r"(is_added));
}

// d += a * b for 64 rows of a, 16 of their columns, and as many rows of b in shared memory, see `values_at`.
__device__ __forceinline__ void multiply_values(float (&d)[16][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
      : EIGHT(0), EIGHT(8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
__device__ __forceinline__ void multiply_values(float (&d)[8][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
      : EIGHT(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}

// In two products of 128 columns.
__device__ __forceinline__ void multiply_values(float (&d)[32][4], const u32 (&a)[4], u64 b, int is_added) {
  multiply_values(reinterpret_cast<float(&)[16][4]>(d[0]), a, b, is_added);
  multiply_values(reinterpret_cast<float(&)[16][4]>(d[16]), a, b + (2 * HALF_BYTES >> 4), is_added);
}

// Sums of a's rows, d += a * ones: the same in all columns.
__device__ __forceinline__ void multiply_ones(float (&d)[4], const u32 (&a)[4], u64 ones, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(ones), "r"(is_added));
}
#undef FOUR
#undef EIGHT

// Rows of values as wgmma takes them, 16 from a place on: dimensions side by side, 64 of them in each half.
__device__ __forceinline__ u64 values_at(u32 address) {
  return u64(1 << 30 | 1024 >> 4) << 32 | (HALF_BYTES >> 4) << 16 | address >> 4;
}
