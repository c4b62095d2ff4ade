// The kernel of attention of prompts over a paged cache: prefill.py describes it. Follows dependent_launch.cu,
// prefill_rows.cu, and prefill.cu or exact_prefill.cu.
//
// A CTA has WARPGROUPS times 64 rows of a chunk, for a query head, and a warpgroup for every 64. One more warp copies
// tiles of keys and of their values to shared memory, up to STAGES ahead. A warpgroup starts the products of its
// queries with the next keys together with those of its probabilities with the values before, and computes the softmax
// of the former while the latter are under way.

template <int WARPGROUPS, int STAGES, int COPY_REGISTERS, int REGISTERS>
__device__ __forceinline__ void attend(const PrefillArguments& a, const TensorMap* keys_map,
                                       const TensorMap* values_map) {
  extern __shared__ __align__(1024) u8 memory[];
  const Shared<WARPGROUPS, STAGES> shared{memory};
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same in a warp, for the compiler
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(shared.barrier(KEYS_FULL, stage), 1);
      init_barrier(shared.barrier(VALUES_FULL, stage), 1);
      init_barrier(shared.barrier(KEYS_EMPTY, stage), WARPGROUPS * 4);
      init_barrier(shared.barrier(VALUES_EMPTY, stage), WARPGROUPS * 4);
    }
    fence_barriers();
  }
  for (int i = threadIdx.x; i < 256; i += blockDim.x) reinterpret_cast<u32*>(shared.ones())[i] = 0x3f803f80;
  fence_stores();
  wait_for_producers();
  __syncthreads();
  start_dependents();

  RowTiles tiles(a);
  if (warpgroup == WARPGROUPS) {
    give_registers<COPY_REGISTERS>();
    if (threadIdx.x / 32 > WARPGROUPS * 4) return;
    Turn<STAGES> keys{0, 1}, values{0, 1};
    while (tiles.advance())
      copy_tiles(a, shared, keys_map, values_map, tiles.tile, tiles.head, tiles.share, keys, values);
    return;
  }
  take_registers<REGISTERS>();
  Turn<STAGES> keys{0, 0}, values{0, 0};
  auto attend_tile = [&]() {
    WarpgroupRows<WARPGROUPS, STAGES> own(a, shared, tiles, warpgroup, keys, values);
    if (own.rows.num_rows <= 0) {
      own.pass_tiles();
      return;
    }
    own.load_queries();
    attend_rows(own);
  };
  // Outside of the loop, the compiler knows more of the first tile, which is the only one of most CTAs.
  if (tiles.advance()) attend_tile();
#pragma unroll 1
  while (tiles.advance()) attend_tile();
}

// The kernel that a program is compiled for: ATTEND is the function above with its template arguments. Grid: (query
// heads times SHARES, any number). keys_map, values_map: of the cache as a matrix of rows, in boxes of BOX_KEYS rows and 64
// columns.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_prompts(const u16* query, const __grid_constant__ TensorMap keys_map,
                   const __grid_constant__ TensorMap values_map, const int* block_table, const int* tiles,
                   const u16* sinks, u16* out, float scale, int query_stride, int table_stride, int num_tiles,
                   int num_kv_heads, int group, int block_size, int heads_at_once) {
  ATTEND(PrefillArguments{query, block_table, tiles, sinks, out, scale, query_stride, table_stride, num_tiles,
                          num_kv_heads, group, block_size, heads_at_once},
         &keys_map, &values_map);
}
