// All that a small dense decoder layer computes between its attention and the next layer's, for one to 32 rows, in one
// launch on Hopper: output projection and residual, norm, gate and up, down projection and residual, the next norm and
// its layer's merged query, key and value.
//
// One block on each multiprocessor. One warp copies the block's rows of all four weights, eight outputs at a time, into
// a ring in shared memory. It never waits for what the others compute, so that weights arrive while blocks wait for each
// other. Eight warps multiply: each has every eighth 32 elements of a row, and the sums of all eight are added in a fixed
// order. Rows of x are the left operand. Between two products all blocks meet, and x goes through the L2 cache.
//
// Compiled behind what `between_attentions.py` writes in front: the constants in capitals, `activated`, and one function
// for each instruction, in `hopper_instructions.cu` or, for a CPU, in a test's emulator.

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, STEP = 32;  // elements that a warp multiplies at a time
constexpr int GROUPS = CONSUMERS + 128;                       // threads of all warp groups
constexpr int ROW_TILES = (EIGHTS + 1) / 2;                  // of the matrix units: sixteen rows, or eight and no others

// Cut of a weight's rows of K elements into segments, which a stage has eight of.
template <int K>
struct Cut {
  static constexpr int SEGMENTS = (K + SEGMENT - 1) / SEGMENT;
  static constexpr int ELEMENTS = (K + SEGMENTS * STEP - 1) / (SEGMENTS * STEP) * STEP;
  static constexpr int LAST = K - (SEGMENTS - 1) * ELEMENTS;
  // Two rows begin in different halves of the banks.
  static constexpr int STRIDE = ELEMENTS * 2 % 128 == 0 ? ELEMENTS * 2 + 64 : ELEMENTS * 2;
  static constexpr int CHUNKS = (ELEMENTS / STEP + WARPS - 1) / WARPS;  // of a warp in a segment
  static constexpr int BYTES = 8 * STRIDE;
};

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int STAGE_BYTES = larger(larger(Cut<HIDDEN>::BYTES, Cut<ATTENDED>::BYTES), Cut<INNER>::BYTES);
constexpr int TILES = larger(2 * GATED_TILES, QKV_TILES);  // whose sums there is room for
constexpr int SUM_BYTES = 8 * 4 * 8 * EIGHTS;  // eight float32 outputs of all rows
constexpr int SUMS = STAGES * STAGE_BYTES, SQUARES = SUMS + WARPS * TILES * SUM_BYTES;
constexpr int FULL = SQUARES + WARPS * 8 * EIGHTS * 4, EMPTY = FULL + 8 * STAGES;

struct Warp {
  u32 shared;   // the block's shared memory
  int warp, lane;
  int used;     // stages so far
  int rows;

  __device__ __forceinline__ int quad() const { return lane / 4; }   // a row of x, or an output
  __device__ __forceinline__ int place() const { return lane % 4; }  // 16 bytes of the 64 of a step

  // The stage whose turn it is, full.
  __device__ __forceinline__ u32 stage() const {
    barrier_wait(shared + FULL + 8 * (used % STAGES), (used / STAGES) & 1);
    return shared + used % STAGES * STAGE_BYTES;
  }

  __device__ __forceinline__ void release() {
    sync_warp();
    if (lane == 0) barrier_arrive(shared + EMPTY + 8 * (used % STAGES));
    used++;
  }
};

template <int K>
__device__ __forceinline__ bool has_chunk(const Warp& me, int segment, int chunk) {
  constexpr bool whole = Cut<K>::LAST == Cut<K>::ELEMENTS && Cut<K>::ELEMENTS % (STEP * WARPS) == 0;
  const int elements = segment == Cut<K>::SEGMENTS - 1 ? Cut<K>::LAST : Cut<K>::ELEMENTS;
  return whole || (me.warp + WARPS * chunk) * STEP < elements;
}

