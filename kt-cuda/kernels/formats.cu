// How weights of each format become operands of `mma`, and their scales numbers.
//
// Sixteen outputs x 32 columns are a step. A lane 4g + t holds 8 columns (slots 8t..8t+8) of outputs g and g + 8. `load` reads what a
// lane needs of a step, so that a warp reads contiguous bytes; `decode` makes BF16 of it, exactly: codes are integers of
// at most 8 bits, or floats with fewer bits than BF16's. Scales are applied to sums in F32, so nothing of a weight is rounded.

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

__device__ __forceinline__ float number(const u8* p, u64 i, u32 kind) {
  if (kind == 0) return ((const float*)p)[i];
  const u16 v = ((const u16*)p)[i];
  const float half = f16(v), brain = bf16(v);
  return kind == 1 ? half : brain;
}

// Bytes with 128 added (or E4M3 codes), in each word in the order of slots 0 2 1 3.
struct Bytes {
  uint4 w;
};
__device__ __forceinline__ Bytes load_bytes(const u8* codes, u64 step, u32 lane) { return {stream4(codes + step * 512 + lane * 16)}; }

// Nibble i of a word is slot 2i, nibble i + 4 slot 2i + 1.
struct Nibbles {
  uint2 w;
};
__device__ __forceinline__ Nibbles load_nibbles(const u8* codes, u64 step, u32 lane) {
  return {stream2(codes + step * 256 + lane * 8)};
}
// code + minus, for codes below 128: 0x4300 | code is 128 + code.
__device__ __forceinline__ void nibbles(Fragment& f, u32 half, u32 w, u32 minus) {
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    f.a[i / 2][half + 2 * (i % 2)] = fma2(((w >> (4 * i)) & 0x000f000fu) | 0x43004300u, ONES, minus);
}

// Every format: PLAIN sums need no scale; HALVES has groups of 16; MINIMA subtracts a minimum per group of 32.
struct Format {
  static const bool PLAIN = false, HALVES = false, MINIMA = false;
};

struct bf16_ : Format {
  static const bool PLAIN = true;
  struct Raw {
    uint4 w[2];
  };
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) {
    return {{stream4(codes + step * 1024 + lane * 16), stream4(codes + step * 1024 + 512 + lane * 16)}};
  }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      f.a[0][h] = r.w[h].x, f.a[0][h + 2] = r.w[h].y;
      f.a[1][h] = r.w[h].z, f.a[1][h + 2] = r.w[h].w;
    }
  }
  static __device__ __forceinline__ Scale scale(const u8*, const Part&, u32, u32, u32) { return {}; }
};

// Scales of their own, for groups of any multiple of 32 columns or for whole rows.
struct Grouped : Format {
  static __device__ __forceinline__ u64 index(const Part& p, u32 block, u32 step) {
    return ((u64)block * p.groups + (u32)(step * p.per_group >> 32)) * 16;
  }
  static __device__ __forceinline__ Scale scale(const u8* e, const Part& p, u32 block, u32 step, u32 g) {
    u64 i = index(p, block, step);
    Scale s = {};
    s.first[0] = number(e + p.scales, i + g, p.kind);
    s.first[1] = number(e + p.scales, i + g + 8, p.kind);
    return s;
  }
};

// E4M3: the exponent's bias differs from BF16's by 120, which one exact product corrects. 0x7f and 0xff are NaN.
struct Fp8 : Grouped {
  typedef Bytes Raw;
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) { return load_bytes(codes, step, lane); }
  // Of codes at bits 0 and 16, and at bits 8 and 24.
  static __device__ __forceinline__ u32 low(u32 w) { return fma2(((w & 0x00800080u) << 8) | ((w & 0x007f007fu) << 4), 0x7b807b80u, 0x80008000u); }
  static __device__ __forceinline__ u32 high(u32 w) { return fma2((w & 0x80008000u) | ((w & 0x7f007f00u) >> 4), 0x7b807b80u, 0x80008000u); }
  // NaN where a code is: these are rare, so that one look is for all of a lane's.
  static __device__ __forceinline__ u32 with_nan(u32 v, u32 w) { return v | (((w & 0x007f007fu) + 0x00010001u) >> 7 & 0x00010001u) * 0x7fc0u; }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
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

struct fp8_ : Fp8 {};

// One scale per 128 x 128 weights: eight blocks of outputs have the same.
struct fp8_block_ : Fp8 {
  static __device__ __forceinline__ Scale scale(const u8* e, const Part& p, u32 block, u32 step, u32) {
    Scale s = {};
    s.first[0] = s.first[1] = number(e + p.scales, (u64)(block / 8) * p.groups + step / 4, p.kind);
    return s;
  }
};

// A power of two per 32 columns.
__device__ __forceinline__ Scale powers(const u8* e, const Part& p, u32 block, u32 step, u32 g) {
  const u8* at = e + p.scales + ((u64)block * p.steps + step) * 16 + g;
  Scale s = {};
  s.first[0] = e8m0(at[0]);
  s.first[1] = e8m0(at[8]);
  return s;
}

struct mxfp8_ : Fp8 {
  static __device__ __forceinline__ Scale scale(const u8* e, const Part& p, u32 block, u32 step, u32 g) { return powers(e, p, block, step, g); }
};

// E2M1: as E4M3, with 126.
struct mxfp4_ : Format {
  typedef Nibbles Raw;
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) { return load_nibbles(codes, step, lane); }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      u32 v = (i < 4 ? r.w.x : r.w.y) >> (4 * (i % 4)), h = i / 4, j = i % 4;
      f.a[j / 2][h + 2 * (j % 2)] = fma2(((v & 0x00080008u) << 12) | ((v & 0x00070007u) << 6), 0x7e807e80u, 0x80008000u);
    }
  }
  static __device__ __forceinline__ Scale scale(const u8* e, const Part& p, u32 block, u32 step, u32 g) { return powers(e, p, block, step, g); }
};

