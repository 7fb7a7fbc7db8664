// What all kernels share. No CUDA headers: the sources are compiled at run time, where there may be none.
//
// Everything below that is more than C++ stands in this file's first half, so that tests can put plain C++ in its place
// (KT_EMULATED) and run the rest of the kernels on a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef KT_EMULATED

// d += a * b: 16 outputs x 16 columns times 16 columns x 8 tokens, all BF16, sums in F32. For the lane 4g + t: a[0] and a[2] are columns
// 2t, 2t+1 and 2t+8, 2t+9 of output g, a[1] and a[3] those of output g + 8; b0 and b1 the same columns of token g; d are
// outputs g, g, g+8, g+8 of tokens 2t, 2t+1, 2t, 2t+1.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a * b + c of two BF16 at once, rounded once.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Reads weights, if they are there, else leaves `v`: without a branch, which would part what a warp has on its way. `stream` is for what is read once, and
// needs no place in the first cache. They do not change while a kernel runs, so these may be moved like any arithmetic.
#define KT_LOADS(name, load)                                                                                                          \
  __device__ __forceinline__ void name(u32& v, const void* p, bool there) {                                                           \
    asm("{ .reg .pred t; setp.ne.u32 t, %2, 0; @t " load ".u32 %0, [%1]; }" : "+r"(v) : "l"(p), "r"((u32)there));                     \
  }                                                                                                                                   \
  __device__ __forceinline__ void name(uint2& v, const void* p, bool there) {                                                         \
    asm("{ .reg .pred t; setp.ne.u32 t, %3, 0; @t " load ".v2.u32 {%0,%1}, [%2]; }" : "+r"(v.x), "+r"(v.y) : "l"(p), "r"((u32)there)); \
  }                                                                                                                                   \
  __device__ __forceinline__ void name(uint4& v, const void* p, bool there) {                                                         \
    asm("{ .reg .pred t; setp.ne.u32 t, %5, 0; @t " load ".v4.u32 {%0,%1,%2,%3}, [%4]; }"                                             \
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)                                                                                  \
        : "l"(p), "r"((u32)there));                                                                                                   \
  }
KT_LOADS(stream, "ld.global.nc.L1::no_allocate")
KT_LOADS(cached, "ld.global.nc")
__device__ __forceinline__ void cached(u16& v, const void* p, bool there) {
  asm("{ .reg .pred t; setp.ne.u32 t, %2, 0; @t ld.global.nc.u16 %0, [%1]; }" : "+h"(v) : "l"(p), "r"((u32)there));
}

// Copies 16 bytes to shared memory, some time before `copies_done`. Copies from one `copies_end` to the next are a group; `copies_done<N>` waits for all
// groups but the last N, of this thread's: a barrier tells the others.
__device__ __forceinline__ void copy(void* to, const void* from) {
  asm volatile("{ .reg .u64 at; cvta.to.shared.u64 at, %0; cp.async.cg.shared.global [at], [%1], 16; }" ::"l"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copies_done() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ float f16(u16 bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}

// Among a warp's lanes, all of which come here: those with the same value; the value of the lane that is `by` below (its own where there is none); and what
// the others wrote before is there.
__device__ __forceinline__ u32 match(u32 v) { return __match_any_sync(~0u, v); }
__device__ __forceinline__ u32 shuffle_up(u32 v, u32 by) { return __shfl_up_sync(~0u, v, by); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ u32 ones(u32 v) { return (u32)__popc((int)v); }

__device__ __forceinline__ float f32(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 bits(float v) { return __float_as_uint(v); }

#endif

// One for both halves: a * 1 + c adds exactly where the sum is a BF16.
#define ONES 0x3f803f80u

__device__ __forceinline__ float bf16(u16 v) { return f32((u32)v << 16); }

// To the nearest BF16, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 to_bf16(float v) {
  u32 b = bits(v);
  if (v != v) return (u16)((b >> 16) | 0x40);
  return (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// A power of two by its exponent: 0 is a subnormal, 255 NaN.
__device__ __forceinline__ float e8m0(u8 e) { return f32(e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : (u32)e << 23); }

// exp to about 2e-7, as the CPU's: 2^n * 2^f by Cody and Waite, and a Taylor polynomial. Saturates to 0 and infinity.
__device__ __forceinline__ float exp_(float x) {
  if (x < -87.3f) return 0.0f;
  if (x > 88.7f) return f32(0x7f800000u);
  float n = rintf(x * 1.44269504088896340736f);
  float r = (x - n * 0.6933594f) - n * -2.1219444e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Two factors, as 2^128 is none; a NaN passes through p.
  float half = floorf(n * 0.5f);
  float low = x == x ? half : 0.0f, high = x == x ? n - half : 0.0f;
  return p * f32((u32)((int)low + 127) << 23) * f32((u32)((int)high + 127) << 23);
}

// The activation rules: 0 silu(gate) * up; 1 the same of clamped values; 2 gpt-oss'.
__device__ __forceinline__ float activate(u32 rule, float alpha, float limit, float gate, float up) {
  if (rule == 0) return gate / (1.0f + exp_(-gate)) * up;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  if (rule == 1) return gate / (1.0f + exp_(-gate)) * up;
  return gate * (1.0f / (1.0f + exp_(-(alpha * gate)))) * (up + 1.0f);
}

// Where column c of a row of inputs is put. Weights lie as lanes of `mma` take them: lane t of four has eight columns of 32, in
// slots 8t..8t+8. Where groups are 16 wide, the first four are of the first group; else they are neighbours.
__device__ __forceinline__ u32 slot(u32 c, u32 halves) {
  return halves ? (c & ~31u) | ((c & 12u) << 1) | ((c & 16u) >> 2) | (c & 3u) : c;
}
