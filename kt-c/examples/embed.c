/* The experts of a checkpoint from C: opens it, plans, loads, and runs each layer once.
 *
 *   cargo build -p kt-c --release
 *   cc kt-c/examples/embed.c -Ikt-c/include -Ltarget/release -lkt_c -Wl,-rpath,$PWD/target/release -o embed
 *   ./embed /models/Qwen3-30B-A3B
 */
#include <kt.h>

#include <stdio.h>
#include <stdlib.h>

static kt_error error;

static void check(int32_t code, const char *what) {
    if (code != KT_OK) {
        fprintf(stderr, "%s: error %d: %s\n", what, (int)code, error.text);
        exit(1);
    }
}

/* Runs one layer on made-up hidden states, called and submitted, and returns the first number of its output. */
static float run(const kt_experts *experts, const kt_layer *layer, size_t tokens) {
    size_t numbers = tokens * layer->hidden, slots = tokens * layer->top_k;
    float *input = malloc(numbers * sizeof *input), *output = malloc(numbers * sizeof *output);
    float *again = malloc(numbers * sizeof *again), *weights = malloc(slots * sizeof *weights);
    int32_t *ids = malloc(slots * sizeof *ids);
    float first;
    size_t i;
    if (!input || !output || !again || !weights || !ids) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    for (i = 0; i < numbers; i++) {
        input[i] = (float)((double)(i % 17) / 17.0 - 0.5);
    }
    for (i = 0; i < slots; i++) {
        ids[i] = (int32_t)(i % layer->experts);
        weights[i] = 1.0f / (float)layer->top_k;
    }
    kt_batch batch = {tokens, layer->hidden, layer->top_k, input, ids, weights};
    check(kt_forward(experts, layer->index, &batch, output, &error), "kt_forward");

    kt_pending *pending;
    check(kt_submit(experts, layer->index, &batch, &pending, &error), "kt_submit");
    check(kt_wait(pending, again, numbers, &error), "kt_wait");
    for (i = 0; i < numbers; i++) {
        if (output[i] != again[i]) {
            fprintf(stderr, "layer %zu: number %zu differs from call to call\n", layer->index, i);
            exit(1);
        }
    }
    first = output[0];
    free(input), free(output), free(again), free(weights), free(ids);
    return first;
}

int main(int argc, char **argv) {
    kt_options options = {0};
    kt_runtime *runtime;
    kt_source *source;
    kt_experts *experts;
    kt_plan_bytes plan;
    size_t i, needed;
    char *text;

    if (argc < 2) {
        fprintf(stderr, "usage: embed CHECKPOINT [BACKEND]\n");
        return 2;
    }
    options.size = sizeof options;
    options.backend = argc > 2 ? argv[2] : NULL;
    check(kt_open(argv[1], &source, &error), "kt_open");
    check(kt_runtime_new(&options, &runtime, &error), "kt_runtime_new");

    check(kt_plan(runtime, source, &plan, &error), "kt_plan");
    printf("%zu layers, %llu bytes packed, %llu from the map\n", kt_layers(source),
           (unsigned long long)plan.packed_bytes, (unsigned long long)plan.mapped_bytes);
    check(kt_explain(runtime, source, NULL, 0, &needed, &error), "kt_explain");
    text = malloc(needed);
    check(text ? kt_explain(runtime, source, text, needed, NULL, &error) : KT_MEMORY, "kt_explain");
    printf("%s\n", text);
    free(text);
    if (plan.verdict == KT_REFUSE) {
        fprintf(stderr, "it does not fit: %llu bytes are available\n", (unsigned long long)plan.available_bytes);
        return 1;
    }

    check(kt_load(runtime, source, &experts, &error), "kt_load");
    for (i = 0; i < kt_layers(source); i++) {
        kt_layer layer;
        check(kt_layer_at(source, i, &layer, &error), "kt_layer_at");
        printf("layer %zu: output[0] = %.6f\n", layer.index, run(experts, &layer, 3));
    }
    kt_experts_free(experts);
    kt_runtime_free(runtime);
    kt_source_free(source);
    return 0;
}
