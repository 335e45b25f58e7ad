// A product of some tens to some hundreds of rows under a large weight, for Hopper (sm_90a).
//
// Two multiprocessors, a cluster, share what both need, and the copy engine writes it to both at once: by weights, two
// tiles of the weight share all rows of x; by rows, two halves of the rows share one tile of the weight. One warp loads,
// GROUPS warp groups multiply 64 rows each. A warp group's rows of x are the left operand, the tile's rows of the weight
// the right one, both from shared memory in tiles of 64 elements.
//
// Compiled by NVRTC behind `hopper_instructions.cu` and what `cluster_products.py` writes in front: the constants in
// capitals, `packed`, `activated`, and `multiply`, one instruction on the matrix units for 64 rows and COLUMNS / PIECES
// outputs.

constexpr int ELEMENTS = 64, LINE = ELEMENTS * 2;  // of a row in a tile: 128 bytes, the widest swizzle
constexpr int ROWS = 64 * GROUPS, OUTPUTS = GATED ? COLUMNS / 2 : COLUMNS;
constexpr int X_BYTES = ROWS * LINE, WEIGHT_BYTES = COLUMNS * LINE, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr int SUMS = COLUMNS / PIECES / 2;  // of a piece, in each thread
constexpr unsigned short BOTH = 3;          // of the cluster's multiprocessors

struct alignas(64) Boxes {
  char described[128];  // a CUtensorMap
};

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// No memory is ordered here; what the barriers guard orders itself.
__device__ __forceinline__ void meet_the_other() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A release for the whole cluster would wait for all of a thread's stores each time; the reads are behind the thread.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

// A box of [rows, elements], to this multiprocessor or to the same place in both.
__device__ __forceinline__ void load(u32 to, const Boxes* boxes, u32 barrier, int element, int row, bool both) {
  if (both)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to), "l"(boxes), "r"(barrier), "h"(BOTH), "r"(element), "r"(row)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(to), "l"(boxes), "r"(barrier), "r"(element), "r"(row)
        : "memory");
}

// A box of [outputs / 8, gate and up, 8, elements]: eight rows of gate, then the eight of up for the same outputs.
__device__ __forceinline__ void load_gated(u32 to, const Boxes* boxes, u32 barrier, int element, int output, bool both) {
  if (both)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5, %5, %6}], [%2], %3;" ::"r"(to), "l"(boxes), "r"(barrier), "h"(BOTH), "r"(element), "r"(0),
        "r"(output / 8) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(to), "l"(boxes), "r"(barrier), "r"(element), "r"(0),
        "r"(output / 8) : "memory");
}

// Rows of 128 bytes under the 128-byte swizzle, eight of them 1,024 bytes ("matrix descriptor" of PTX's wgmma).
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62);
}

