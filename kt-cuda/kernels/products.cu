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

// One step of two blocks of outputs and N eights of rows. Products that wait for each other are as far apart as can be.
template <class F, u32 N>
__device__ __forceinline__ void multiply(float (&acc)[N][2][4], const Fragment (&f)[2], const Scale (&s)[2], const uint4 (&b)[N]) {
  float p[N][2][4] = {}, sums[N][4] = {};
  if (F::MINIMA) {
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (u32 n = 0; n < N; n++) mma(sums[n], ones, b[n].x, b[n].y);
#pragma unroll
    for (u32 n = 0; n < N; n++) mma(sums[n], ones, b[n].z, b[n].w);
  }
#pragma unroll
  for (u32 n = 0; n < N; n++)
#pragma unroll
    for (u32 m = 0; m < 2; m++) mma(F::PLAIN ? acc[n][m] : p[n][m], f[m].a[0], b[n].x, b[n].y);
  if (F::HALVES)
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
      for (u32 m = 0; m < 2; m++) {
        scaled(acc[n][m], p[n][m], s[m].first);
        p[n][m][0] = p[n][m][1] = p[n][m][2] = p[n][m][3] = 0;
      }
#pragma unroll
  for (u32 n = 0; n < N; n++)
#pragma unroll
    for (u32 m = 0; m < 2; m++) mma(F::PLAIN ? acc[n][m] : p[n][m], f[m].a[1], b[n].z, b[n].w);
  if (!F::PLAIN)
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
      for (u32 m = 0; m < 2; m++) {
        scaled(acc[n][m], p[n][m], F::HALVES ? s[m].second : s[m].first);
        const float minus[2] = {-s[m].minimum[0], -s[m].minimum[1]};
        if (F::MINIMA) scaled(acc[n][m], sums[n], minus);
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

// Where a warp's weights are: of two blocks of outputs, one of gate and one of up, or two of down.
struct From {
  const u8* expert;
  u32 block[2];
  // From step `first` on.
  const u8* codes[2];
  u32 first;
};
template <class F, bool DOWN>
__device__ __forceinline__ From from(const Call& c, const u8* e, u32 own, u32 first) {
  From w = {e, {DOWN ? own * 2 : own, DOWN ? own * 2 + 1 : own}, {}, first};
#pragma unroll
  for (u32 m = 0; m < 2; m++) {
    const Part& p = c.part[DOWN ? 0 : m];
    w.codes[m] = e + p.codes + ((u64)w.block[m] * p.steps + first) * F::BYTES;
  }
  return w;
}
template <class F>
__device__ __forceinline__ void advance(From& w, u32 steps) {
  w.first += steps;
  w.codes[0] += steps * F::BYTES;
  w.codes[1] += steps * F::BYTES;
}

// What a warp reads of a step.
template <class F, bool DOWN>
struct Weights {
  typename F::Raw raw[2];
  typename F::Side side[2];

  // Of the step that is `u` behind the first, if it is there.
  __device__ __forceinline__ void load(const Call& c, const From& w, u32 u, u32 lane, bool there) {
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
      F::load(raw[m], w.codes[m] + u * F::BYTES, lane, there);
      F::side(side[m], w.expert, c.part[DOWN ? 0 : m], w.block[m], w.first + u, lane / 4, there);
    }
  }
  __device__ __forceinline__ void decode(const Call& c, Fragment (&f)[2], Scale (&s)[2]) const {
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
      F::decode(raw[m], side[m], f[m]);
      s[m] = F::scale(side[m], c.part[DOWN ? 0 : m].kind);
    }
  }
};

// Two blocks of 16 outputs (of gate and up, or of down) and up to 16 rows; a warp for each run of steps.
template <class F, bool DOWN>
__device__ __forceinline__ void few(const Call& c) {
  const u32 AHEAD = F::FEW_AHEAD;
  __shared__ float sums[SEGMENTS][FEW][2][4][32];
  // Read at the same time: there is room for a tile of each block.
  const u32 tiles = *c.tile_count;
  const Tile tile = c.tiles[blockIdx.y];
  if (blockIdx.y >= tiles) return;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u8* e = c.weights + tile.expert * c.expert_bytes;
  const u32 steps = c.part[0].steps, end = steps * (warp + 1) / SEGMENTS;
  From at = from<F, DOWN>(c, e, blockIdx.x, steps * warp / SEGMENTS);
  // Weights of the next steps are on their way while one is computed, and inputs of one, of the first eight rows: these are in a cache, and nearer.
  Weights<F, DOWN> weights[AHEAD] = {};
#pragma unroll
  for (u32 u = 0; u < AHEAD; u++) weights[u].load(c, at, u, lane, at.first + u < end);
  // Another row in the place of rows that there are not: it ends in sums that nobody looks at.
  const u8* x[FEW];
#pragma unroll
  for (u32 n = 0; n < FEW; n++) x[n] = input(c, tile, n * 8 + g < tile.count ? n * 8 + g : 0) + (u64)at.first * 64 + t * 16;
  uint4 inputs[1] = {};
  cached(inputs[0], x[0], at.first < end);
  float acc[FEW][1][2][4] = {};
  while (at.first < end) {
#pragma unroll
    for (u32 u = 0; u < AHEAD; u++) {
      if (at.first + u >= end) break;
      Fragment f[2];
      Scale s[2];
      weights[u].decode(c, f, s);
      multiply<F>(acc[0], f, s, inputs);
#pragma unroll
      for (u32 n = 1; n < FEW; n++) {
        if (n * 8 >= tile.count) break;
        const uint4 b[1] = {*(const uint4*)(x[n] + u * 64)};
        multiply<F>(acc[n], f, s, b);
      }
      weights[u].load(c, at, u + AHEAD, lane, at.first + u + AHEAD < end);
      cached(inputs[0], x[0] + (u + 1) * 64, at.first + u + 1 < end);
    }
    advance<F>(at, AHEAD);
#pragma unroll
    for (u32 n = 0; n < FEW; n++) x[n] += AHEAD * 64;
  }
#pragma unroll
  for (u32 n = 0; n < FEW; n++)
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) sums[warp][n][m][i][lane] = acc[n][0][m][i];
  __syncthreads();
  // Each warp adds a quarter of them: sums `warp` of all lanes.
  for (u32 n = 0; n < FEW; n++) {
    u32 j = n * 8 + t * 2 + warp % 2;
    if (j >= tile.count) break;
    float total[2] = {0, 0};
    for (u32 run = 0; run < SEGMENTS; run++)
      for (u32 m = 0; m < 2; m++) total[m] += sums[run][n][m][warp][lane];
    finish<DOWN>(c, e, at.block, g + warp / 2 * 8, tile.first + j, total[0], total[1]);
  }
}

