// The two products of a layer's experts: gate, up and activation; then down. All experts are in one launch.
//
// Weights are in the lanes' order (formats.cu), so they go from memory to registers to `mma`, and through nothing else. There are two shapes of the
// same sums: `few` for experts with up to 16 rows, where reading weights is all that counts, and `many` for 64 rows at a time.
//
// An output number is the same bits in both, and whatever else is computed with it: the row's steps are cut into SEGMENTS runs, each
// summed from zero in rising order, and the sums of the runs are added in rising order. `few` gives each run to a warp.

#define SEGMENTS 4
#define FEW 2   // eights of rows
#define MANY 8
#define UNROLL 2  // steps that a warp of `few` reads at once

// Rows of work of one expert: `first..first + count`.
struct Tile {
  u32 expert, first, count;
};

struct Call {
  const u8* weights;
  u64 expert_bytes;
  Part part[2];
  // Inputs [_, x_stride] BF16, in slots; `rows` says which is whose, null where they are by row of work.
  const u16* x;
  const u32* rows;
  const Tile* tiles;
  const u32* tile_count;
  // Of gate and up: BF16 [rows, out_stride], in slots. Of down: F32 [rows, out_stride].
  void* out;
  u32 x_stride, out_stride, rule, halves;
  float alpha, limit;
};

__device__ __forceinline__ void scaled(float (&acc)[4], const float (&p)[4], const float (&s)[2]) {
  acc[0] = fmaf(s[0], p[0], acc[0]);
  acc[1] = fmaf(s[0], p[1], acc[1]);
  acc[2] = fmaf(s[1], p[2], acc[2]);
  acc[3] = fmaf(s[1], p[3], acc[3]);
}

// One step of two blocks of outputs and eight rows.
template <class F>
__device__ __forceinline__ void multiply(float (&acc)[2][4], const Fragment (&f)[2], const Scale (&s)[2], uint4 b) {
  float sums[4] = {0, 0, 0, 0};
  if (F::MINIMA) {
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    mma(sums, ones, b.x, b.y);
    mma(sums, ones, b.z, b.w);
  }
#pragma unroll
  for (u32 m = 0; m < 2; m++) {
    if (F::PLAIN) {
      mma(acc[m], f[m].a[0], b.x, b.y);
      mma(acc[m], f[m].a[1], b.z, b.w);
      continue;
    }
    float p[4] = {0, 0, 0, 0};
    mma(p, f[m].a[0], b.x, b.y);
    if (F::HALVES) {
      scaled(acc[m], p, s[m].first);
      p[0] = p[1] = p[2] = p[3] = 0;
    }
    mma(p, f[m].a[1], b.z, b.w);
    scaled(acc[m], p, F::HALVES ? s[m].second : s[m].first);
    if (F::MINIMA) {
      const float minus[2] = {-s[m].minimum[0], -s[m].minimum[1]};
      scaled(acc[m], sums, minus);
    }
  }
}

// The finished sums of output `at` of the two blocks, for one row of work.
template <bool DOWN>
__device__ __forceinline__ void finish(const Call& c, const u8* e, const u32 (&block)[2], u32 at, u32 row, float a, float b) {
  if (DOWN) {
    const Part& p = c.part[0];
    const float* bias = (const float*)(e + p.biases);
    float* out = (float*)c.out + (u64)row * c.out_stride;
    u32 i = block[0] * 16 + at, j = block[1] * 16 + at;
    if (i < p.rows) out[i] = p.biased ? a + bias[i] : a;
    if (j < p.rows) out[j] = p.biased ? b + bias[j] : b;
  } else {
    u32 i = block[0] * 16 + at;
    float v = 0;  // outputs that only fill up the next product's last step
    if (i < c.part[0].rows) {
      if (c.part[0].biased) a += ((const float*)(e + c.part[0].biases))[i];
      if (c.part[1].biased) b += ((const float*)(e + c.part[1].biases))[i];
      v = activate(c.rule, c.alpha, c.limit, a, b);
    }
    ((u16*)c.out)[(u64)row * c.out_stride + slot(i, c.halves)] = to_bf16(v);
  }
}

__device__ __forceinline__ const u8* input(const Call& c, const Tile& tile, u32 j) {
  u32 row = tile.first + j;
  return (const u8*)(c.x + (u64)(c.rows ? c.rows[row] : row) * c.x_stride);
}

// The weights of UNROLL steps from `first` on, of both blocks.
template <class F, bool DOWN>
__device__ __forceinline__ void fetch(const Call& c, const u8* e, const u32 (&block)[2], u32 first, u32 end, u32 lane,
                                      typename F::Raw (&raw)[UNROLL][2]) {
#pragma unroll
  for (u32 u = 0; u < UNROLL; u++)
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
      const Part& p = c.part[DOWN ? 0 : m];
      if (first + u < end) raw[u][m] = F::load(p, e + p.codes, (u64)block[m] * p.steps + first + u, lane);
    }
}

