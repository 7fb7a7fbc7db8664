// What is around the products: inputs to BF16, outputs of a token's experts added, and which expert has which rows.

struct Inputs {
  // [tokens, hidden], F32 or BF16 (wide or not); to [tokens, padded] BF16 in slots, zeros behind the last column.
  const void* from;
  u16* to;
  u32 tokens, hidden, padded, wide, halves, pad;
};

extern "C" __global__ void __launch_bounds__(256) kt_inputs(const __grid_constant__ Inputs c) {
  u32 col = blockIdx.x * 256 + threadIdx.x;
  for (u64 token = blockIdx.y; col < c.padded && token < c.tokens; token += gridDim.y) {
    u64 i = token * c.hidden + col;
    u16 v = 0;
    if (col < c.hidden) v = c.wide ? to_bf16(((const float*)c.from)[i]) : ((const u16*)c.from)[i];
    c.to[token * c.padded + slot(col, c.halves)] = v;
  }
}

// An expert's output for a token: which row of work, and its weight.
struct Share {
  u32 row;
  float weight;
};
// A token's shares, by rising expert.
struct Span {
  u32 first, end;
};
struct Outputs {
  const float* rows;  // [rows, hidden]
  const Share* shares;
  const Span* spans;
  float* to;  // [tokens, hidden]
  u32 tokens, hidden, add, pad;
};

extern "C" __global__ void __launch_bounds__(256) kt_outputs(const __grid_constant__ Outputs c) {
  u32 col = blockIdx.x * 256 + threadIdx.x;
  for (u64 token = blockIdx.y; col < c.hidden && token < c.tokens; token += gridDim.y) {
    Span span = c.spans[token];
    float sum = 0;
    for (u32 i = span.first; i < span.end; i++) sum = fmaf(c.shares[i].weight, c.rows[(u64)c.shares[i].row * c.hidden + col], sum);
    u64 i = token * c.hidden + col;
    c.to[i] = c.add ? c.to[i] + sum : sum;
  }
}

// Adds what banks on the host computed.
struct Sum {
  const float* from;
  float* to;
  u64 count;
};

extern "C" __global__ void __launch_bounds__(256) kt_add(const __grid_constant__ Sum c) {
  for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < c.count; i += (u64)gridDim.x * 256) c.to[i] += c.from[i];
}

// Groups a batch's choices by expert, on the device: for work that is submitted with device pointers. One block, and no atomics, so that rows are always in
// the same order: by rising expert, then by choice.
struct Seat {
  u32 expert;  // ~0 for none that is here
  u32 before;  // choices of the same expert before it, among those of its warp
};
struct Choices {
  const int* ids;        // [tokens, top_k]; negative for none
  const float* weights;  // [tokens, top_k]
  const u32* homes;      // local expert of each expert of the layer, `experts` and above for none
  u32* starts;           // [experts], scratch
  Seat* seats;           // [tokens, top_k], scratch
  u32* rows;             // [tokens * top_k]: the token of each row of work
  Share* shares;         // [tokens, top_k]
  Span* spans;           // [tokens]
  Tile* few;
  Tile* many;
  u32* counts;  // tiles of few, of many
  u32 tokens, top_k, layer_experts, experts;
  u32 both, pad;  // whether there are kernels for many rows
};

#define GROUP_WARPS 32
#define GROUP_COUNTERS 8192
#define GROUP_SEATS 1024

// Rows, and tiles of few and of many.
struct Totals {
  u32 of[3];
};