template <int K>
__device__ __forceinline__ int element_of(const Warp& me, int segment, int chunk) {
  return segment * Cut<K>::ELEMENTS + (me.warp + WARPS * chunk) * STEP + me.place() * 8;
}

// A warp's elements of all rows of x [rows, K] in one segment.
template <int K>
__device__ __forceinline__ void load_rows(uint4 (&x)[Cut<K>::CHUNKS][EIGHTS], const Half* from, const Warp& me,
                                          int segment) {
#pragma unroll
  for (int chunk = 0; chunk < Cut<K>::CHUNKS; chunk++)
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      const int row = eight * 8 + me.quad();
      const bool there = row < me.rows && has_chunk<K>(me, segment, chunk);
      x[chunk][eight] = make_uint4(0, 0, 0, 0);
      if (there) x[chunk][eight] = load_global(from + (u64)row * K + element_of<K>(me, segment, chunk));
    }
}

// A warp's sums of eight outputs: several, where one would wait for itself.
template <int SUMS_EACH>
struct Accumulators {
  float sums[SUMS_EACH][ROW_TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < SUMS_EACH * ROW_TILES * 4; i++) sums[i / (ROW_TILES * 4)][i / 4 % ROW_TILES][i % 4] = 0.0f;
  }

  // Adds the products of a stage.
  template <int K>
  __device__ __forceinline__ void add(const uint4 (&x)[Cut<K>::CHUNKS][EIGHTS], Warp& me, int segment) {
    const u32 weights = me.stage() + me.quad() * Cut<K>::STRIDE + me.warp * (STEP * 2) + me.place() * 16;
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int chunk = 0; chunk < Cut<K>::CHUNKS; chunk++)
      if (has_chunk<K>(me, segment, chunk)) {
        const uint4 w = load_shared(weights + chunk * (WARPS * STEP * 2));
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
          const uint4& low = x[chunk][2 * tile];
          const uint4& high = EIGHTS == 1 ? none : x[chunk][2 * tile + (EIGHTS > 1)];
          multiply(sums[0][tile], low.x, high.x, low.y, high.y, w.x, w.y);
          multiply(sums[SUMS_EACH - 1][tile], low.z, high.z, low.w, high.w, w.z, w.w);
        }
      }
    me.release();
  }

  // Stores this warp's sums [rows, 8].
  __device__ __forceinline__ void store(u32 to, const Warp& me) const {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      const float* first = &sums[0][eight / 2][2 * (eight % 2)];
      const float* other = &sums[SUMS_EACH - 1][eight / 2][2 * (eight % 2)];
      store_shared(to + (eight * 8 + me.quad()) * 32 + me.place() * 8, SUMS_EACH == 1 ? first[0] : first[0] + other[0],
                   SUMS_EACH == 1 ? first[1] : first[1] + other[1]);
    }
  }
};

// All warps' sums of a tile: [tiles, warps, rows, 8].
__device__ __forceinline__ u32 sums_of(const Warp& me, int tile, int warp) {
  return me.shared + SUMS + (tile * WARPS + warp) * SUM_BYTES;
}

// Where a thread finishes two neighbouring outputs of a row, after all warps have stored their sums of a tile.
struct Finish {
  int tile, row, place;

  __device__ __forceinline__ explicit Finish(int index)
      : tile(index / (EIGHTS * 32)), row(index / 4 % (EIGHTS * 8)), place(index % 4) {}

  __device__ __forceinline__ float2 sum(const Warp& me, int of) const {
    float2 all = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      const float2 one = load_shared_pair(sums_of(me, of, warp) + row * 32 + place * 8);
      all.x += one.x, all.y += one.y;
    }
    return all;
  }
};

