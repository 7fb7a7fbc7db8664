// How weights of each format become operands of `mma`, and their scales numbers.
//
// Sixteen outputs x 32 columns are a step. A lane 4g + t holds 8 columns (slots 8t..8t+8) of outputs g and g + 8. `load` reads what a
// lane needs of a step, so that a warp reads contiguous bytes, and `side` its scales and zero points, which are in pairs, of outputs g and g + 8: both only
// read, so that kernels do it steps ahead. `decode` makes BF16 of codes, exactly: they are integers of at most 8 bits, or floats with fewer bits than
// BF16's. `scale` makes numbers of scales; these are applied to sums in F32, so nothing of a weight is rounded.

// The operands of two `mma`: of output halves g and g + 8, slots (0,1) (2,3) and (4,5) (6,7).
struct Fragment {
  u32 a[2][4];
};

// Where an expert's projection lies, from the expert's first byte; written by the host (layout.rs).
struct Part {
  u64 codes, scales, zeros, biases;
  // Outputs; steps in a row; scales in a row; 2^32 / steps that share a scale, rounded up.
  u32 rows, steps, groups, pad;
  u64 per_group;
  // Type of scales: 0 F32, 1 F16, 2 BF16. Whether there are biases.
  u32 kind, biased;
};

// Scales of a lane's outputs g and g + 8 in a step; `second` of columns 16.. where groups are 16 wide; minima.
struct Scale {
  float first[2], second[2], minimum[2];
};

// Two scales as they are read: of F32 both words, else halves of the first.
__device__ __forceinline__ void pair(uint2& v, const u8* scales, u64 i, u32 kind, bool there) {
  const u8* at = scales + i * (kind == 0 ? 8 : 4);
  cached(v.x, at, there);
  cached(v.y, at + 4, there && kind == 0);
}
__device__ __forceinline__ float number(uint2 v, u32 which, u32 kind) {
  const u16 h = (u16)(which ? v.x >> 16 : v.x);
  const float full = f32(which ? v.y : v.x), half = f16(h), brain = bf16(h);
  return kind == 0 ? full : kind == 1 ? half : brain;
}

// Bytes with 128 added (or E4M3 codes), in each word in the order of slots 0 2 1 3.
struct Bytes {
  uint4 w;
};

// Nibble i of a word is slot 2i, nibble i + 4 slot 2i + 1.
struct Nibbles {
  uint2 w;
};
// code + minus, for codes below 128: 0x4300 | code is 128 + code.
__device__ __forceinline__ void nibbles(Fragment& f, u32 half, u32 w, u32 minus) {
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    f.a[i / 2][half + 2 * (i % 2)] = fma2(((w >> (4 * i)) & 0x000f000fu) | 0x43004300u, ONES, minus);
}

// Every format: BYTES of a step's codes (what lanes load, without what fills up a structure); PLAIN sums need no scale; HALVES has groups of 16; MINIMA subtracts a minimum per group of 32. Kernels for few and for many rows read so many
// steps ahead (of many an even number), which is what registers allow.
struct Format {
  static const bool PLAIN = false, HALVES = false, MINIMA = false;
  static const u32 FEW_AHEAD = 4, MANY_AHEAD = 4;
};

struct bf16_ : Format {
  static const bool PLAIN = true;
  static const u32 BYTES = 1024, MANY_AHEAD = 2;
  struct Raw {
    uint4 w[2];
  };
  struct Side {};
  static __device__ __forceinline__ void side(Side&, const u8*, const Part&, u32, u32, u32, bool) {}
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) {
    stream(r.w[0], codes + lane * 16, there);
    stream(r.w[1], codes + 512 + lane * 16, there);
  }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      f.a[0][h] = r.w[h].x, f.a[0][h + 2] = r.w[h].y;
      f.a[1][h] = r.w[h].z, f.a[1][h + 2] = r.w[h].w;
    }
  }
  static __device__ __forceinline__ Scale scale(const Side&, u32) { return {}; }
};

// Scales of their own, for groups of any multiple of 32 columns or for whole rows.
struct Grouped : Format {
  typedef uint2 Side;
  static __device__ __forceinline__ u64 index(const Part& p, u32 block, u32 step, u32 g) {
    return ((u64)block * p.groups + (u32)(step * p.per_group >> 32)) * 8 + g;
  }
  static __device__ __forceinline__ void side(Side& v, const u8* e, const Part& p, u32 block, u32 step, u32 g, bool there) {
    pair(v, e + p.scales, index(p, block, step, g), p.kind, there);
  }
  static __device__ __forceinline__ Scale scale(const Side& v, u32 kind) {
    Scale s = {};
    s.first[0] = number(v, 0, kind);
    s.first[1] = number(v, 1, kind);
    return s;
  }
};

// With a zero point beside each scale.
struct GroupedZero : Grouped {
  struct Side {
    uint2 scales;
    u32 zeros;
    // Of output g + 8 * h.
    __device__ __forceinline__ u32 zero(u32 h) const { return h ? zeros >> 16 : zeros & 0xffffu; }
  };
  static __device__ __forceinline__ void side(Side& v, const u8* e, const Part& p, u32 block, u32 step, u32 g, bool there) {
    Grouped::side(v.scales, e, p, block, step, g, there);
    cached(v.zeros, e + p.zeros + index(p, block, step, g) * 4, there);
  }
  static __device__ __forceinline__ Scale scale(const Side& v, u32 kind) { return Grouped::scale(v.scales, kind); }
};

