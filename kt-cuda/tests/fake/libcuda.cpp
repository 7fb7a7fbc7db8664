// A driver without a GPU: what kt-cuda calls of libcuda, with "device" memory in mappings of their own that end at a page that
// may not be touched, and kernels run by the emulation. Work is put off until somebody waits for it, unless told to run at once: so
// that what relies on an order that nobody asked for reads poison, or buffers that were used again.
#include <sys/mman.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulated.h"

#include "../../kernels/tools.cu"
#include "../../kernels/formats.cu"
#include "../../kernels/products.cu"
#include "../../kernels/rows.cu"
#define KT_FORMAT bf16
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT fp8
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT fp8_block
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT mxfp8
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT mxfp4
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT int8
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT int8_zero
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT int4
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT int4_zero
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT q4_k
#include "../../kernels/entries.cu"
#undef KT_FORMAT
#define KT_FORMAT q6_k
#include "../../kernels/entries.cu"
#undef KT_FORMAT

namespace {

typedef int Result;
enum : Result {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_PERMITTED = 800,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILED = 719,
  CAPTURE_UNSUPPORTED = 900,
};

struct Kernel {
  void (*run)(void*);
  size_t argument;
};

template <class T, void (*F)(const T)>
Kernel kernel() {
  return {[](void* p) { F(*(const T*)p); }, sizeof(T)};
}

#define FORMAT(f)                                                              \
  {"kt_few_gate_up_" #f, kernel<Call, kt_few_gate_up_##f>()},                  \
      {"kt_few_down_" #f, kernel<Call, kt_few_down_##f>()},                    \
      {"kt_many_gate_up_" #f, kernel<Call, kt_many_gate_up_##f>()},            \
      {"kt_many_down_" #f, kernel<Call, kt_many_down_##f>()}

const std::map<std::string, Kernel> KERNELS = {
    FORMAT(bf16), FORMAT(fp8),  FORMAT(fp8_block), FORMAT(mxfp8),     FORMAT(mxfp4), FORMAT(int8),
    FORMAT(int8_zero), FORMAT(int4), FORMAT(int4_zero), FORMAT(q4_k), FORMAT(q6_k),
    {"kt_inputs", kernel<Inputs, kt_inputs>()},
    {"kt_outputs", kernel<Outputs, kt_outputs>()},
    {"kt_add", kernel<Sum, kt_add>()},
    {"kt_group", kernel<Choices, kt_group>()},
};

struct Module {
  std::string image;
};

typedef std::function<Result()> Op;
struct Graph {
  std::vector<Op> ops;
};
struct Stream {
  std::deque<Op> queue;
  Graph* capture = nullptr;
};
struct State {
  std::recursive_mutex lock;
  bool initialized = false;
  long devices = 1, version = 12080, major = 9, minor = 0, memory = 8l << 30, eager = 0;
  std::map<std::string, std::pair<long, long>> failures;  // function: after how many calls, with what
  std::map<std::string, long> calls;
  std::map<uintptr_t, size_t> device, host;
  std::map<uintptr_t, std::pair<void*, size_t>> mappings;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<Stream*, uint64_t> put, done;
  Stream null_stream;
  Result lost = OK;
  long retained = 0;
} state;
thread_local long contexts = 0;
// Devices' contexts: their addresses tell them apart.
char primary[16];
// Whether this thread is in a function that a stream calls on the host: it may not call the driver.
thread_local bool on_host = false;

struct Entry {
  std::lock_guard<std::recursive_mutex> guard{state.lock};
  Result result = OK;
  explicit Entry(const char* name, bool needs_context = true) {
    const long n = ++state.calls[name];
    auto failure = state.failures.find(name);
    if (on_host) state.calls["in a host function"]++, result = NOT_PERMITTED;
    else if (state.lost) result = state.lost;
    else if (failure != state.failures.end() && n > failure->second.first) result = (Result)failure->second.second;
    else if (needs_context && contexts == 0) result = INVALID_CONTEXT;
  }
};
#define ENTER(name, ...) \
  Entry entry(name, ##__VA_ARGS__); \
  if (entry.result) return entry.result

bool within(const std::map<uintptr_t, size_t>& all, const void* p, size_t bytes) {
  auto it = all.upper_bound((uintptr_t)p);
  if (it == all.begin()) return false;
  --it;
  return (uintptr_t)p + bytes <= it->first + it->second;
}

Stream* stream_of(void* handle) { return handle ? (Stream*)handle : &state.null_stream; }

Result run_until(Stream* s, uint64_t count) {
  while (!s->queue.empty() && state.done[s] < count) {
    Op op = std::move(s->queue.front());
    s->queue.pop_front();
    state.done[s]++;
    const Result r = state.lost ? state.lost : op();
    if (r) return state.lost = r;
  }
  return state.lost;
}

Result put(void* handle, Op op) {
  Stream* s = stream_of(handle);
  if (handle && !state.streams.count(s)) return INVALID_HANDLE;
  if (s->capture) return s->capture->ops.push_back(std::move(op)), OK;
  s->queue.push_back(std::move(op));
  state.put[s]++;
  return state.eager ? run_until(s, ~0ull) : OK;
}

Result run_all() {
  Result r = run_until(&state.null_stream, ~0ull);
  for (auto& s : state.streams) r = r ? r : run_until(s.first, ~0ull);
  return r;
}

bool capturing() {
  for (auto& s : state.streams)
    if (s.first->capture) return true;
  return false;
}

Result allocate(std::map<uintptr_t, size_t>& all, void** out, size_t bytes) {
  if (bytes == 0) return INVALID_VALUE;
  const size_t page = 4096, size = (bytes + 15) / 16 * 16, pages = (size + page - 1) / page * page;
  char* base = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return OUT_OF_MEMORY;
  mprotect(base + pages, page, PROT_NONE);
  char* p = base + pages - size;
  memset(p, 0xff, size);  // NaN in every type
  state.mappings[(uintptr_t)p] = {base, pages + page};
  all[(uintptr_t)p] = bytes;
  *out = p;
  return OK;
}

Result release(std::map<uintptr_t, size_t>& all, void* p) {
  if (!all.erase((uintptr_t)p)) return INVALID_VALUE;
  auto m = state.mappings[(uintptr_t)p];
  state.mappings.erase((uintptr_t)p);
  munmap(m.first, m.second);
  return OK;
}

}  // namespace

extern "C" {

// --- For tests. ---
void fake_set(const char* what, long value) {
  const std::string key = what;
  if (key == "devices") state.devices = value;
  if (key == "version") state.version = value;
  if (key == "major") state.major = value;
  if (key == "minor") state.minor = value;
  if (key == "memory") state.memory = value;
  if (key == "eager") state.eager = value;
  if (key == "backwards") emulated::backwards = value;
}
// The call of `function` after `after` more ones, and all that follow, fail with `code`; 0 ends that. "kernel" is a kernel that runs.
void fake_fail(const char* function, long after, long code) {
  std::lock_guard<std::recursive_mutex> guard(state.lock);
  if (code) state.failures[function] = {state.calls[function] + after, code};
  else state.failures.erase(function);
}
long fake_calls(const char* function) { return state.calls[function]; }
long fake_live_bytes() {
  long n = 0;
  for (auto& a : state.device) n += (long)a.second;
  return n;
}
long fake_live_host_bytes() {
  long n = 0;
  for (auto& a : state.host) n += (long)a.second;
  return n;
}
long fake_products() { return (long)emulated::products; }
// Runs whatever was put off.
int fake_finish() {
  std::lock_guard<std::recursive_mutex> guard(state.lock);
  return run_all();
}

// Every code of every format as `mma` gets it, against its definition: how many differ.
long fake_wrong_codes() {
  auto half = [](u32 pair, int i) { return f32((pair >> (16 * i) & 0xffff) << 16); };
  auto same = [](float a, double b) { return a != a ? b != b : a == b; };
  long wrong = 0;
  for (u32 one = 0; one < 256; one++)
    for (u32 two = 0; two < 256; two++) {
      // Slots 0 and 1 are bytes 0 and 2, slots 2 and 3 bytes 1 and 3.
      const u32 code[4] = {one, two, two, one}, w = one | two << 16 | two << 8 | one << 24;
      const Bytes raw = {{w, w, w, w}};
      Fragment fp8 = {}, byte = {};
      fp8_::decode(raw, {}, fp8);
      int8_::decode(raw, {}, byte);
      for (int s = 0; s < 8; s++)
        for (int g = 0; g < 2; g++) {
          const u32 c = code[s % 4], e = c >> 3 & 15, m = c & 7;
          const double v = e == 15 && m == 7 ? NAN : e ? std::ldexp(8 + m, (int)e - 10) : std::ldexp(m, -9);
          wrong += !same(half(fp8.a[s / 4][g + s / 2 % 2 * 2], s % 2), c & 128 ? -v : v);
          wrong += !same(half(byte.a[s / 4][g + s / 2 % 2 * 2], s % 2), (double)c - 128);
        }
    }
  for (u32 code = 0; code < 16; code++)
    for (u32 at = 0; at < 8; at++) {
      // Nibble i is slot 2i, nibble i + 4 slot 2i + 1.
      const u32 w = code << (4 * at), slot = at % 4 * 2 + at / 4;
      const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6}, value = code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
      for (u32 h = 0; h < 2; h++) {
        const Nibbles raw = {{h ? 0 : w, h ? w : 0}};
        Fragment four = {}, minus = {}, mx = {};
          q4_k_::decode(raw, {}, four);
        int4_::decode(raw, {}, minus);
        mxfp4_::decode(raw, {}, mx);
        for (u32 s = 0; s < 8; s++)
          for (u32 g = 0; g < 2; g++) {
            const double is = s == slot && g == h ? code : 0, x = s == slot && g == h ? value : 0;
            auto got = [&](const Fragment& f) { return half(f.a[s / 4][g + s / 2 % 2 * 2], s % 2); };
            wrong += got(four) != is;
            wrong += got(minus) != is - 8;
            wrong += got(mx) != x;
          }
      }
    }
  return wrong;
}

// Choices grouped by the kernel, against what its words say, of several sizes: how many numbers differ.
long fake_wrong_groups() {
  std::lock_guard<std::recursive_mutex> guard(state.lock);
  struct Case {
    u32 tokens, top_k, layer_experts, here, both;
  };
  const Case cases[] = {{1, 8, 128, 128, 1},  {1, 1, 1, 0, 1},      {3, 5, 40, 17, 0},     {64, 8, 128, 128, 1},    {700, 8, 60, 30, 1},
                        {129, 8, 3, 2, 1},    {500, 9, 600, 513, 1}, {90, 8, 3000, 2500, 0}, {200, 6, 10000, 9000, 1}, {16384, 8, 128, 128, 1},
                        {2000, 4, 9000, 8192, 1}};
  long wrong = 0;
  u64 random = 1;
  auto below = [&](u32 n) { return (u32)((random = random * 6364136223846793005u + 1442695040888963407u) >> 33) % n; };
  for (const Case& k : cases) {
    const u32 slots = k.tokens * k.top_k;
    std::vector<int> ids(slots);
    std::vector<float> weights(slots);
    // Some twice in a token, some none, some beyond the layer; and one expert that has half of all.
    for (u32 i = 0; i < slots; i++) ids[i] = below(2) ? (int)below(k.layer_experts + 3) - 1 : (int)(k.layer_experts / 2), weights[i] = (float)i;
    if (k.tokens == 1) for (u32 i = 0; i < slots; i++) ids[i] = (int)((i * 5 + 3) % k.layer_experts);
    std::vector<u32> homes(k.layer_experts), starts(k.here + 1), rows(slots + 1, 77), counts(2, 77);
    for (u32 e = 0; e < k.layer_experts; e++) homes[e] = (e * 7 + 3) % k.layer_experts;
    if (k.layer_experts % 7 == 0) return -1;
    std::vector<Seat> seats(slots);
    std::vector<Share> shares(slots, {77, 77});
    std::vector<Span> spans(k.tokens, {77, 77});
    std::vector<Tile> few(slots + 1), many(slots + 1);
    Choices c = {ids.data(), weights.data(), homes.data(), starts.data(), seats.data(), rows.data(), shares.data(), spans.data(),
                 few.data(), many.data(), counts.data(), k.tokens, k.top_k, k.layer_experts, k.here, k.both, 0};
    if (!emulated::block(GROUP_WARPS * 32, [](void* p) { kt_group(*(Choices*)p); }, &c)) return -2;
    // Each expert's choices in turn.
    std::vector<std::vector<u32>> by(k.here);
    for (u32 i = 0; i < slots; i++)
      if (ids[i] >= 0 && (u32)ids[i] < k.layer_experts && homes[ids[i]] < k.here) by[homes[ids[i]]].push_back(i);
    std::vector<std::vector<Share>> of(k.tokens);
    u32 row = 0, tiles[2] = {0, 0};
    for (u32 e = 0; e < k.here; e++) {
      const u32 n = (u32)by[e].size(), which = k.both && n > 16, most = which ? 64 : 16;
      for (u32 i = 0; i < n; i += most) {
        const Tile& t = (which ? many : few)[tiles[which]++];
        wrong += t.expert != e || t.first != row + i || t.count != (n - i < most ? n - i : most);
      }
      for (u32 i : by[e]) {
        wrong += rows[row] != i / k.top_k;
        of[i / k.top_k].push_back({row++, weights[i]});
      }
    }
    wrong += counts[0] != tiles[0] || counts[1] != tiles[1] || rows[row] != 77;
    for (u32 t = 0; t < k.tokens; t++) {
      wrong += spans[t].first != t * k.top_k || spans[t].end != t * k.top_k + of[t].size();
      for (u32 i = 0; i < of[t].size(); i++) {
        const Share& s = shares[t * k.top_k + i];
        wrong += s.row != of[t][i].row || s.weight != of[t][i].weight;
      }
    }
  }
  return wrong;
}

// --- Of libcuda. ---
Result cuInit(unsigned) {
  ENTER("cuInit", false);
  state.initialized = true;
  return OK;
}
Result cuDriverGetVersion(int* v) {
  ENTER("cuDriverGetVersion", false);
  return *v = (int)state.version, OK;
}
Result cuDeviceGetCount(int* n) {
  ENTER("cuDeviceGetCount", false);
  if (!state.initialized) return NOT_INITIALIZED;
  return *n = (int)state.devices, OK;
}
Result cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet", false);
  if (ordinal < 0 || ordinal >= state.devices) return INVALID_DEVICE;
  return *device = ordinal, OK;
}
Result cuDeviceGetName(char* name, int n, int) {
  ENTER("cuDeviceGetName", false);
  return snprintf(name, (size_t)n, "Emulated GPU"), OK;
}
Result cuDeviceGetAttribute(int* v, int which, int) {
  ENTER("cuDeviceGetAttribute", false);
  // Compute capability; memory clock in kHz and bus width in bits; anything else is nobody's business here.
  *v = which == 75 ? (int)state.major : which == 76 ? (int)state.minor : which == 36 ? 2619000 : which == 37 ? 5120 : -1;
  return *v < 0 ? INVALID_VALUE : OK;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain", false);
  return state.retained++, *context = primary + device, OK;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
  ENTER("cuDevicePrimaryCtxRelease_v2", false);
  return state.retained--, OK;
}
Result cuCtxPushCurrent_v2(void* context) {
  ENTER("cuCtxPushCurrent_v2", false);
  if (context < primary || context >= primary + sizeof primary || !state.retained) return INVALID_CONTEXT;
  return contexts++, OK;
}
Result cuCtxPopCurrent_v2(void** context) {
  Entry entry("cuCtxPopCurrent_v2", false);
  if (!contexts) return INVALID_CONTEXT;
  return contexts--, *context = primary, OK;
}
Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER("cuMemGetInfo_v2");
  *total = (size_t)state.memory;
  *free = (size_t)(state.memory - fake_live_bytes());
  return OK;
}
Result cuMemAlloc_v2(void** p, size_t bytes) {
  ENTER("cuMemAlloc_v2");
  if (capturing()) return CAPTURE_UNSUPPORTED;
  if ((long)bytes > state.memory - fake_live_bytes()) return OUT_OF_MEMORY;
  return allocate(state.device, p, bytes);
}
Result cuMemFree_v2(void* p) {
  Entry entry("cuMemFree_v2");
  if (!state.lost) run_all();
  return release(state.device, p);
}
Result cuMemAllocHost_v2(void** p, size_t bytes) {
  ENTER("cuMemAllocHost_v2");
  if (capturing()) return CAPTURE_UNSUPPORTED;
  return allocate(state.host, p, bytes);
}
Result cuMemFreeHost(void* p) {
  Entry entry("cuMemFreeHost");
  if (!state.lost) run_all();
  return release(state.host, p);
}
Result cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  ENTER("cuMemcpyHtoDAsync_v2");
  if (!within(state.device, to, bytes) || !within(state.host, from, bytes)) return INVALID_VALUE;
  return put(stream, [=]() -> Result {
    if (!within(state.device, to, bytes) || !within(state.host, from, bytes)) return ILLEGAL_ADDRESS;
    return memcpy(to, from, bytes), OK;
  });
}
Result cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  ENTER("cuMemcpyDtoHAsync_v2");
  if (!within(state.host, to, bytes) || !within(state.device, from, bytes)) return INVALID_VALUE;
  return put(stream, [=]() -> Result {
    if (!within(state.host, to, bytes) || !within(state.device, from, bytes)) return ILLEGAL_ADDRESS;
    return memcpy(to, from, bytes), OK;
  });
}
Result cuStreamCreate(void** stream, unsigned) {
  ENTER("cuStreamCreate");
  auto s = std::make_unique<Stream>();
  Stream* p = s.get();
  state.streams[p] = std::move(s);
  return *stream = p, OK;
}
Result cuStreamDestroy_v2(void* stream) {
  Entry entry("cuStreamDestroy_v2");
  if (!state.streams.count((Stream*)stream)) return INVALID_HANDLE;
  run_until((Stream*)stream, ~0ull);
  state.streams.erase((Stream*)stream);
  return entry.result;
}
Result cuStreamSynchronize(void* stream) {
  ENTER("cuStreamSynchronize");
  if (stream_of(stream)->capture) return CAPTURE_UNSUPPORTED;
  return run_until(stream_of(stream), ~0ull);
}
Result cuCtxSynchronize() {
  ENTER("cuCtxSynchronize");
  return capturing() ? CAPTURE_UNSUPPORTED : run_all();
}
Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  ENTER("cuLaunchHostFunc");
  if (!function) return INVALID_VALUE;
  return put(stream, [=]() -> Result {
    state.calls["host function"]++;
    on_host = true;
    function(data);
    on_host = false;
    return OK;
  });
}
Result cuModuleLoadData(void** module, const void* image) {
  ENTER("cuModuleLoadData");
  const std::string text = (const char*)image;
  if (text.find(".target sm_") == std::string::npos) return INVALID_IMAGE;
  return *module = new Module{text}, OK;
}
Result cuModuleUnload(void* module) {
  Entry entry("cuModuleUnload");
  delete (Module*)module;
  return entry.result;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER("cuModuleGetFunction");
  auto k = KERNELS.find(name);
  const std::string entry_of = std::string(".entry ") + name + "(";
  if (k == KERNELS.end() || ((Module*)module)->image.find(entry_of) == std::string::npos) return NOT_FOUND;
  return *function = (void*)&k->second, OK;
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned, void* stream, void** arguments, void**) {
  ENTER("cuLaunchKernel");
  if (!gx || !gy || !gz || gy > 65535 || bx * by * bz > 1024) return INVALID_VALUE;
  const Kernel* k = (const Kernel*)function;
  std::vector<char> argument((const char*)arguments[0], (const char*)arguments[0] + k->argument);
  return put(stream, [=]() mutable -> Result {
    auto failure = state.failures.find("kernel");
    if (++state.calls["kernel"]; failure != state.failures.end() && state.calls["kernel"] > failure->second.first)
      return (Result)failure->second.second;
    emulated::grid = {gx, gy, gz};
    for (unsigned y = 0; y < gy; y++)
      for (unsigned x = 0; x < gx; x++) {
        emulated::block_index = {x, y, 0};
        if (!emulated::block(bx, k->run, argument.data())) {
          fprintf(stderr, "emulated kernel: %s\n", emulated::broken);
          return LAUNCH_FAILED;
        }
      }
    return OK;
  });
}
Result cuStreamBeginCapture_v2(void* stream, int) {
  ENTER("cuStreamBeginCapture_v2");
  if (!state.streams.count((Stream*)stream)) return INVALID_HANDLE;
  return ((Stream*)stream)->capture = new Graph, OK;
}
Result cuStreamEndCapture(void* stream, void** graph) {
  ENTER("cuStreamEndCapture");
  *graph = ((Stream*)stream)->capture;
  return ((Stream*)stream)->capture = nullptr, OK;
}
Result cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
  ENTER("cuGraphInstantiateWithFlags");
  return *exec = new Graph(*(Graph*)graph), OK;
}
Result cuGraphLaunch(void* exec, void* stream) {
  ENTER("cuGraphLaunch");
  for (auto& op : ((Graph*)exec)->ops)
    if (Result r = put(stream, op)) return r;
  return OK;
}
Result cuGraphExecDestroy(void* exec) { return delete (Graph*)exec, OK; }
Result cuGraphDestroy(void* graph) { return delete (Graph*)graph, OK; }
Result cuGetErrorName(Result code, const char** name) {
  switch (code) {
    case OUT_OF_MEMORY: return *name = "CUDA_ERROR_OUT_OF_MEMORY", OK;
    case LAUNCH_FAILED: return *name = "CUDA_ERROR_LAUNCH_FAILED", OK;
    case ILLEGAL_ADDRESS: return *name = "CUDA_ERROR_ILLEGAL_ADDRESS", OK;
    case 100: return *name = "CUDA_ERROR_NO_DEVICE", OK;
    default: return INVALID_VALUE;
  }
}
Result cuGetErrorString(Result code, const char** text) {
  switch (code) {
    case OUT_OF_MEMORY: return *text = "out of memory", OK;
    case LAUNCH_FAILED: return *text = "unspecified launch failure", OK;
    case ILLEGAL_ADDRESS: return *text = "an illegal memory access was encountered", OK;
    case 100: return *text = "no CUDA-capable device is detected", OK;
    default: return INVALID_VALUE;
  }
}
}