// Adds x [rows, K] times weight [HIDDEN, K] to a residual [rows, HIDDEN].
template <int K>
__device__ __forceinline__ void add_product(Warp& me, const Half* from, const Half* residual, Half* to) {
  constexpr int SEGMENTS = Cut<K>::SEGMENTS, DEEP = ROW_TILES == 1 ? 3 : 2;
  constexpr int AHEAD = SEGMENTS < DEEP ? SEGMENTS : DEEP;
  const Finish finish(threadIdx.x);
  const bool finishes = finish.tile == 0 && finish.row < me.rows;
  for (int tile = blockIdx.x; tile < HIDDEN / 8; tile += gridDim.x) {
    uint4 x[AHEAD][Cut<K>::CHUNKS][EIGHTS];
    const u64 at = (u64)finish.row * HIDDEN + tile * 8 + finish.place * 2;
#pragma unroll
    for (int segment = 0; segment < AHEAD; segment++) load_rows<K>(x[segment], from, me, segment);
    u32 before = 0;
    if (finishes) before = load_global_pair(residual + at);
    Accumulators<2> accumulators;
    accumulators.clear();
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; segment++) {
      accumulators.template add<K>(x[segment % AHEAD], me, segment);
      if (segment + AHEAD < SEGMENTS) load_rows<K>(x[segment % AHEAD], from, me, segment + AHEAD);
    }
    if (tile >= gridDim.x) consumers_meet();  // the last tile's sums have been read
    accumulators.store(sums_of(me, 0, me.warp), me);
    consumers_meet();
    if (finishes) {
      const float2 sum = finish.sum(me, 0), old = unpacked(before);
      store_global_pair(to + at, packed(old.x + sum.x, old.y + sum.y));
    }
  }
}

// A thread's elements of a norm's weight.
struct Factors {
  uint4 values[Cut<HIDDEN>::SEGMENTS][Cut<HIDDEN>::CHUNKS];

  __device__ __forceinline__ void load(const Half* weight, const Warp& me) {
#pragma unroll
    for (int segment = 0; segment < Cut<HIDDEN>::SEGMENTS; segment++)
#pragma unroll
      for (int chunk = 0; chunk < Cut<HIDDEN>::CHUNKS; chunk++) {
        values[segment][chunk] = make_uint4(0, 0, 0, 0);
        if (has_chunk<HIDDEN>(me, segment, chunk))
          values[segment][chunk] = load_global(weight + element_of<HIDDEN>(me, segment, chunk));
      }
  }
};

__device__ __forceinline__ float squared(u32 pair) {
  const float2 both = unpacked(pair);
  return both.x * both.x + both.y * both.y;
}

__device__ __forceinline__ u32 scaled(u32 pair, float scale, u32 factors) {
  const float2 both = unpacked(pair), by = unpacked(factors);
  if (HAS_OFFSET) return packed(both.x * scale * (1.0f + by.x), both.y * scale * (1.0f + by.y));
  return packed(both.x * scale * by.x, both.y * scale * by.y);
}

// All rows of x [rows, HIDDEN], normed: each warp has its elements, and the squares of all warps are added.
struct Normed {
  uint4 x[Cut<HIDDEN>::SEGMENTS][Cut<HIDDEN>::CHUNKS][EIGHTS];

  __device__ __forceinline__ void load(const Half* from, const Factors& factors, float eps, const Warp& me) {
    float scale[EIGHTS];
#pragma unroll
    for (int segment = 0; segment < Cut<HIDDEN>::SEGMENTS; segment++) load_rows<HIDDEN>(x[segment], from, me, segment);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      float squares = 0.0f;
#pragma unroll
      for (int segment = 0; segment < Cut<HIDDEN>::SEGMENTS; segment++)
#pragma unroll
        for (int chunk = 0; chunk < Cut<HIDDEN>::CHUNKS; chunk++) {
          const uint4& part = x[segment][chunk][eight];
          squares += squared(part.x) + squared(part.y) + squared(part.z) + squared(part.w);
        }
      squares += from_neighbour(squares, 1);
      squares += from_neighbour(squares, 2);
      if (me.place() == 0) store_shared(me.shared + SQUARES + ((eight * 8 + me.quad()) * WARPS + me.warp) * 4, squares);
    }
    consumers_meet();
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      const u32 squares = me.shared + SQUARES + (eight * 8 + me.quad()) * WARPS * 4;
      float all = 0.0f;
#pragma unroll
      for (int pair = 0; pair < WARPS / 2; pair++) {
        const float2 two = load_shared_pair(squares + pair * 8);
        all += two.x + two.y;
      }
      scale[eight] = 1.0f / square_root(all / HIDDEN + eps);
    }