// Zero points of outputs g and g + 8.
__device__ __forceinline__ void zeros(const u8* e, const Part& p, u32 block, u32 step, u32 g, u32 (&z)[2]) {
  const u16* at = (const u16*)(e + p.zeros) + Grouped::index(p, block, step) + g;
  z[0] = at[0], z[1] = at[8];
}
// An integer of at most 8 bits as BF16, negated, twice.
__device__ __forceinline__ u32 minus_twice(u32 v) { return ((bits((float)v) >> 16) | 0x8000u) * 0x00010001u; }

// 128 + the low seven bits, minus 256 or 128 by the eighth: code - 128.
__device__ __forceinline__ u32 byte_pair(u32 w) {
  return fma2((w & 0x007f007fu) | 0x43004300u, ONES, ((w & 0x00800080u) ^ 0x00800080u) | 0xc300c300u);
}

struct int8_ : Grouped {
  typedef Bytes Raw;
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) { return load_bytes(codes, step, lane); }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
    u32 w[4] = {r.w.x, r.w.y, r.w.z, r.w.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      f.a[i % 2][i / 2] = byte_pair(w[i]);
      f.a[i % 2][i / 2 + 2] = byte_pair(w[i] >> 8);
    }
  }
};

// With zero points: code - zero = (code - 128) + (128 - zero), both and their sum integers that BF16 has.
struct int8_zero_ : int8_ {
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8* e, const Part& p, u32 block, u32 step, u32 g) {
    int8_::decode(r, f, e, p, block, step, g);
    u32 z[2];
    zeros(e, p, block, step, g, z);
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 shift = (bits(128.0f - (float)z[h]) >> 16) * 0x00010001u;
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        f.a[j][h] = fma2(f.a[j][h], ONES, shift);
        f.a[j][h + 2] = fma2(f.a[j][h + 2], ONES, shift);
      }
    }
  }
};

struct int4_ : Grouped {
  typedef Nibbles Raw;
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) { return load_nibbles(codes, step, lane); }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
    nibbles(f, 0, r.w.x, 0xc308c308u);  // -136
    nibbles(f, 1, r.w.y, 0xc308c308u);
  }
};

struct int4_zero_ : int4_ {
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8* e, const Part& p, u32 block, u32 step, u32 g) {
    u32 z[2];
    zeros(e, p, block, step, g, z);
    nibbles(f, 0, r.w.x, minus_twice(128 + z[0]));
    nibbles(f, 1, r.w.y, minus_twice(128 + z[1]));
  }
};

// d * sc * code - dmin * mn, groups of 32 in blocks of 256. `scales` has the 16 bytes in front of each GGUF block.
struct q4_k_ : Format {
  static const bool MINIMA = true;
  typedef Nibbles Raw;
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) { return load_nibbles(codes, step, lane); }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
    nibbles(f, 0, r.w.x, 0xc300c300u);  // -128
    nibbles(f, 1, r.w.y, 0xc300c300u);
  }
  static __device__ __forceinline__ Scale scale(const u8* e, const Part& p, u32 block, u32 step, u32 g) {
    const uint4* at = (const uint4*)(e + p.scales) + ((u64)block * (p.steps / 8) + step / 8) * 16 + g;
    u32 j = step % 8, shift = 8 * (j % 4);
    Scale s = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      uint4 v = at[h * 8];
      // Groups 0..4: six bits of bytes j and j + 4. Groups 4..8: four bits of byte j + 4, and the top two of bytes j - 4 and j.
      u32 a = v.y >> shift, b = v.z >> shift, c = v.w >> shift;
      u32 sc = j < 4 ? a & 63 : (c & 15) | ((a >> 2) & 48);
      u32 mn = j < 4 ? b & 63 : ((c >> 4) & 15) | ((b >> 2) & 48);
      s.first[h] = f16((u16)v.x) * (float)sc;
      s.minimum[h] = f16((u16)(v.x >> 16)) * (float)mn;
    }
    return s;
  }
};

// d * sc * (code - 32), groups of 16. Low nibbles, then two bits: of slot 2i at bit 2i of a byte, of slot 2i + 1 in the next byte.
// `scales` has the two of a step, `zeros` d of each block of 256.
struct q6_k_ : Format {
  static const bool HALVES = true;
  struct Raw {
    uint2 w;
    u32 high;
  };
  static __device__ __forceinline__ Raw load(const Part&, const u8* codes, u64 step, u32 lane) {
    const u8* at = codes + step * 384;
    return {stream2(at + lane * 8), stream1(at + 256 + lane * 4)};
  }
  static __device__ __forceinline__ void decode(const Raw& r, Fragment& f, const u8*, const Part&, u32, u32, u32) {
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
  static __device__ __forceinline__ Scale scale(const u8* e, const Part& p, u32 block, u32 step, u32 g) {
    const u16* at = (const u16*)(e + p.scales) + ((u64)block * p.steps + step) * 16 + g;
    const u16* ds = (const u16*)(e + p.zeros) + ((u64)block * (p.steps / 8) + step / 8) * 16 + g;
    Scale s = {};
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      u32 two = at[h * 8];
      float d = f16(ds[h * 8]);
      s.first[h] = d * (float)(signed char)(two & 0xff);
      s.second[h] = d * (float)(signed char)(two >> 8);
    }
    return s;
  }
};
