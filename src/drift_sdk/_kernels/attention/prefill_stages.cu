// What attention of prompts takes: its arguments, its tiles of rows, and stages of keys and values in shared memory.
// Follows types.cu and hopper.cu. Macros: DIM, of a head (64, 128, 256 or 512); VALUE_DIM, of the values of a CTA, which
// is less if several CTAs divide them; KEYS, of a tile (128, 64 or 32); and WINDOW, how many keys a row sees (0: all).

constexpr int ROWS = 64;                        // of a warpgroup
constexpr int HALVES = DIM / 64, VALUE_HALVES = VALUE_DIM / 64;  // of dimensions, 64 each
constexpr int NT = VALUE_DIM / 8, SHARES = DIM / VALUE_DIM;      // fragments of values; CTAs that divide them
constexpr int ROW_BYTES = 128;                                   // of a row's 64 dimensions
constexpr int HALF_BYTES = KEYS * ROW_BYTES, KEY_BYTES = HALVES * HALF_BYTES, VALUE_BYTES = VALUE_HALVES * HALF_BYTES;
constexpr int QUERY_HALF_BYTES = ROWS * ROW_BYTES, QUERY_BYTES = HALVES * QUERY_HALF_BYTES;
constexpr int PIECES = DIM / 8, VALUE_PIECES = VALUE_DIM / 8;  // of a row, 16 bytes each
constexpr int BOX_KEYS = KEYS < 64 ? KEYS : 64;                // copied at a time, of one block of the cache
constexpr int BOXES = KEYS / BOX_KEYS;                         // in a tile

// What the kernel takes.
//   query: [N, num_heads, DIM] bfloat16, rows `query_stride` apart. out: [N, num_heads, DIM].
//   block_table: int32, rows `table_stride` apart.
//   tiles: [num_tiles, 4] int32, see prefill.py: those that are used come first.
//   sinks: [num_heads] bfloat16, or null.
//   scale: of scores, times log2(e).
//   heads_at_once: a divisor of the grid's heads, SHARES for each: so many heads of all tiles before the next ones.
struct PrefillArguments {
  const u16* query;
  const int *block_table, *tiles;
  const u16* sinks;
  u16* out;
  float scale;
  int query_stride, table_stride, num_tiles, num_kv_heads, group, block_size, heads_at_once;
};

// The shared memory of a CTA.
template <int WARPGROUPS, int STAGES> struct Shared {
  u8* base;
  static constexpr int ONES_BYTES = 1024, BARRIER_BYTES = 1024;

  __device__ __forceinline__ u8* queries(int warpgroup) const { return base + warpgroup * QUERY_BYTES; }
  __device__ __forceinline__ u8* keys(int stage) const { return queries(WARPGROUPS) + stage * KEY_BYTES; }
  __device__ __forceinline__ u8* values(int stage) const { return keys(STAGES) + stage * VALUE_BYTES; }
  __device__ __forceinline__ u8* ones() const { return values(STAGES); }
  __device__ __forceinline__ u64* barrier(int kind, int stage) const {
    return reinterpret_cast<u64*>(ones() + ONES_BYTES) + kind * STAGES + stage;
  }
  // A place that nothing is read from.
  __device__ __forceinline__ u32* nowhere() const {
    return reinterpret_cast<u32*>(ones() + ONES_BYTES + BARRIER_BYTES) - 1;
  }
  // Sums of partitions, of a program that keeps them here.
  __device__ __forceinline__ float4* sums(int warpgroup) const {
    return reinterpret_cast<float4*>(ones() + ONES_BYTES + BARRIER_BYTES + warpgroup * ROWS * VALUE_DIM * 4);
  }
};
enum { KEYS_FULL, VALUES_FULL, KEYS_EMPTY, VALUES_EMPTY };

// The place of a piece of 16 bytes of a row, in a tile of NUM_ROWS rows.
template <int NUM_ROWS> __device__ __forceinline__ u32 place_of(int row, int piece) {
  return (piece >> 3) * (NUM_ROWS * ROW_BYTES) + row * ROW_BYTES + (((piece ^ row) & 7) << 4);
}

// A tile of rows: slot, first row of the step, number of rows, position of the first one.
struct RowTile {
  int slot, first_row, num_rows, position;