#pragma unroll
    for (int segment = 0; segment < Cut<HIDDEN>::SEGMENTS; segment++)
#pragma unroll
      for (int chunk = 0; chunk < Cut<HIDDEN>::CHUNKS; chunk++)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
          uint4& part = x[segment][chunk][eight];
          const uint4& by = factors.values[segment][chunk];
          part = make_uint4(scaled(part.x, scale[eight], by.x), scaled(part.y, scale[eight], by.y),
                            scaled(part.z, scale[eight], by.z), scaled(part.w, scale[eight], by.w));
        }
  }
};

// Multiplies normed rows by weight [OUTPUTS, HIDDEN], or by [2 * OUTPUTS, HIDDEN], gate first.
template <int OUTPUTS, bool GATED>
__device__ __forceinline__ void multiply_normed(Warp& me, const Normed& normed, const Half* bias, Half* to) {
  constexpr int WEIGHTS = GATED ? 2 : 1, MOST_TILES = GATED ? GATED_TILES : QKV_TILES;  // at once
  for (int first = blockIdx.x; first < OUTPUTS / 8; first += gridDim.x * MOST_TILES) {
    Accumulators<1> accumulators[MOST_TILES][WEIGHTS];
#pragma unroll
    for (int i = 0; i < MOST_TILES; i++) {
#pragma unroll
      for (int weight = 0; weight < WEIGHTS; weight++) accumulators[i][weight].clear();
      if (first + i * gridDim.x < OUTPUTS / 8) {
#pragma unroll
        for (int segment = 0; segment < Cut<HIDDEN>::SEGMENTS; segment++)
#pragma unroll
          for (int weight = 0; weight < WEIGHTS; weight++)
            accumulators[i][weight].template add<HIDDEN>(normed.x[segment], me, segment);
      }
    }
    if (first >= gridDim.x) consumers_meet();  // the last tiles' sums have been read
#pragma unroll
    for (int i = 0; i < MOST_TILES; i++)
#pragma unroll
      for (int weight = 0; weight < WEIGHTS; weight++)
        accumulators[i][weight].store(sums_of(me, i * WEIGHTS + weight, me.warp), me);
    consumers_meet();
#pragma unroll
    for (int round = 0; round < (MOST_TILES * EIGHTS * 32 + CONSUMERS - 1) / CONSUMERS; round++) {
      const Finish finish(threadIdx.x + round * CONSUMERS);
      const int tile = first + finish.tile * gridDim.x, output = tile * 8 + finish.place * 2;
      if (finish.tile >= MOST_TILES || tile >= OUTPUTS / 8 || finish.row >= me.rows) continue;
      float2 sum = finish.sum(me, finish.tile * WEIGHTS);
      if (GATED) {
        const float2 up = finish.sum(me, finish.tile * WEIGHTS + 1);
        sum = make_float2(activated(sum.x) * up.x, activated(sum.y) * up.y);
      } else if (HAS_BIAS) {
        const float2 shift = unpacked(load_global_pair(bias + output));
        sum = make_float2(sum.x + shift.x, sum.y + shift.y);
      }
      store_global_pair(to + (u64)finish.row * OUTPUTS + output, packed(sum.x, sum.y));
    }
  }
}