// A power of two per 32 columns.
struct Powers : Format {
  struct Side {
    u16 two;
  };
  static __device__ __forceinline__ void side(Side& v, const u8* e, const Part& p, u32 block, u32 step, u32 g, bool there) {
    cached(v.two, e + p.scales + (((u64)block * p.steps + step) * 8 + g) * 2, there);
  }
  static __device__ __forceinline__ Scale scale(const Side& v, u32) {
    Scale s = {};
    s.first[0] = e8m0((u8)v.two);
    s.first[1] = e8m0((u8)(v.two >> 8));
    return s;
  }
};

// E4M3: the exponent's bias differs from BF16's by 120, which one exact product corrects. 0x7f and 0xff are NaN.
template <class Scaled>
struct Fp8 : Scaled {
  static const u32 BYTES = 512;
  typedef Bytes Raw;
  typedef typename Scaled::Side Side;
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) { stream(r.w, codes + lane * 16, there); }
  // Of codes at bits 0 and 16, and at bits 8 and 24.
  static __device__ __forceinline__ u32 low(u32 w) { return fma2(((w & 0x00800080u) << 8) | ((w & 0x007f007fu) << 4), 0x7b807b80u, 0x80008000u); }
  static __device__ __forceinline__ u32 high(u32 w) { return fma2((w & 0x80008000u) | ((w & 0x7f007f00u) >> 4), 0x7b807b80u, 0x80008000u); }
  // NaN where a code is: these are rare, so that one look is for all of a lane's.
  static __device__ __forceinline__ u32 with_nan(u32 v, u32 w) { return v | (((w & 0x007f007fu) + 0x00010001u) >> 7 & 0x00010001u) * 0x7fc0u; }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
    u32 w[4] = {r.w.x, r.w.y, r.w.z, r.w.w}, nan = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      f.a[i % 2][i / 2] = low(w[i]);
      f.a[i % 2][i / 2 + 2] = high(w[i]);
      nan |= (w[i] & 0x7f7f7f7fu) + 0x01010101u;
    }
    if (nan & 0x80808080u)
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        f.a[i % 2][i / 2] = with_nan(f.a[i % 2][i / 2], w[i]);
        f.a[i % 2][i / 2 + 2] = with_nan(f.a[i % 2][i / 2 + 2], w[i] >> 8);
      }
  }
};

struct fp8_ : Fp8<Grouped> {
  static const u32 FEW_AHEAD = 3;
};
struct mxfp8_ : Fp8<Powers> {};

// One scale per 128 x 128 weights: eight blocks of outputs have the same.
struct OfBlocks : Format {
  struct Side {
    u32 scale;
  };
  static __device__ __forceinline__ void side(Side& v, const u8* e, const Part& p, u32 block, u32 step, u32, bool there) {
    cached(v.scale, e + p.scales + ((u64)(block / 8) * p.groups + step / 4) * 4, there);
  }
  static __device__ __forceinline__ Scale scale(const Side& v, u32) {
    Scale s = {};
    s.first[0] = s.first[1] = f32(v.scale);
    return s;
  }
};
struct fp8_block_ : Fp8<OfBlocks> {};

// E2M1: as E4M3, with 126.
struct mxfp4_ : Powers {
  static const u32 BYTES = 256, FEW_AHEAD = 6;
  typedef Nibbles Raw;
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) { stream(r.w, codes + lane * 8, there); }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      u32 v = (i < 4 ? r.w.x : r.w.y) >> (4 * (i % 4)), h = i / 4, j = i % 4;
      f.a[j / 2][h + 2 * (j % 2)] = fma2(((v & 0x00080008u) << 12) | ((v & 0x00070007u) << 6), 0x7e807e80u, 0x80008000u);
    }
  }
};

// An integer of at most 8 bits as BF16, negated, twice.
__device__ __forceinline__ u32 minus_twice(u32 v) { return ((bits((float)v) >> 16) | 0x8000u) * 0x00010001u; }

// 128 + the low seven bits, minus 256 or 128 by the eighth: code - 128.
__device__ __forceinline__ u32 byte_pair(u32 w) {
  return fma2((w & 0x007f007fu) | 0x43004300u, ONES, ((w & 0x00800080u) ^ 0x00800080u) | 0xc300c300u);
}

template <class Scaled>
struct Int8 : Scaled {
  static const u32 BYTES = 512;
  typedef Bytes Raw;
  typedef typename Scaled::Side Side;
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) { stream(r.w, codes + lane * 16, there); }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
    u32 w[4] = {r.w.x, r.w.y, r.w.z, r.w.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      f.a[i % 2][i / 2] = byte_pair(w[i]);
      f.a[i % 2][i / 2 + 2] = byte_pair(w[i] >> 8);
    }
  }
};

