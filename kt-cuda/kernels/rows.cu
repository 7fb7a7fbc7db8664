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

// Groups a batch's choices by expert, on the device: for work that is submitted with device pointers. One block.
struct Choices {
  const int* ids;        // [tokens, top_k]; negative for none
  const float* weights;  // [tokens, top_k]
  const u32* homes;      // local expert of each expert of the layer, `experts` and above for none
  u32* starts;           // [experts + 1], scratch
  u32* rows;             // [tokens * top_k]: the token of each row of work
  Share* shares;         // [tokens * top_k]
  Span* spans;           // [tokens]
  Tile* few;
  Tile* many;
  u32* counts;  // tiles of few, of many
  u32 tokens, top_k, layer_experts, experts;
  u32 both, pad;  // whether there are kernels for many rows
};

__device__ __forceinline__ u32 home(const Choices& c, u32 i) {
  int id = c.ids[i];
  return id < 0 || (u32)id >= c.layer_experts ? ~0u : c.homes[id];
}

extern "C" __global__ void __launch_bounds__(256) kt_group(const __grid_constant__ Choices c) {
  const u32 slots = c.tokens * c.top_k;
  for (u32 e = threadIdx.x; e < c.experts; e += 256) {
    u32 n = 0;
    for (u32 i = 0; i < slots; i++) n += home(c, i) == e;
    c.starts[e + 1] = n;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 at = 0, few = 0, many = 0;
    c.starts[0] = 0;
    for (u32 e = 0; e < c.experts; e++) {
      u32 n = c.starts[e + 1];
      const bool long_ = c.both && n > FEW * 8;
      const u32 most = long_ ? MANY * 8 : FEW * 8;
      for (u32 i = 0; i < n; i += most) {
        Tile tile = {e, at + i, n - i < most ? n - i : most};
        if (long_) c.many[many++] = tile;
        else c.few[few++] = tile;
      }
      c.starts[e + 1] = at += n;
    }
    c.counts[0] = few, c.counts[1] = many;
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < c.experts; e += 256) {
    u32 at = c.starts[e];
    for (u32 i = 0; i < slots; i++)
      if (home(c, i) == e) {
        c.rows[at] = i / c.top_k;
        c.shares[i] = {at++, c.weights[i]};
      }
  }
  __syncthreads();
  // A token's shares by rising row, which is by rising expert; those of experts that are not here fall out.
  for (u32 token = threadIdx.x; token < c.tokens; token += 256) {
    u32 first = token * c.top_k, end = first;
    for (u32 i = first; i < first + c.top_k; i++) {
      if (home(c, i) >= c.experts) continue;
      Share s = c.shares[i];
      u32 j = end++;
      for (; j > first && c.shares[j - 1].row > s.row; j--) c.shares[j] = c.shares[j - 1];
      c.shares[j] = s;
    }
    c.spans[token] = {first, end};
  }
}
