// Dependent launch. Before compute capability 9.0 kernels run one after the other, and nothing has to wait.

__device__ __forceinline__ void wait_for_producers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Permits dependents to start. The first thread that comes here does so for its CTA, so each has to have waited.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A load past the L1 cache, for what is read before earlier kernels have ended.
__device__ __forceinline__ int load_past_l1(const int* from) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