// For each of four warps two blocks of outputs (one of gate and one of up, or two of down), and up to 64 rows, whose inputs the warps share. Inputs come
// to shared memory in turns of some steps, STAGES - 1 turns ahead: one barrier a turn says that its inputs are there, and that those of the turn
// before it have been read. Weights go to registers, steps ahead as well.
#define TURN 2
#define STAGES 4
#define PAIRS (MANY / 2)
template <class F, bool DOWN>
__device__ __forceinline__ void many(const Call& c) {
  const u32 AHEAD = F::MANY_AHEAD;
  __shared__ uint4 shared[STAGES][TURN][MANY * 8 * 4];
  const u32 tiles = *c.tile_count;
  const Tile tile = c.tiles[blockIdx.y];
  if (blockIdx.y >= tiles) return;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u8* e = c.weights + tile.expert * c.expert_bytes;
  const u32 steps = c.part[0].steps;
  From at = from<F, DOWN>(c, e, blockIdx.x * 4 + warp, 0);
  // A warp beyond the last block helps with the inputs.
  const bool active = at.block[0] * 16 < (c.part[0].rows + 31) / 32 * 32;
  Weights<F, DOWN> weights[AHEAD] = {};
#pragma unroll
  for (u32 u = 0; u < AHEAD; u++) weights[u].load(c, at, u, lane, active && u < steps);
  // What stands in the place of rows that there are not ends in sums that nobody looks at.
  const u8* x[2];
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    u32 piece = threadIdx.x + i * 128;
    x[i] = piece / 4 < tile.count ? input(c, tile, piece / 4) + piece % 4 * 16 : 0;
  }
  auto bring = [&](u32 turn) {
#pragma unroll
    for (u32 u = 0; u < TURN; u++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        u32 step = turn * TURN + u;
        if (x[i] && step < steps) copy(&shared[turn % STAGES][u][threadIdx.x + i * 128], x[i] + (u64)step * 64);
      }
    copies_end();
  };
#pragma unroll
  for (u32 turn = 0; turn < STAGES - 1; turn++) bring(turn);
  float acc[PAIRS][2][2][4] = {}, total[PAIRS][2][2][4] = {};
  u32 run = 1, end = steps / SEGMENTS;
  for (; at.first < steps; advance<F>(at, AHEAD)) {
#pragma unroll
    for (u32 u = 0; u < AHEAD; u++) {
      const u32 step = at.first + u;
      if (step >= steps) break;
      if (u % TURN == 0) {
        copies_done<STAGES - 2>();
        __syncthreads();
        bring(step / TURN + STAGES - 1);
      }
      if (!active) continue;
      // At the end of a run, and of runs that have no step.
      for (; step == end; end = steps * ++run / SEGMENTS) {
#pragma unroll
        for (u32 n = 0; n < PAIRS; n++)
#pragma unroll
          for (u32 i = 0; i < 16; i++) {
            float &sum = total[n][i / 8][i / 4 % 2][i % 4], &part = acc[n][i / 8][i / 4 % 2][i % 4];
            sum += part, part = 0;
          }
      }
      Fragment f[2];
      Scale s[2];
      weights[u].decode(c, f, s);
      const uint4* here = shared[step / TURN % STAGES][step % TURN];
#pragma unroll
      for (u32 n = 0; n < PAIRS; n++) {
        if (n * 16 >= tile.count) break;
        const uint4 b[2] = {here[(n * 16 + g) * 4 + t], here[(n * 16 + 8 + g) * 4 + t]};
        multiply<F>(acc[n], f, s, b);
      }
      weights[u].load(c, at, u + AHEAD, lane, step + AHEAD < steps);
    }
  }
  if (!active) return;
#pragma unroll
  for (u32 n = 0; n < MANY; n++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 j = n * 8 + t * 2 + i % 2;
      if (j >= tile.count) continue;
      // The last run's.
      float(&own)[2][4] = acc[n / 2][n % 2], (&before)[2][4] = total[n / 2][n % 2];
      finish<DOWN>(c, e, at.block, g + i / 2 * 8, tile.first + j, before[0][i] + own[0][i], before[1][i] + own[1][i]);
    }
}
