// A CTA of CUDA threads on the CPU, one after the other: every thread runs until it waits for others. Only what the
// programs of `emulated_cuda.py` use. Copies to shared memory are made when they are waited for, and shared memory
// begins with NaN.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(number) __attribute__((aligned(number)))
#define __shared__

struct Index {
  int x = 0, y = 0, z = 0;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  std::uint32_t x, y, z, w;
};

__attribute__((aligned(128))) unsigned char memory[1 << 18];

namespace emulated {

constexpr int WARP = 32, STACK = 1 << 18;

struct Copy {
  void* to;
  unsigned char bytes[16];
  int size;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  std::vector<Copy> copies;
  int index = 0, seen_generation = 0;  // of its CTA, while it waits for this
  bool is_done = false, waits_for_cta = false;
};

struct Group {  // threads that wait for each other
  int size = 0, arrived = 0, generation = 0;
};

struct Slot {  // what a lane shows to its warp
  std::uint64_t words[8];
};

inline std::vector<Thread> threads;
inline std::vector<Group> warps;
inline std::vector<Slot> slots;
inline Group cta;
inline ucontext_t scheduler;
inline Thread* current;
inline std::function<void()> body;
inline Index thread_index, block_index;

inline void yield() {
  Thread* const own = current;
  swapcontext(&own->context, &scheduler);
}

inline void wait(Group& group) {
  const int generation = group.generation;
  if (++group.arrived == group.size) {
    group.arrived = 0;
    group.generation++;
    return;
  }
  current->waits_for_cta = &group == &cta;
  current->seen_generation = generation;
  Thread* const own = current;
  while (group.generation == generation) yield();
  own->waits_for_cta = false;
}

inline Group& warp() { return warps[current->index / WARP]; }

inline void sync_warp() { wait(warp()); }

// Shows words to the warp; afterwards `shown(lane)` are those of a lane, until the next call.
template <typename... Words> void show(Words... words) {
  sync_warp();
  std::uint64_t values[] = {words...};
  std::memcpy(slots[current->index].words, values, sizeof(values));
  sync_warp();
}

inline const std::uint64_t* shown(int lane) { return slots[current->index / WARP * WARP + lane].words; }

inline void enter() {
  body();
  current->is_done = true;
  // Threads that have ended are not waited for.
  yield();
}

inline void run(int grid_x, int grid_y, int num_threads, std::function<void()> kernel) {
  body = std::move(kernel);
  for (block_index.y = 0; block_index.y < grid_y; block_index.y++)
    for (block_index.x = 0; block_index.x < grid_x; block_index.x++) {
      std::memset(memory, 0xFF, sizeof(memory));
      threads = std::vector<Thread>(num_threads);
      warps.assign(num_threads / WARP, Group{WARP});
      slots.assign(num_threads, Slot{});
      cta = Group{num_threads};
      for (int i = 0; i < num_threads; i++) {
        Thread& thread = threads[i];
        thread.index = i;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, enter, 0);
      }
      // A warp runs until all of its threads wait for the CTA, as far ahead of the others as barriers let it. In turn
      // from the first and from the last thread on, so that what a missing barrier would order is not in order.
      for (int left = num_threads, turn = 0; left > 0; turn++) {
        left = num_threads;
        for (int i = 0; i < num_threads; i += WARP) {
          const int first = turn % 2 ? i : num_threads - WARP - i;
          for (int rounds = 0, has_run = 1; has_run; rounds++) {
            has_run = 0;
            for (int lane = 0; lane < WARP; lane++) {
              Thread& thread = threads[first + (turn % 2 ? lane : WARP - 1 - lane)];
              if (thread.is_done || (thread.waits_for_cta && thread.seen_generation == cta.generation)) continue;
              current = &thread;
              thread_index.x = thread.index;
              swapcontext(&scheduler, &thread.context);
              has_run = 1;
            }
            if (rounds > 10'000'000) std::abort();  // threads wait for one that has ended
          }
        }
        for (const Thread& thread : threads) left -= thread.is_done;
        if (turn > 10'000'000) std::abort();
      }
    }
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index

inline void __syncthreads() { emulated::wait(emulated::cta); emulated::thread_index.x = emulated::current->index; }
inline void __syncwarp() { emulated::sync_warp(); emulated::thread_index.x = emulated::current->index; }
inline float __uint_as_float(std::uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline std::uint32_t __float_as_uint(float value) { std::uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }
inline float __fsub_rn(float a, float b) { volatile float sum = a - b; return sum; }
inline float __fadd_rn(float a, float b) { volatile float sum = a + b; return sum; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline int __popc(std::uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(std::uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }

// The bytes of two words, each chosen by four bits of `chosen`.
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t chosen) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t word = 0;
  for (int i = 0; i < 4; i++) word |= static_cast<std::uint32_t>(bytes >> 8 * (chosen >> 4 * i & 7) & 255) << 8 * i;
  return word;
}
template <typename T> T __ldcg(const T* from) { return *from; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline float __shfl_sync(unsigned, float value, int lane) {
  emulated::show(static_cast<std::uint64_t>(__float_as_uint(value)));
  emulated::thread_index.x = emulated::current->index;
  return __uint_as_float(static_cast<std::uint32_t>(emulated::shown(lane & 31)[0]));
}

inline float __shfl_up_sync(unsigned, float value, int distance) {
  const int lane = emulated::current->index & 31;
  return __shfl_sync(0, value, lane >= distance ? lane - distance : lane);
}

inline float __shfl_xor_sync(unsigned, float value, int distance) {
  return __shfl_sync(0, value, (emulated::current->index & 31) ^ distance);
}

inline std::uint32_t __ballot_sync(unsigned, bool is_true) {
  emulated::show(static_cast<std::uint64_t>(is_true));
  emulated::thread_index.x = emulated::current->index;
  std::uint32_t bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= static_cast<std::uint32_t>(emulated::shown(lane)[0]) << lane;
  return bits;
}

// What the programs write in assembly.
inline void wait_for_producers() {}
inline void start_dependents() {}
inline int load_past_l1(const int* from) { return *from; }

inline void copy(void* to, const void* from, int size) {
  emulated::Copy made{to, {}, size};
  std::memcpy(made.bytes, from, size);
  emulated::current->copies.push_back(made);
}
inline void copy_4(void* to, const void* from) { copy(to, from, 4); }
inline void copy_16(void* to, const void* from) { copy(to, from, 16); }
inline void end_copies() {}
inline void wait_for_copies() {
  for (const auto& made : emulated::current->copies) std::memcpy(made.to, made.bytes, made.size);
  emulated::current->copies.clear();
}

inline float power_of_2(float exponent) { return std::exp2(exponent); }

inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if (value != value) return 0x7FFF;
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void split(float first, float second, std::uint32_t& high, std::uint32_t& low) {
  const auto pair = [](float a, float b) {
    return static_cast<std::uint32_t>(to_bfloat16(a)) | static_cast<std::uint32_t>(to_bfloat16(b)) << 16;
  };
  high = pair(first, second);
  low = pair(first - __uint_as_float(high << 16), second - __uint_as_float(high & 0xFFFF0000u));
}

// Four matrices of 8 rows of 16 bytes; lane l gives the address of row l % 8 of matrix l / 8.
inline void load_matrices(std::uint32_t (&m)[4], const void* row, bool is_transposed) {
  emulated::show(reinterpret_cast<std::uint64_t>(row));
  const int lane = emulated::current->index & 31;
  emulated::thread_index.x = emulated::current->index;
  for (int matrix = 0; matrix < 4; matrix++) {
    std::uint16_t numbers[2];
    for (int i = 0; i < 2; i++) {
      const int r = is_transposed ? 2 * (lane & 3) + i : lane >> 2, c = is_transposed ? lane >> 2 : 2 * (lane & 3) + i;
      const auto* const from = reinterpret_cast<const std::uint16_t*>(emulated::shown(8 * matrix + r)[0]);
      if (reinterpret_cast<std::uintptr_t>(from) % 16) std::abort();
      numbers[i] = from[c];
    }
    m[matrix] = numbers[0] | static_cast<std::uint32_t>(numbers[1]) << 16;
  }
}
inline void load_four(std::uint32_t (&m)[4], const void* row) { load_matrices(m, row, false); }
inline void load_four_transposed(std::uint32_t (&m)[4], const void* row) { load_matrices(m, row, true); }

// sum += a * b of mma.m16n8k16: products of 16 columns are added up in double, then to the sum.
inline void mma(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  emulated::show(static_cast<std::uint64_t>(a[0]), static_cast<std::uint64_t>(a[1]), static_cast<std::uint64_t>(a[2]),
                 static_cast<std::uint64_t>(a[3]), static_cast<std::uint64_t>(b0), static_cast<std::uint64_t>(b1));
  const int lane = emulated::current->index & 31, g = lane >> 2, t = lane & 3;
  emulated::thread_index.x = emulated::current->index;
  const auto number = [](std::uint64_t word, int half) {
    return __uint_as_float(static_cast<std::uint32_t>(word >> 16 * half & 0xFFFF) << 16);
  };
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    double total = sum[i];
    for (int k = 0; k < 16; k++) {
      const int part = (k >= 8 ? 2 : 0) + (row >= 8 ? 1 : 0), pair = k % 8 / 2;
      const float left = number(emulated::shown(row % 8 * 4 + pair)[part], k % 2);
      const float right = number(emulated::shown(column * 4 + pair)[4 + (k >= 8)], k % 2);
      total += static_cast<double>(left) * right;
    }
    sum[i] = static_cast<float>(total);
  }
}

inline void mma(float (&sum)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                std::uint32_t b0, std::uint32_t b1) {
  const std::uint32_t a[4] = {a0, a1, a2, a3};
  mma(sum, a, b0, b1);
}
