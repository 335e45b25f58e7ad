// A CPU's stand-in for `hopper_instructions.cu`: threads of all blocks are fibers, which take turns in a random order.
//
// Collectives of a warp, barriers and copies behave as PTX's manual says of the instructions. Copies arrive late, and
// shared memory begins as NaN. Instructions of a warp are collectives only where they must be: other threads of a warp
// may be anywhere. Bfloat16 only.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short Half;
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct Place { int x; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

namespace emulated {

struct MemoryBarrier { int arrivals, pending; long bytes; u32 phase; };
struct Copy { u32 to, bytes, barrier; const void* from; };
struct Gathering { int count = 0; long generation = 0; };  // of threads at one place
struct WarpState { Gathering at; u32 given[32][8]; float sums[32][4]; float (*results[32])[4]; };

struct Block {
  std::vector<char> shared;
  std::map<u32, MemoryBarrier> barriers;
  std::vector<Copy> copies;
  std::vector<WarpState> warps;
  Gathering all, consumers;
};

struct Fiber { ucontext_t context; std::vector<char> stack; int block, thread; bool done; };

inline std::vector<Block> blocks;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline Fiber* current;
inline ucontext_t scheduler;
inline std::mt19937 chance(1);
inline long steps;

inline void yield() { swapcontext(&current->context, &scheduler); }
inline Block& block() { return blocks[current->block]; }
inline WarpState& warp() { return block().warps[current->thread / 32]; }
inline int lane() { return current->thread % 32; }

// Returns when `many` threads have come; the last one does the work first.
template <class Work>
inline void gather(Gathering& at, int many, Work work) {
  const long generation = at.generation;
  steps++;
  if (++at.count == many) {
    work();
    at.count = 0;
    at.generation++;
  } else
    while (at.generation == generation) yield();
}

inline void settle(MemoryBarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase++, barrier.pending = barrier.arrivals;
}

inline void arrive_late() {
  for (Block& block : blocks)
    while (!block.copies.empty() && chance() % 3 == 0) {
      const size_t which = chance() % block.copies.size();
      const Copy copy = block.copies[which];
      block.copies.erase(block.copies.begin() + which);
      std::memcpy(block.shared.data() + copy.to, copy.from, copy.bytes);
      MemoryBarrier& barrier = block.barriers.at(copy.barrier);
      barrier.bytes -= copy.bytes;
      settle(barrier);
      steps++;
    }
}

inline float value(u32 pair, int which) {
  const u32 bits = which ? pair & 0xFFFF0000u : pair << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

}  // namespace emulated

inline Place threadIdx, blockIdx, gridDim;

inline u32 shared_memory() { return 0; }
inline int uniform(int value) { return value; }
inline u32 half_of(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 packed(float low, float high) { return half_of(low) | half_of(high) << 16; }
inline float2 unpacked(u32 pair) { return {emulated::value(pair, 0), emulated::value(pair, 1)}; }

// "Matrix fragments for mma.m16n8k16 with floating point type": of a group of four threads, and a thread in it.
inline void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& warp = emulated::warp();
  const int lane = emulated::lane();
  const u32 given[] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(warp.given[lane], given, sizeof given);
  warp.results[lane] = &sums;
  emulated::gather(warp.at, 32, [&] {
    float a[16][16], b[16][8];
    for (int at = 0; at < 32; at++)
      for (int i = 0; i < 8; i++) {
        const int group = at / 4, place = at % 4;
        a[group + (i / 2 % 2) * 8][place * 2 + i % 2 + (i / 4) * 8] = emulated::value(warp.given[at][i / 2], i % 2);
        if (i < 4) b[place * 2 + i % 2 + (i / 2) * 8][group] = emulated::value(warp.given[at][4 + i / 2], i % 2);
      }
    for (int at = 0; at < 32; at++)
      for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) (*warp.results[at])[i] += a[at / 4 + (i / 2) * 8][k] * b[k][at % 4 * 2 + i % 2];
  });
}

inline float from_neighbour(float value, int bit) {
  auto& warp = emulated::warp();
  const int lane = emulated::lane();
  warp.sums[lane][0] = value;
  emulated::gather(warp.at, 32, [&] {
    for (int at = 0; at < 32; at++) warp.sums[at][1] = warp.sums[at ^ bit][0];
  });
  return warp.sums[lane][1];
}

inline void sync_warp() { emulated::gather(emulated::warp().at, 32, [] {}); }
inline void block_meets() { emulated::gather(emulated::block().all, 32 * emulated::block().warps.size(), [] {}); }
inline void consumers_meet() { emulated::gather(emulated::block().consumers, 256, [] {}); }
inline float square_root(float x) { return std::sqrt(x); }
inline void barriers_are_there() {}
inline void fewer_registers() {}
inline void more_registers() {}
inline void launch_dependents() {}
inline void wait_for_inputs() { emulated::yield(); }
inline void wait_a_little() { emulated::yield(); }

inline void barrier_init(u32 barrier, u32 arrivals) {
  emulated::block().barriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};
}
inline void barrier_arrive(u32 barrier) {
  auto& found = emulated::block().barriers.at(barrier);
  found.pending--;
  emulated::settle(found);
}
inline void barrier_expect(u32 barrier, u32 bytes) {
  emulated::block().barriers.at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 phase) {
  emulated::steps++;
  while ((emulated::block().barriers.at(barrier).phase & 1) == phase) emulated::yield();
}
inline void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 || bytes % 16 || (uintptr_t)from % 16) std::abort();
  if (to + bytes > emulated::block().shared.size()) std::abort();
  emulated::block().copies.push_back({to, bytes, barrier, from});
}