// Two blocks of 16 outputs (of gate and up, or of down) and up to 16 rows; a warp for each run of steps.
template <class F, bool DOWN>
__device__ __forceinline__ void few(const Call& c) {
  __shared__ float sums[SEGMENTS][FEW][2][4][32];
  if (blockIdx.y >= *c.tile_count) return;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Tile tile = c.tiles[blockIdx.y];
  const u8* e = c.weights + tile.expert * c.expert_bytes;
  const u32 block[2] = {DOWN ? blockIdx.x * 2 : blockIdx.x, DOWN ? blockIdx.x * 2 + 1 : blockIdx.x};
  const u32 steps = c.part[0].steps, end = steps * (warp + 1) / SEGMENTS;
  const u8* x[FEW];
#pragma unroll
  for (u32 n = 0; n < FEW; n++) x[n] = n * 8 + g < tile.count ? input(c, tile, n * 8 + g) + t * 16 : 0;
  float acc[FEW][2][4] = {};
  // What the next turn needs is on its way while this one computes.
  typename F::Raw next[UNROLL][2] = {};
  fetch<F, DOWN>(c, e, block, steps * warp / SEGMENTS, end, lane, next);
  for (u32 first = steps * warp / SEGMENTS; first < end; first += UNROLL) {
    typename F::Raw raw[UNROLL][2];
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) raw[u][0] = next[u][0], raw[u][1] = next[u][1];
    fetch<F, DOWN>(c, e, block, first + UNROLL, end, lane, next);
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
      u32 step = first + u;
      if (step >= end) break;
      Fragment f[2];
      Scale s[2];
#pragma unroll
      for (u32 m = 0; m < 2; m++) {
        const Part& p = c.part[DOWN ? 0 : m];
        F::decode(raw[u][m], f[m], e, p, block[m], step, g);
        s[m] = F::scale(e, p, block[m], step, g);
      }
#pragma unroll
      for (u32 n = 0; n < FEW; n++) {
        if (n * 8 >= tile.count) break;
        uint4 b = {0, 0, 0, 0};
        if (x[n]) b = *(const uint4*)(x[n] + (u64)step * 64);
        multiply<F>(acc[n], f, s, b);
      }
    }
  }
#pragma unroll
  for (u32 n = 0; n < FEW; n++)
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) sums[warp][n][m][i][lane] = acc[n][m][i];
  __syncthreads();
  // Each warp adds a quarter of them: sums `warp` of all lanes.
  for (u32 n = 0; n < FEW; n++) {
    u32 j = n * 8 + t * 2 + warp % 2;
    if (j >= tile.count) break;
    float total[2] = {0, 0};
    for (u32 run = 0; run < SEGMENTS; run++)
      for (u32 m = 0; m < 2; m++) total[m] += sums[run][n][m][warp][lane];
    finish<DOWN>(c, e, block, g + warp / 2 * 8, tile.first + j, total[0], total[1]);
  }
}

// For each of four warps two blocks of outputs (one of gate and one of up, or two of down), and up to 64 rows, whose inputs
// the warps share. The next step is on its way while one is multiplied.
template <class F, bool DOWN>
__device__ __forceinline__ void many(const Call& c) {
  __shared__ uint4 shared[2][MANY * 8 * 4];
  if (blockIdx.y >= *c.tile_count) return;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Tile tile = c.tiles[blockIdx.y];
  const u8* e = c.weights + tile.expert * c.expert_bytes;
  const u32 own = blockIdx.x * 4 + warp;
  const u32 block[2] = {DOWN ? own * 2 : own, DOWN ? own * 2 + 1 : own};
  const u32 steps = c.part[0].steps;
  // A warp beyond the last block helps with the inputs.
  const bool active = block[0] * 16 < (c.part[0].rows + 31) / 32 * 32;
  const u8* x[2];
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    u32 piece = threadIdx.x + i * 128;
    x[i] = piece / 4 < tile.count ? input(c, tile, piece / 4) + piece % 4 * 16 : 0;
  }
  float acc[MANY][2][4] = {}, total[MANY][2][4] = {};
  typename F::Raw raw[2] = {};
  uint4 next[2] = {};
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const Part& p = c.part[DOWN ? 0 : i];
    if (x[i]) next[i] = *(const uint4*)x[i];
    if (active) raw[i] = F::load(p, e + p.codes, (u64)block[i] * steps, lane);
  }
  for (u32 run = 0; run < SEGMENTS; run++) {
    const u32 end = steps * (run + 1) / SEGMENTS;
    for (u32 step = steps * run / SEGMENTS; step < end; step++) {
      uint4(&here)[MANY * 8 * 4] = shared[step % 2];
      here[threadIdx.x] = next[0];
      here[threadIdx.x + 128] = next[1];
      __syncthreads();
      Fragment f[2];
      Scale s[2];
      if (active)
#pragma unroll
        for (u32 m = 0; m < 2; m++) {
          const Part& p = c.part[DOWN ? 0 : m];
          F::decode(raw[m], f[m], e, p, block[m], step, g);
          s[m] = F::scale(e, p, block[m], step, g);
        }
      if (step + 1 < steps)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
          const Part& p = c.part[DOWN ? 0 : i];
          if (x[i]) next[i] = *(const uint4*)(x[i] + (u64)(step + 1) * 64);
          if (active) raw[i] = F::load(p, e + p.codes, (u64)block[i] * steps + step + 1, lane);
        }
      if (active)
#pragma unroll
        for (u32 n = 0; n < MANY; n++)
          if (n * 8 < tile.count) multiply<F>(acc[n], f, s, here[(n * 8 + g) * 4 + t]);
    }
#pragma unroll
    for (u32 n = 0; n < MANY; n++)
#pragma unroll
      for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) total[n][m][i] += acc[n][m][i], acc[n][m][i] = 0;
  }
  if (!active) return;
#pragma unroll
  for (u32 n = 0; n < MANY; n++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 j = n * 8 + t * 2 + i % 2;
      if (j < tile.count) finish<DOWN>(c, e, block, g + i / 2 * 8, tile.first + j, total[n][0][i], total[n][1][i]);
    }
}