// The copying warp's part of one weight, in the order in which it is multiplied.
template <int K, bool GATED>
__device__ __forceinline__ void copy_weight(u32 shared, int lane, int& copied, const Half* weight, int outputs) {
  for (int tile = blockIdx.x; tile < outputs / 8; tile += gridDim.x)
    for (int segment = 0; segment < Cut<K>::SEGMENTS; segment++)
      for (int half = 0; half < (GATED ? 2 : 1); half++, copied++) {
        const int stage = copied % STAGES, before = copied - WINDOW;
        const int bytes = 2 * (segment == Cut<K>::SEGMENTS - 1 ? Cut<K>::LAST : Cut<K>::ELEMENTS);
        const u32 full = shared + FULL + 8 * stage;
        if (copied >= STAGES) barrier_wait(shared + EMPTY + 8 * stage, (copied / STAGES - 1) & 1);
        // Copies under way at once share the memory's rate, and the first is needed first.
        if (before >= 0) barrier_wait(shared + FULL + 8 * (before % STAGES), (before / STAGES) & 1);
        if (lane == 0) barrier_expect(full, 8 * bytes);
        sync_warp();
        const Half* row = weight + (u64)(half * outputs + tile * 8 + lane) * K + segment * Cut<K>::ELEMENTS;
        if (lane < 8) copy(shared + stage * STAGE_BYTES + lane * Cut<K>::STRIDE, row, bytes, full);
      }
}

// All blocks' warps that multiply meet here: what they stored before is seen by all after it.
__device__ __forceinline__ void blocks_meet(u64* counter, u64 target) {
  consumers_meet();
  if (threadIdx.x == 0) {
    add_release(counter);
    while (read_acquire(counter) < target) wait_a_little();
  }
  consumers_meet();
}

// attended [rows, ATTENDED] and residual [rows, HIDDEN] to the next residual out [rows, HIDDEN] and the next layer's qkv
// [rows, QKV]. middle [rows, HIDDEN] and gated [rows, INNER] are for the blocks only. The counter begins as zero, and no
// other launch that may run at the same time has it.
extern "C" __global__ void __launch_bounds__(GROUPS, 1)
    between(const Half* attended, const Half* residual, const Half* o, const Half* norm, const Half* gate_up,
            const Half* down, const Half* next_norm, const Half* qkv_weight, const Half* bias, Half* middle, Half* gated,
            Half* out, Half* qkv, u64* counter, int rows, float eps, float next_eps) {
  const u32 shared = shared_memory();
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(shared + FULL + 8 * stage, 1);
      barrier_init(shared + EMPTY + 8 * stage, WARPS);
    }
    barriers_are_there();
  }
  launch_dependents();
  block_meets();
  if (warp >= WARPS) {
    fewer_registers();
    if (warp > WARPS) return;
    int copied = 0;
    copy_weight<ATTENDED, false>(shared, lane, copied, o, HIDDEN);
    copy_weight<HIDDEN, true>(shared, lane, copied, gate_up, INNER);
    copy_weight<INNER, false>(shared, lane, copied, down, HIDDEN);
    copy_weight<HIDDEN, false>(shared, lane, copied, qkv_weight, QKV);
    return;
  }
  more_registers();
  Warp me = {shared, warp, lane, 0, rows};
  Factors factors;
  factors.load(norm, me);
  wait_for_inputs();
  const u64 blocks = gridDim.x;
  u64 met = 0;  // all blocks have met so often before, times their number
  if (threadIdx.x == 0) met = read_acquire(counter) / blocks * blocks;
  add_product<ATTENDED>(me, attended, residual, middle);
  blocks_meet(counter, met + blocks);
  Normed normed;
  normed.load(middle, factors, eps, me);
  multiply_normed<INNER, true>(me, normed, bias, gated);
  factors.load(next_norm, me);
  blocks_meet(counter, met + 2 * blocks);
  add_product<INNER>(me, gated, middle, out);
  blocks_meet(counter, met + 3 * blocks);
  normed.load(out, factors, next_eps, me);
  multiply_normed<QKV, false>(me, normed, bias, qkv);
}
