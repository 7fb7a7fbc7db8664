// CUDA's kernels as C++ of a CPU: for each thread of a block a context of its own, one running at a time. A warp's lanes meet at
// each `mma` (or other exchange between them), which is then computed for all; a block's threads meet at each __syncthreads. Lanes that do not all come to
// the same place are an error, as they would be on a GPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define KT_EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
// One block runs at a time, so that its shared memory may be anybody's.
#define __shared__ static

// Aligned as CUDA's, on which the size of what holds them depends.
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  uint32_t x, y, z;
};

namespace emulated {

constexpr uint32_t LANES = 32, MOST = 1024;
constexpr size_t STACK = 128 << 10;

enum Wait { RUNS, AT_MMA, AT_MATCH, AT_SHUFFLE, AT_WARP, AT_BARRIER, DONE };

// One that is under way; the end of a group.
struct Copy {
  void* to;
  const void* from;
};
struct Thread {
  void* sp;
  Wait wait;
  float* d;
  const uint32_t* a;
  uint32_t b[2];
  std::vector<Copy> copies;
};

inline Thread threads[MOST];
inline Thread* self;
inline void* scheduler;
inline dim3 thread_index, block_index, grid;
inline const char* broken;
inline uint64_t products;
// Whether the last warp and the last lane run first.
inline bool backwards;

// Saves what a function may not change, and goes on where the other left off.
extern "C" void kt_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl kt_switch
.hidden kt_switch
kt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "threads of a block are switched by hand, for x86-64 only"
#endif

inline void pause(Wait wait) {
  self->wait = wait;
  kt_switch(&self->sp, scheduler);
}

inline float wide(uint32_t half) {
  uint32_t v = half << 16;
  float f;
  memcpy(&f, &v, 4);
  return f;
}

// The product of 32 lanes. Sums in F32, in rising order: a GPU adds in an order of its own.
inline void product(Thread* lanes) {
  products++;
  float a[16][16], b[16][8], c[16][8];
  for (uint32_t lane = 0; lane < LANES; lane++) {
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t row = g + i % 2 * 8, col = t * 2 + i / 2 * 8, v = lanes[lane].a[i];
      a[row][col] = wide(v & 0xffff), a[row][col + 1] = wide(v >> 16);
      c[g + i / 2 * 8][t * 2 + i % 2] = lanes[lane].d[i];
    }
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t row = t * 2 + i * 8, v = lanes[lane].b[i];
      b[row][g] = wide(v & 0xffff), b[row + 1][g] = wide(v >> 16);
    }
  }
  for (uint32_t i = 0; i < 16; i++)
    for (uint32_t k = 0; k < 16; k++)
      for (uint32_t j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (uint32_t lane = 0; lane < LANES; lane++)
    for (uint32_t i = 0; i < 4; i++) lanes[lane].d[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

// Each lane's b[0] becomes the lanes with the same, or that of the lane b[1] below.
inline void matched(Thread* lanes) {
  uint32_t masks[LANES] = {};
  for (uint32_t i = 0; i < LANES; i++)
    for (uint32_t j = 0; j < LANES; j++) masks[i] |= (uint32_t)(lanes[i].b[0] == lanes[j].b[0]) << j;
  for (uint32_t i = 0; i < LANES; i++) lanes[i].b[0] = masks[i];
}
inline void shuffled(Thread* lanes) {
  for (uint32_t i = LANES; i-- > 0;)
    if (i >= lanes[i].b[1]) lanes[i].b[0] = lanes[i - lanes[i].b[1]].b[0];
}

typedef void (*Body)(void*);
inline Body body;
inline void* argument;

inline void begin() {
  body(argument);
  pause(DONE);
}

// Runs a warp until all its lanes are at a barrier or done.
inline bool warp(uint32_t first) {
  Thread* lanes = threads + first;
  for (;;) {
    for (uint32_t i = 0; i < LANES; i++) {
      const uint32_t lane = backwards ? LANES - 1 - i : i;
      if (lanes[lane].wait != RUNS) continue;
      thread_index = {first + lane, 0, 0};
      self = lanes + lane;
      kt_switch(&scheduler, self->sp);
    }
    for (uint32_t lane = 1; lane < LANES; lane++)
      if (lanes[lane].wait != lanes[0].wait) return broken = "lanes of a warp parted", false;
    switch (lanes[0].wait) {
      case AT_MMA: product(lanes); break;
      case AT_MATCH: matched(lanes); break;
      case AT_SHUFFLE: shuffled(lanes); break;
      case AT_WARP: break;
      default: return true;
    }
    for (uint32_t lane = 0; lane < LANES; lane++) lanes[lane].wait = RUNS;
  }
}

// One block of `count` threads; false when its threads did not keep together.
inline bool block(uint32_t count, Body f, void* arg) {
  static char* stacks = (char*)malloc(MOST * STACK);
  if (count > MOST || count % LANES) return broken = "a block of an odd number of threads", false;
  body = f, argument = arg;
  for (uint32_t i = 0; i < count; i++) {
    void** top = (void**)(((uintptr_t)stacks + (i + 1) * STACK) & ~(uintptr_t)63);
    *--top = nullptr;  // so that a function finds the stack as after a call
    *--top = (void*)begin;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    threads[i].sp = top, threads[i].wait = RUNS;
    threads[i].copies.clear();
  }
  for (;;) {
    for (uint32_t first = 0; first < count; first += LANES)
      if (!warp(backwards ? count - LANES - first : first)) return false;
    for (uint32_t i = 1; i < count; i++)
      if (threads[i].wait != threads[0].wait) return broken = "threads of a block parted at a barrier", false;
    if (threads[0].wait == DONE) return true;
    for (uint32_t i = 0; i < count; i++) threads[i].wait = RUNS;
  }
}

}  // namespace emulated

#define threadIdx (emulated::thread_index)
#define blockIdx (emulated::block_index)
#define gridDim (emulated::grid)
#define __syncthreads() emulated::pause(emulated::AT_BARRIER)

inline float f32(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t bits(float f) {
  uint32_t v;
  memcpy(&v, &f, 4);
  return v;
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::Thread* self = emulated::self;
  self->d = d, self->a = a, self->b[0] = b0, self->b[1] = b1;
  emulated::pause(emulated::AT_MMA);
}

inline uint32_t exchange(emulated::Wait how, uint32_t v, uint32_t by) {
  emulated::Thread* self = emulated::self;
  self->b[0] = v, self->b[1] = by;
  emulated::pause(how);
  return self->b[0];
}
inline uint32_t match(uint32_t v) { return exchange(emulated::AT_MATCH, v, 0); }
inline uint32_t shuffle_up(uint32_t v, uint32_t by) { return exchange(emulated::AT_SHUFFLE, v, by); }
inline void sync_warp() { emulated::pause(emulated::AT_WARP); }
inline uint32_t ones(uint32_t v) { return (uint32_t)__builtin_popcount(v); }

// Products of two BF16 and a third are exact in double, unless they are 30 binary orders apart, which no format comes near to.
inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    auto half = [&](uint32_t v) { return (double)f32((v >> shift & 0xffff) << 16); };
    const double exact = half(a) * half(b) + half(c);
    uint32_t v = bits((float)exact);
    v = exact != exact ? (v >> 16 | 0x40) : (v + 0x7fff + (v >> 16 & 1)) >> 16;
    out |= v << shift;
  }
  return out;
}

template <class T>
inline void stream(T& v, const void* p, bool there) {
  if (there) v = *(const T*)p;
}
template <class T>
inline void cached(T& v, const void* p, bool there) {
  if (there) v = *(const T*)p;
}

// Copies are done when they are waited for, and leave NaN until then.
inline void copy(void* to, const void* from) {
  memset(to, 0xff, 16);
  emulated::self->copies.push_back({to, from});
}
inline void copies_end() { emulated::self->copies.push_back({nullptr, nullptr}); }
template <int N>
inline void copies_done() {
  auto& copies = emulated::self->copies;
  size_t groups = 0, done = 0;
  for (auto& c : copies) groups += !c.to;
  for (; groups > N; done++)
    if (copies[done].to) memcpy(copies[done].to, copies[done].from, 16);
    else groups--;
  copies.erase(copies.begin(), copies.begin() + (long)done);
}

inline float f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
  if (e == 31) return f32(sign | 0x7f800000 | m << 13);
  if (e == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)m, -24);
  return f32(sign | (e + 112) << 23 | m << 13);
}
