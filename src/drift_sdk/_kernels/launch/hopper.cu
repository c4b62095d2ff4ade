// Instructions of compute capability 9.0: barriers in shared memory, copies that they count, and products
// of a warpgroup. Follows types.cu.

// A CUtensorMap of x.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory: a phase ends when `count` threads have arrived and all expected bytes have come.
__device__ __forceinline__ void init_barrier(u64* barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Makes barriers known to the copy engine.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u64* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_bytes) : "memory");
}

// Waits until the phase of a parity has ended; phases are counted from 0. The phase before it has ended.
__device__ __forceinline__ void wait_for_phase(u64* barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra END; "
      "bra AGAIN; END:}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// A place in a ring of stages, and the parity of the phase that is waited for there. What copies begins with parity 1:
// the phase before the first one counts as ended.
template <int STAGES> struct Turn {
  int stage, parity;

  __device__ __forceinline__ void advance(int steps) {
    stage += steps;
    if (stage >= STAGES) stage -= STAGES, parity ^= 1;
  }
};

// Starts a copy of a multiple of 16 bytes, which `barrier` counts.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, u32 num_bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)), "l"(from), "r"(num_bytes), "r"(shared_address(barrier)) : "memory");
}

// Starts a copy of a box of x, 64 columns of some rows, which `barrier` counts. Rows that do not exist become 0,
// and are counted.
__device__ __forceinline__ void copy_rows(void* to, const TensorMap* x, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)), "l"(x), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// A barrier of the first NUM_THREADS threads of the CTA.
template <int NUM_THREADS> __device__ __forceinline__ void sync_first() {
  asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory");
}

// A barrier of the warpgroup of an index.
__device__ __forceinline__ void sync_warpgroup(int index) {
  asm volatile("bar.sync %0, 128;" ::"r"(index + 1) : "memory");
}

// Makes what threads have stored in shared memory known to the copy engine and to wgmma.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Changes the registers of a warpgroup's threads, 0: not at all.
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// d += a * b, or d = a * b, for 64 rows of a and 8 * NT columns of b: every warp of a warpgroup has 16 rows of a
// and d. Asynchronous: neither d nor a may be touched before `wait_for_wgmma`. b: see `descriptor`.
template <int NT> __device__ void wgmma(float (&d)[NT][4], const u32 (&a)[4], u64 b, int is_added);

#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
template <> __device__ __forceinline__ void wgmma<4>(float (&d)[4][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
template <> __device__ __forceinline__ void wgmma<8>(float (&d)[8][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
template <> __device__ __forceinline__ void wgmma<16>(float (&d)[16][4], const u32 (&a)[4], u64 b, int is_added) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
      : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7), FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));
}
#undef FOUR

__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the newest groups are under way.
template <int PENDING> __device__ __forceinline__ void wait_for_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps registers that wgmma reads or writes from being computed later or reused earlier than here.
__device__ __forceinline__ void keep(u32 (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

__device__ __forceinline__ void keep(float (&d)[4]) {
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
}

// d += a * b for 16 rows of a and 8 columns of b, with the bits of `wgmma`. For few rows of x, because it waits for
// nothing else.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8, and gets the numbers
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&matrices)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// The place of rows of x in shared memory, in units of 16 bytes: rows of 128 bytes, 64 columns, whose pieces of 16
// bytes are swizzled; groups of 8 rows follow one another. `rows` lies at a multiple of 1,024 bytes.
__device__ __forceinline__ u32 place_of_rows(const void* rows) { return 1 << 16 | shared_address(rows) >> 4; }

// The rows at a place, or from a later piece of the first one on, as wgmma takes them.
__device__ __forceinline__ u64 descriptor(u32 place) { return u64(1 << 30 | 1024 >> 4) << 32 | place; }
