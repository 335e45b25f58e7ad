// One function for each instruction of Hopper's, which the kernels of several files share.
//
// Compiled behind the types `u32` and `u64`.

__device__ __forceinline__ u32 shared_memory() {
  extern __shared__ __align__(1024) char shared[];
  return (u32)__cvta_generic_to_shared(shared);
}

__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

__device__ __forceinline__ float from_neighbour(float value, int bit) {
  return __shfl_xor_sync(0xFFFFFFFF, value, bit);
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ void block_meets() { __syncthreads(); }

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// What the copy engine sees of new barriers.
__device__ __forceinline__ void barriers_are_there() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred there;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
      "@there bra done;\nbra again;\ndone:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

// Bytes of weights, which are read once.
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier) : "memory");
}

// Of a warp group that copies and of two that multiply: 65,536 in all.
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }

__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ uint4 load_global(const void* from) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ u32 load_global_pair(const void* from) {
  u32 value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_global_pair(void* to, u32 value) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ float2 load_shared_pair(u32 from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void add_release(u64* counter) {
  asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ u64 read_acquire(const u64* counter) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}

__device__ __forceinline__ void wait_a_little() {}