template <class T>
inline T at(const void* from) {
  if ((uintptr_t)from % sizeof(T)) std::abort();
  T found;
  std::memcpy(&found, from, sizeof found);
  return found;
}
inline const char* shared_at(u32 from, size_t bytes) {
  if (from % bytes || from + bytes > emulated::block().shared.size()) std::abort();
  return emulated::block().shared.data() + from;
}
inline uint4 load_global(const void* from) { return at<uint4>(from); }
inline u32 load_global_pair(const void* from) { return at<u32>(from); }
inline void store_global_pair(void* to, u32 value) { std::memcpy(to, &value, sizeof value); }
inline uint4 load_shared(u32 from) { return at<uint4>(shared_at(from, 16)); }
inline float2 load_shared_pair(u32 from) { return at<float2>(shared_at(from, 8)); }
inline void store_shared(u32 to, float value) { std::memcpy((char*)shared_at(to, 4), &value, 4); }
inline void store_shared(u32 to, float first, float second) {
  store_shared(to, first);
  store_shared(to + 4, second);
}
inline void add_release(u64* counter) { ++*counter, emulated::steps++; }
inline u64 read_acquire(const u64* counter) { return *counter; }

namespace emulated {

inline void (*kernel)();
inline void enter() {
  kernel();
  current->done = true;
  steps++;
  while (true) yield();
}

// Runs a grid to its end. False if no thread can go on.
inline bool run(void (*entry)(), int grid, int threads, int shared_bytes) {
  kernel = entry;
  blocks.assign(grid, {});
  fibers.clear();
  for (int block = 0; block < grid; block++) {
    blocks[block].shared.assign(shared_bytes, (char)0xFF);
    blocks[block].warps.resize(threads / 32);
    for (int thread = 0; thread < threads; thread++) {
      auto fiber = std::make_unique<Fiber>();
      getcontext(&fiber->context);
      fiber->stack.resize(1 << 16);
      fiber->context.uc_stack.ss_sp = fiber->stack.data();
      fiber->context.uc_stack.ss_size = fiber->stack.size();
      fiber->block = block, fiber->thread = thread, fiber->done = false;
      makecontext(&fiber->context, enter, 0);
      fibers.push_back(std::move(fiber));
    }
  }
  std::vector<int> order(fibers.size() / 32);
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  gridDim.x = grid;
  for (int idle = 0; idle < 100;) {
    const long before = steps;
    int left = 0;
    std::shuffle(order.begin(), order.end(), chance);
    for (size_t i = 0; i < fibers.size(); i++) {
      Fiber& fiber = *fibers[order[i / 32] * 32 + i % 32];
      if (fiber.done || (chance() & 15) == 0) {
        left += !fiber.done;
        continue;
      }
      current = &fiber;
      threadIdx.x = fiber.thread, blockIdx.x = fiber.block;
      swapcontext(&scheduler, &fiber.context);
      left += !fiber.done;
    }
    arrive_late();
    if (left == 0) return true;
    idle = steps == before ? idle + 1 : 0;
  }
  return false;
}

}  // namespace emulated
