/* kt: experts of Mixture-of-Experts models on CPU kernels, from C.
 *
 * Link with libkt_c (shared or static; the static one needs -lpthread -ldl -lm). Needs nothing else installed.
 *
 * Handles are opaque. Each is made by one function and ended by the one named kt_..._free, which takes NULL too. Those of what
 * was made with their help may outlive them. All but kt_pending may be used from any thread, several at a time.
 *
 * Functions that can fail return KT_OK or another code, and then write why into `error`, which may be NULL. What they were to
 * write is then untouched. Nothing is printed and no signal or environment variable is used, but when a defect makes Rust code
 * panic: that is caught and told, as KT_PANIC or KT_BACKEND, and before that Rust's own hook writes its message to standard error,
 * with a backtrace if RUST_BACKTRACE is set.
 *
 * Threads that call must have floating-point arithmetic as C begins with: with denormal numbers taken for zeros (as -ffast-math and
 * some frameworks set it) results are other ones, and depend on how many tokens are computed at a time.
 *
 * Texts are UTF-8 that ends with a zero byte. All arrays are row-major.
 */
#ifndef KT_H
#define KT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rises when something here changes its meaning. Additions do not count: new functions, and new fields at the end of kt_options, which
 * has its size in it. A program runs with libraries of its version that are no older than its header. */
#define KT_C_VERSION 1

enum {
    KT_OK = 0,
    KT_INVALID = 1,     /* an argument that cannot be: NULL, a wrong length, an expert that there is not */
    KT_IO = 2,          /* the system refuses a file */
    KT_CHECKPOINT = 3,  /* a checkpoint's content is wrong */
    KT_UNSUPPORTED = 4, /* no backend, or not the one asked for, can do this */
    KT_MEMORY = 5,      /* it does not fit the memory available; the text is the plan */
    KT_BACKEND = 6,     /* a backend failed */
    KT_PLUGIN = 7,      /* a plugin is refused */
    KT_PANIC = 8        /* a defect of the library: please report it */
};

/* Why something failed. The text is cut at the end of a character where it is too long. */
typedef struct kt_error {
    int32_t code;
    char text[4092];
} kt_error;

typedef struct kt_runtime kt_runtime; /* backends and threads */
typedef struct kt_source kt_source;   /* a checkpoint on disk */
typedef struct kt_experts kt_experts; /* all experts of a checkpoint, loaded */
typedef struct kt_pending kt_pending; /* work under way */

/* KT_C_VERSION of the library that is linked. */
uint32_t kt_c_version(void);

/* What a runtime may use. Fill with zeros, and set `size` to sizeof(kt_options); zeros and NULL stand for the default. A smaller size is
 * that of an older header: nothing is read beyond it. One larger than the library's own is refused, KT_INVALID: it may ask for what
 * the library does not know. */
typedef struct kt_options {
    size_t size;
    size_t threads;         /* the caller's counted; default: the physical cores that this process may use, no more than a CPU quota pays for */
    const char *backend;    /* only this one; default: the best for each layer */
    const char *max_tier;   /* no instruction set above: portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx */
    uint64_t memory_limit;  /* bytes that loading may take; default: what the system says is available */
    size_t pass_tokens;     /* most tokens computed at once; default: 192 rows of an expert on average, 1024 to 6144 tokens */
    const char *plugin;     /* load the backend of this shared library too */
    const char *plugin_dir; /* and those of all plugins of this directory */
    int32_t in_place;       /* not 0: weights from the checkpoint's map wherever a backend can, for less memory */
    int32_t batch_invariant; /* not 0: a token has the same numbers whatever else is in a call, where a backend has a faster way for many */
} kt_options;

/* Starts a runtime with its threads. `options` may be NULL. */
int32_t kt_runtime_new(const kt_options *options, kt_runtime **runtime, kt_error *error);
void kt_runtime_free(kt_runtime *runtime);

/* Opens a checkpoint, reading headers only: a directory with safetensors files, or a GGUF file. */
int32_t kt_open(const char *path, kt_source **source, kt_error *error);
void kt_source_free(kt_source *source);

/* A layer that has experts. */
typedef struct kt_layer {
    size_t index;          /* in the model, dense layers counted: what kt_forward takes */
    size_t experts;
    size_t top_k;          /* experts of a token, in the model's configuration */
    size_t hidden;         /* width of the hidden state */
    size_t intermediate;
    uint64_t stored_bytes; /* of all experts, in the checkpoint */
} kt_layer;

/* How many layers have experts; 0 for NULL. */
size_t kt_layers(const kt_source *source);
/* Number `i` of them, by rising index. */
int32_t kt_layer_at(const kt_source *source, size_t i, kt_layer *layer, kt_error *error);

enum { KT_FITS = 0, KT_TIGHT = 1, KT_REFUSE = 2 };

/* What loading would take, in bytes. */
typedef struct kt_plan_bytes {
    int32_t verdict;          /* KT_FITS, KT_TIGHT (less than a tenth is left), KT_REFUSE (kt_load would) */
    uint64_t packed_bytes;    /* packed experts */
    uint64_t mapped_bytes;    /* used from the files' maps */
    uint64_t need_bytes;      /* in all */
    uint64_t available_bytes; /* that this process may still take */
} kt_plan_bytes;

/* What loading would take; reads headers only. */
int32_t kt_plan(const kt_runtime *runtime, const kt_source *source, kt_plan_bytes *plan, kt_error *error);

/* Says for each layer which backend would run it, and why no other: up to `capacity` bytes with the final zero, cut if need be.
 * `needed`, which may be NULL, gets the bytes of the whole text with its zero; `text` may be NULL if `capacity` is 0. */
int32_t kt_explain(const kt_runtime *runtime, const kt_source *source, char *text, size_t capacity, size_t *needed,
                   kt_error *error);

/* Loads all experts. */
int32_t kt_load(const kt_runtime *runtime, const kt_source *source, kt_experts **experts, kt_error *error);
void kt_experts_free(kt_experts *experts);

/* A batch on its way through one layer. */
typedef struct kt_batch {
    size_t tokens;
    size_t hidden;             /* the layer's */
    size_t top_k;              /* experts of each token here */
    const float *input;        /* [tokens, hidden] */
    const int32_t *experts;    /* [tokens, top_k], -1 for none */
    const float *weights;      /* [tokens, top_k] */
} kt_batch;

/* Writes output [tokens, hidden]: for every token, the weighted sum of its experts. The calling thread works too. */
int32_t kt_forward(const kt_experts *experts, size_t layer, const kt_batch *batch, float *output, kt_error *error);

/* Starts a batch and returns; all that it points to was copied. */
int32_t kt_submit(const kt_experts *experts, size_t layer, const kt_batch *batch, kt_pending **pending, kt_error *error);
/* Blocks until it is done and writes output [tokens, hidden], `len` numbers. Ends the handle, whatever it returns. */
int32_t kt_wait(kt_pending *pending, float *output, size_t len, kt_error *error);
/* Ends the handle of work that nobody waits for. */
void kt_pending_free(kt_pending *pending);

#ifdef __cplusplus
}
#endif

#endif
