// The rows of experts, as routing.py lists them, in tiles. Follows dependent_launch.cu.

// Up to TILE_M rows of an expert: its number, the tile's first place in its list, and how many rows it has.
struct ExpertTile {
  int expert, first, num_rows;
};

// The tiles of all experts, one after the other. Each lane of a warp holds the counts of some experts.
template <int NUM_EXPERTS, int TILE_M> struct ExpertTiles {
  static constexpr int EACH = (NUM_EXPERTS + 31) / 32;  // experts of a lane
  int count[EACH], first_tile, end_tile, num_tiles;     // of this lane's experts; of all

  __device__ __forceinline__ explicit ExpertTiles(const int* counts) {
    const int lane = threadIdx.x & 31;
    int own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int expert = lane * EACH + i;
      count[i] = expert < NUM_EXPERTS ? load_past_l1(counts + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) own += (count[i] + TILE_M - 1) / TILE_M;
    end_tile = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end_tile, distance);
      if (lane >= distance) end_tile += before;
    }
    first_tile = end_tile - own;
    num_tiles = __shfl_sync(~0u, end_tile, 31);
  }

  // All lanes get the same.
  __device__ __forceinline__ ExpertTile find(int tile) const {
    const int owner = __ffs(__ballot_sync(~0u, end_tile > tile)) - 1;
    int from = first_tile, expert = 0, first = 0, num_rows = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int end = from + (count[i] + TILE_M - 1) / TILE_M;
      if (tile >= from && tile < end) {
        expert = (threadIdx.x & 31) * EACH + i;
        first = (tile - from) * TILE_M;
        num_rows = min(count[i] - first, TILE_M);
      }
      from = end;
    }
    return {__shfl_sync(~0u, expert, owner), __shfl_sync(~0u, first, owner), __shfl_sync(~0u, num_rows, owner)};
  }
};