template <int LEFT>
__device__ __forceinline__ void multiplied() {  // all but the last LEFT commits
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

struct Item {
  int tile, part;
};

__device__ __forceinline__ Item item_of(int index, int parts) { return {index / parts, index % parts}; }

// The loading thread: as many tiles of the weight, which no kernel writes, as there is room for while the kernel in
// front runs; then their rows of x; then both in turn.
__device__ __forceinline__ void load_tiles(u32 base, u32 full, u32 empty, u32 rank, const Boxes* x, const Boxes* weight,
                                           int steps, int parts, int items) {
  const int row = BY_ROWS ? rank * ROWS : rank * (ROWS / 2);
  const u32 x_at = BY_ROWS ? 0 : rank * (X_BYTES / 2);
  const u32 weight_at = X_BYTES + (BY_ROWS ? rank * (WEIGHT_BYTES / 2) : 0);
  int loaded = 0;
  for (int index = blockIdx.x / 2; index < items; index += gridDim.x / 2) {
    const Item item = item_of(index, parts);
    const int output = BY_ROWS ? item.tile * OUTPUTS + rank * (OUTPUTS / 2) : (item.tile * 2 + rank) * OUTPUTS;
    const int element = item.part * steps * ELEMENTS;
    const int ahead = loaded == 0 ? min(steps, STAGES) : 0;
    auto load_weight = [&](int stage, int step) {
      barrier_expect(full + 8 * stage, STAGE_BYTES);
      const u32 to = base + stage * STAGE_BYTES + weight_at;
      if (GATED) load_gated(to, weight, full + 8 * stage, element + step * ELEMENTS, output, BY_ROWS);
      else load(to, weight, full + 8 * stage, element + step * ELEMENTS, output, BY_ROWS);
    };
    auto load_x = [&](int stage, int step) {
      load(base + stage * STAGE_BYTES + x_at, x, full + 8 * stage, element + step * ELEMENTS, row, !BY_ROWS);
    };
    for (int step = 0; step < ahead; step++) load_weight(step, step);
    if (loaded == 0) wait_for_inputs();
    for (int step = 0; step < ahead; step++) load_x(step, step);
    loaded += ahead;
    for (int step = ahead; step < steps; step++, loaded++) {
      const int stage = loaded % STAGES;
      if (loaded >= STAGES) barrier_wait(empty + 8 * stage, (loaded / STAGES - 1) & 1);
      load_weight(stage, step);
      load_x(stage, step);
    }
  }
}

// A thread's sums of two rows, eight apart, and of two outputs in each eight of the tile. Halves go out sixteen outputs at
// a time: neighbouring threads exchange one pair, so that four threads fill 32 bytes.
__device__ __forceinline__ void store(const float (&sums)[PIECES][SUMS], void* out, int row, int rows, int output, int n,
                                      int part) {
  auto sum = [&](int i) { return sums[i / SUMS][i % SUMS]; };
  auto halves = [&](int i) {
    return GATED ? packed(activated(sum(i)) * sum(i + 4), activated(sum(i + 1)) * sum(i + 5))
                 : packed(sum(i), sum(i + 1));
  };
  const int place = threadIdx.x % 4, odd = place & 1;
#pragma unroll
  for (int below = 0; below < 2; below++) {
    const u64 at = (u64)(part * rows + row + below * 8) * n + output;
    const bool inside = row + below * 8 < rows;
#pragma unroll
    for (int eight = 0; eight < OUTPUTS / 8; eight += FLOATS ? 1 : 2) {
      const int i = eight * (GATED ? 8 : 4) + below * 2;
      if (FLOATS) {
        if (inside && output + eight * 8 < n)
          *(float2*)((float*)out + at + eight * 8 + place * 2) = make_float2(sum(i), sum(i + 1));
      } else {
        const u32 first = halves(i), second = halves(i + (GATED ? 8 : 4));
        const u32 given = __shfl_xor_sync(0xFFFFFFFF, odd ? first : second, 1);
        if (inside && output + (eight + odd) * 8 < n)
          *(uint2*)((unsigned short*)out + at + (eight + odd) * 8 + (place & 2) * 2) =
              odd ? make_uint2(given, second) : make_uint2(first, given);
      }
    }
  }
}

// x [rows, k] times weight [n, k] or, gate first, [2 * n, k]: out [parts, rows, n], in float32 if FLOATS. A part has
// `steps` tiles of elements; `items` are all pairs of tiles (or tiles, by rows) and their parts, n a multiple of eight.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1)
    product(const __grid_constant__ Boxes x, const __grid_constant__ Boxes weight, void* out, int rows, int n, int steps,
            int parts, int items) {
  extern __shared__ char shared[];
  const u32 base = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
  const u32 full = base + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
  const u32 rank = cluster_rank();
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 2 * 4 * GROUPS);  // warps of both multiprocessors
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  launch_dependents();
  meet_the_other();
  if (group == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADING_REGISTERS));
    if (threadIdx.x == GROUPS * 128) load_tiles(base, full, empty, rank, &x, &weight, steps, parts, items);
    __syncwarp();
    meet_the_other();  // which may still write to this one's shared memory
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
    int used = 0;
    auto release = [&](int which) {
      if (lane < 2) barrier_arrive(empty + 8 * (which % STAGES), lane);
    };
    for (int index = blockIdx.x / 2; index < items; index += gridDim.x / 2) {
      float sums[PIECES][SUMS];
#pragma unroll
      for (int i = 0; i < PIECES * SUMS; i++) sums[i / SUMS][i % SUMS] = 0.0f;
      for (int step = 0; step < steps; step++, used++) {
        const u32 tiles = base + used % STAGES * STAGE_BYTES;
        barrier_wait(full + 8 * (used % STAGES), (used / STAGES) & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 left = operand(tiles + group * 64 * LINE), right = operand(tiles + X_BYTES);
#pragma unroll
        for (int sixteen = 0; sixteen < ELEMENTS / 16; sixteen++)
#pragma unroll
          for (int piece = 0; piece < PIECES; piece++)
            multiply(sums[piece], left + sixteen * 2, right + sixteen * 2 + piece * (COLUMNS / PIECES * LINE / 16));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (step > 0) {
          multiplied<1>();
          release(used - 1);
        }
      }
      multiplied<0>();
      release(used - 1);
      // What is stored over may be read by the kernel in front.
      if (index == blockIdx.x / 2) wait_for_inputs();
      const Item item = item_of(index, parts);
      const int row = (BY_ROWS ? rank * ROWS : 0) + group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
      store(sums, out, row, rows, (BY_ROWS ? item.tile : item.tile * 2 + rank) * OUTPUTS, n, item.part);
    }
    meet_the_other();
  }
}