  // The rows from the one of an index on, at most those of a warpgroup; there may be none.
  __device__ __forceinline__ RowTile from(int index) const {
    return {slot, first_row + index, min(num_rows - index, ROWS), position + index};
  }
  __device__ __forceinline__ int num_keys() const { return position + num_rows; }
  __device__ __forceinline__ int num_tiles() const { return (num_keys() + KEYS - 1) / KEYS; }  // of keys
  // The first key that a row sees, and its tile.
  __device__ __forceinline__ int first_key() const { return WINDOW > 0 ? max(position - (WINDOW - 1), 0) : 0; }
  __device__ __forceinline__ int first_tile() const { return first_key() / KEYS; }
};

// The tiles of a CTA for a head and a share of its values, one after the other. CTAs are numbered as they start: heads
// first.
struct RowTiles {
  const PrefillArguments& a;
  int head, share, index;
  RowTile tile;

  __device__ __forceinline__ explicit RowTiles(const PrefillArguments& a) : a(a) {
    const int num_ctas = a.heads_at_once * gridDim.y, cta = blockIdx.y * gridDim.x + blockIdx.x;
    const int place = cta / num_ctas * a.heads_at_once + cta % num_ctas % a.heads_at_once;
    head = place / SHARES, share = place % SHARES;
    index = cta % num_ctas / a.heads_at_once;
  }

  // Goes to the next tile. Returns whether there is one.
  __device__ __forceinline__ bool advance() {
    if (index >= a.num_tiles) return false;
    const int* const fields = a.tiles + 4 * index;
    tile = {fields[0], fields[1], fields[2], fields[3]};
    index += gridDim.y;
    return tile.slot >= 0;
  }
};

// Starts the copies of a tile of keys or values, whose boxes begin at rows of the cache and at a column, once its stage
// is empty.
template <int NUM_HALVES, int STAGES>
__device__ __forceinline__ void copy_tile(u8* to, const TensorMap* map, const int (&rows)[BOXES], int column, u64* empty,
                                          u64* full, const Turn<STAGES>& turn) {
  wait_for_phase(empty, turn.parity);
  arrive_expecting(full, NUM_HALVES * HALF_BYTES);
#pragma unroll
  for (int box = 0; box < BOXES; box++)
#pragma unroll
    for (int half = 0; half < NUM_HALVES; half++)
      copy_rows(to + half * HALF_BYTES + box * BOX_KEYS * ROW_BYTES, map, column + half * 64, rows[box], full);
}

// Copies the keys and values that a tile of rows sees. Boxes without any of these become zeros.
template <int WARPGROUPS, int STAGES>
__device__ __forceinline__ void copy_tiles(const PrefillArguments& a, const Shared<WARPGROUPS, STAGES>& shared,
                                           const TensorMap* keys_map, const TensorMap* values_map, const RowTile& rows,
                                           int head, int share, Turn<STAGES>& keys, Turn<STAGES>& values) {
  const int lane = threadIdx.x & 31, kv_head = head / a.group, num_tiles = rows.num_tiles();
  const int first_tile = rows.first_tile(), first_box = rows.first_key() / BOX_KEYS;
  const int num_boxes = (rows.num_keys() + BOX_KEYS - 1) / BOX_KEYS, boxes_per_block = a.block_size / BOX_KEYS;
  const int* const table = a.block_table + static_cast<u64>(rows.slot) * a.table_stride;
  int row = 0, key_rows[BOXES], value_rows[BOXES];  // row: for each lane that of another box
  for (int tile = first_tile; tile <= num_tiles; tile++) {
    if (tile == first_tile || tile * BOXES % 32 == 0) {
      const int box = tile * BOXES / 32 * 32 + lane, of_block = box % boxes_per_block * BOX_KEYS;
      row = -BOX_KEYS;  // rows that do not exist
      if (box >= first_box && box < num_boxes)
        row = (table[box / boxes_per_block] * a.num_kv_heads + kv_head) * a.block_size + of_block;
    }
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
      value_rows[i] = key_rows[i];
      key_rows[i] = __shfl_sync(~0u, row, (tile * BOXES + i) % 32);
    }
    if (tile < num_tiles) {
      if (lane == 0)
        copy_tile<HALVES>(shared.keys(keys.stage), keys_map, key_rows, 0, shared.barrier(KEYS_EMPTY, keys.stage),
                          shared.barrier(KEYS_FULL, keys.stage), keys);
      keys.advance(1);
    }
    if (tile > first_tile) {  // values are needed a tile later than keys
      if (lane == 0)
        copy_tile<VALUE_HALVES>(shared.values(values.stage), values_map, value_rows, share * VALUE_DIM,
                                shared.barrier(VALUES_EMPTY, values.stage), shared.barrier(VALUES_FULL, values.stage),
                                values);
      values.advance(1);
    }
  }
}
