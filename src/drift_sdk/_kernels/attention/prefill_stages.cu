// What attention of prompts takes: its arguments, its tiles of rows, and stages of keys and values in shared memory.
// Follows types.cu and hopper.cu. Macro: DIM, of a head (64 or 128).

constexpr int ROWS = 64, KEYS = 64;             // of a warpgroup; of a tile
constexpr int HALVES = DIM / 64, NT = DIM / 8;  // of a head's dimensions, 64 and 8 each
constexpr int HALF_BYTES = KEYS * 128, TILE_BYTES = HALVES * HALF_BYTES;
constexpr int PIECES = DIM / 8;  // of a row, 16 bytes each

// What the kernel takes.
//   query: [N, num_heads, DIM] bfloat16, rows `query_stride` apart. out: [N, num_heads, DIM].
//   block_table: int32, rows `table_stride` apart.
//   tiles: [num_tiles, 4] int32, see prefill_tiles.py: those that are used come first.
//   sinks: [num_heads] bfloat16, or null.
//   scale: of scores, times log2(e).
struct PrefillArguments {
  const u16* query;
  const int *block_table, *tiles;
  const u16* sinks;
  u16* out;
  float scale;
  int query_stride, table_stride, num_tiles, num_kv_heads, group, block_size;
};

// The shared memory of a CTA.
template <int WARPGROUPS, int STAGES> struct Shared {
  u8* base;
  static constexpr int QUERIES = WARPGROUPS * ROWS * DIM * 2, ONES = 1024;

  __device__ __forceinline__ u8* queries(int warpgroup) const { return base + warpgroup * ROWS * DIM * 2; }
  __device__ __forceinline__ u8* keys(int stage) const { return base + QUERIES + stage * TILE_BYTES; }
  __device__ __forceinline__ u8* values(int stage) const { return keys(STAGES + stage); }
  __device__ __forceinline__ u8* ones() const { return keys(2 * STAGES); }
  __device__ __forceinline__ u64* barrier(int kind, int stage) const {
    return reinterpret_cast<u64*>(ones() + ONES) + kind * STAGES + stage;
  }
};
enum { KEYS_FULL, VALUES_FULL, KEYS_EMPTY, VALUES_EMPTY };

// The place of a piece of 16 bytes of a row, in a tile of 64 rows.
__device__ __forceinline__ u32 place_of(int row, int piece) {
  return (piece >> 3) * HALF_BYTES + row * 128 + (((piece ^ row) & 7) << 4);
}

// A tile of rows: slot, first row of the step, number of rows, position of the first one.
struct RowTile {
  int slot, first_row, num_rows, position;

  __device__ __forceinline__ int num_keys() const { return position + num_rows; }
  __device__ __forceinline__ int num_tiles() const { return (num_keys() + KEYS - 1) / KEYS; }  // of keys
};

// The tiles of a CTA, one after the other.
struct RowTiles {
  const PrefillArguments& a;
  int index;
  RowTile tile;

  __device__ __forceinline__ explicit RowTiles(const PrefillArguments& a) : a(a), index(blockIdx.y) {}

  // Goes to the next tile. Returns whether there is one.
  __device__ __forceinline__ bool advance() {
    if (index >= a.num_tiles) return false;
    const int* const fields = a.tiles + 4 * index;
    tile = {fields[0], fields[1], fields[2], fields[3]};
    index += gridDim.y;
    return tile.slot >= 0;
  }
};

// Copies the keys and values that a tile of rows sees.
template <int WARPGROUPS, int STAGES>
__device__ __forceinline__ void copy_tiles(const PrefillArguments& a, const Shared<WARPGROUPS, STAGES>& shared,
                                           const TensorMap* keys_map, const TensorMap* values_map, const RowTile& rows,
                                           Turn<STAGES>& keys, Turn<STAGES>& values) {
  const int lane = threadIdx.x & 31, kv_head = blockIdx.x / a.group, num_tiles = rows.num_tiles();
  const int* const table = a.block_table + static_cast<u64>(rows.slot) * a.table_stride;
  const int tiles_per_block = a.block_size / KEYS;
  int values_row = 0, block = 0;
  for (int tile = 0; tile <= num_tiles; tile++) {
    int row = 0;
    if (tile < num_tiles) {
      if (tile % 32 == 0 && tile + lane < num_tiles) block = table[(tile + lane) / tiles_per_block];
      const int of_tile = __shfl_sync(~0u, block, tile % 32);
      row = (of_tile * a.num_kv_heads + kv_head) * a.block_size + tile % tiles_per_block * KEYS;
      if (lane == 0) {
        wait_for_phase(shared.barrier(KEYS_EMPTY, keys.stage), keys.parity);
        u64* const full = shared.barrier(KEYS_FULL, keys.stage);
        arrive_expecting(full, TILE_BYTES);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          copy_rows(shared.keys(keys.stage) + half * HALF_BYTES, keys_map, half * 64, row, full);
      }
      keys.advance(1);
    }
    if (tile > 0) {  // values are needed a tile later than keys
      if (lane == 0) {
        wait_for_phase(shared.barrier(VALUES_EMPTY, values.stage), values.parity);
        u64* const full = shared.barrier(VALUES_FULL, values.stage);
        arrive_expecting(full, TILE_BYTES);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          copy_rows(shared.values(values.stage) + half * HALF_BYTES, values_map, half * 64, values_row, full);
      }
      values.advance(1);
    }
    values_row = row;
  }
}