struct int8_ : Int8<Grouped> {
  static const u32 FEW_AHEAD = 3;
};

// With zero points: code - zero = (code - 128) + (128 - zero), both and their sum integers that BF16 has.
struct int8_zero_ : Int8<GroupedZero> {
  static const u32 FEW_AHEAD = 2, MANY_AHEAD = 2;
  static __device__ __forceinline__ void decode(const Raw& r, const Side& v, Fragment& f) {
    Int8::decode(r, v, f);
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 shift = (bits(128.0f - (float)v.zero(h)) >> 16) * 0x00010001u;
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        f.a[j][h] = fma2(f.a[j][h], ONES, shift);
        f.a[j][h + 2] = fma2(f.a[j][h + 2], ONES, shift);
      }
    }
  }
};

struct int4_ : Grouped {
  static const u32 BYTES = 256;
  typedef Nibbles Raw;
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) { stream(r.w, codes + lane * 8, there); }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
    nibbles(f, 0, r.w.x, 0xc308c308u);  // -136
    nibbles(f, 1, r.w.y, 0xc308c308u);
  }
};

struct int4_zero_ : GroupedZero {
  static const u32 BYTES = 256, FEW_AHEAD = 3;
  typedef Nibbles Raw;
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) { stream(r.w, codes + lane * 8, there); }
  static __device__ __forceinline__ void decode(const Raw& r, const Side& v, Fragment& f) {
    nibbles(f, 0, r.w.x, minus_twice(128 + v.zero(0)));
    nibbles(f, 1, r.w.y, minus_twice(128 + v.zero(1)));
  }
};

// d * sc * code - dmin * mn, groups of 32 in blocks of 256. `scales` has sc and mn of a step, a byte each; `zeros` d and dmin of each block.
struct q4_k_ : Format {
  static const bool MINIMA = true;
  static const u32 BYTES = 256, FEW_AHEAD = 3, MANY_AHEAD = 2;
  typedef Nibbles Raw;
  struct Side {
    u32 codes;
    uint2 d;
  };
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) { stream(r.w, codes + lane * 8, there); }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
    nibbles(f, 0, r.w.x, 0xc300c300u);  // -128
    nibbles(f, 1, r.w.y, 0xc300c300u);
  }
  static __device__ __forceinline__ void side(Side& v, const u8* e, const Part& p, u32 block, u32 step, u32 g, bool there) {
    cached(v.codes, e + p.scales + (((u64)block * p.steps + step) * 8 + g) * 4, there);
    cached(v.d, e + p.zeros + (((u64)block * (p.steps / 8) + step / 8) * 8 + g) * 8, there);
  }
  static __device__ __forceinline__ Scale scale(const Side& v, u32) {
    Scale s = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 d = h ? v.d.y : v.d.x, two = h ? v.codes >> 16 : v.codes;
      s.first[h] = f16((u16)d) * (float)(two & 0xff);
      s.minimum[h] = f16((u16)(d >> 16)) * (float)(two >> 8 & 0xff);
    }
    return s;
  }
};

// d * sc * (code - 32), groups of 16. Low nibbles, then two bits: of slot 2i at bit 2i of a byte, of slot 2i + 1 in the next byte.
// `scales` has the two of a step, `zeros` d of each block of 256.
struct q6_k_ : Format {
  static const bool HALVES = true;
  static const u32 BYTES = 384, FEW_AHEAD = 3, MANY_AHEAD = 2;
  struct Raw {
    uint2 w;
    u32 high;
  };
  struct Side {
    u32 codes, d;
  };
  static __device__ __forceinline__ void load(Raw& r, const u8* codes, u32 lane, bool there) {
    stream(r.w, codes + lane * 8, there);
    stream(r.high, codes + 256 + lane * 4, there);
  }
  static __device__ __forceinline__ void decode(const Raw& r, const Side&, Fragment& f) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 w = h ? r.w.y : r.w.x, two = h ? r.high >> 16 : r.high & 0xffffu;
      u32 high = ((two & 0xffu) << 4) | ((two & 0xff00u) << 12);
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        u32 q = ((w >> (4 * i)) & 0x000f000fu) | ((high >> (2 * i)) & 0x00300030u);
        f.a[i / 2][h + 2 * (i % 2)] = fma2(q | 0x43004300u, ONES, 0xc320c320u);  // -160
      }
    }
  }
  static __device__ __forceinline__ void side(Side& v, const u8* e, const Part& p, u32 block, u32 step, u32 g, bool there) {
    cached(v.codes, e + p.scales + (((u64)block * p.steps + step) * 8 + g) * 4, there);
    cached(v.d, e + p.zeros + (((u64)block * (p.steps / 8) + step / 8) * 8 + g) * 4, there);
  }
  static __device__ __forceinline__ Scale scale(const Side& v, u32) {
    Scale s = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 two = h ? v.codes >> 16 : v.codes;
      float d = f16((u16)(h ? v.d >> 16 : v.d));
      s.first[h] = d * (float)(signed char)(two & 0xff);
      s.second[h] = d * (float)(signed char)(two >> 8 & 0xff);
    }
    return s;
  }
};