extern "C" __global__ void __launch_bounds__(GROUP_WARPS * 32) kt_group(const __grid_constant__ Choices c) {
  __shared__ u32 counters[GROUP_COUNTERS];
  __shared__ Seat few_seats[GROUP_SEATS];
  __shared__ Totals totals[GROUP_WARPS];
  const u32 slots = c.tokens * c.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Each warp takes a run of choices and counts them by expert, with counters of its own. Layers with more experts than there are counters are counted
  // by one warp, in global memory.
  u32* const counts = c.experts > GROUP_COUNTERS ? c.starts : counters;
  Seat* const seats = slots > GROUP_SEATS ? c.seats : few_seats;
  u32 warps = c.experts ? GROUP_COUNTERS / c.experts : GROUP_WARPS;
  warps = warps > GROUP_WARPS ? GROUP_WARPS : warps ? warps : 1;
  const u32 run = ((slots + 31) / 32 + warps - 1) / warps * 32;
  warps = (slots + run - 1) / run;
  for (u32 i = threadIdx.x; i < warps * c.experts; i += GROUP_WARPS * 32) counts[i] = 0;
  __syncthreads();
  if (warp < warps) {
    const u32 end = warp * run + run < slots ? warp * run + run : slots;
    for (u32 first = warp * run; first < end; first += 32) {
      const u32 i = first + lane;
      u32 e = ~0u;
      if (i < end) {
        const int id = c.ids[i];
        if (id >= 0 && (u32)id < c.layer_experts) e = c.homes[id];
        if (e >= c.experts) e = ~0u;
      }
      const u32 same = match(e), at = warp * c.experts + e;
      const u32 so_far = e == ~0u ? 0 : counts[at];
      sync_warp();
      if (e != ~0u && same >> lane == 1) counts[at] = so_far + ones(same);
      sync_warp();
      if (i < end) seats[i] = {e, so_far + ones(same & ((1u << lane) - 1))};
    }
  }
  __syncthreads();
  // Sums over all experts before; the counters become the first row of each warp's run.
  Totals all = {};
  for (u32 first = 0; first < c.experts; first += GROUP_WARPS * 32) {
    const u32 e = first + threadIdx.x;
    u32 n = 0;
    if (e < c.experts)
      for (u32 w = 0; w < warps; w++) n += counts[w * c.experts + e];
    const bool long_ = c.both && n > FEW * 8;
    const u32 most = long_ ? MANY * 8 : FEW * 8, tiles = (n + most - 1) / most;
    const Totals own = {n, long_ ? 0 : tiles, long_ ? tiles : 0};
    Totals at = own;
#pragma unroll
    for (u32 k = 0; k < 3; k++)
#pragma unroll
      for (u32 d = 1; d < 32; d *= 2) {
        const u32 v = shuffle_up(at.of[k], d);
        if (lane >= d) at.of[k] += v;
      }
    if (lane == 31) totals[warp] = at;
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < 3; k++) {
      u32 before = all.of[k] - own.of[k];
      for (u32 w = 0; w < GROUP_WARPS; w++) {
        const u32 v = totals[w].of[k];
        before += w < warp ? v : 0;
        all.of[k] += v;
      }
      at.of[k] += before;
    }
    if (e < c.experts) {
      u32 row = at.of[0];
      for (u32 w = 0; w < warps; w++) {
        const u32 v = counts[w * c.experts + e];
        counts[w * c.experts + e] = row;
        row += v;
      }
      Tile* to = long_ ? c.many + at.of[2] : c.few + at.of[1];
      for (u32 i = 0; i < n; i += most) *to++ = {e, at.of[0] + i, n - i < most ? n - i : most};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) c.counts[0] = all.of[1], c.counts[1] = all.of[2];
  // A token's shares by rising row, which is by rising expert, then by choice; those of experts that are not here fall out.
  for (u32 i = threadIdx.x; i < slots; i += GROUP_WARPS * 32) {
    const u32 token = i / c.top_k, first = token * c.top_k;
    const Seat seat = seats[i];
    u32 here = 0, before = 0;
    for (u32 j = first; j < first + c.top_k; j++) {
      const u32 e = seats[j].expert;
      here += e != ~0u;
      before += e < seat.expert || (e == seat.expert && j < i);
    }
    if (i == first) c.spans[token] = {first, first + here};
    if (seat.expert == ~0u) continue;
    const u32 row = counts[i / run * c.experts + seat.expert] + seat.before;
    c.rows[row] = token;
    c.shares[first + before] = {row, c.weights[i]};
  }
}
