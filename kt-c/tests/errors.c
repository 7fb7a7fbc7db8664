/* What C programs do wrong, and what they are told; and that header and library agree on every type. */
#include <kt.h>

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kt_error error;

static void says(int32_t code, int32_t wanted, const char *word) {
    if (code != wanted || error.code != wanted || !strstr(error.text, word)) {
        fprintf(stderr, "code %d, wanted %d with \"%s\"; the error is %d: %s\n", code, wanted, word, error.code, error.text);
        exit(1);
    }
}

int main(int argc, char **argv) {
    kt_runtime *runtime = NULL;
    kt_source *source = NULL;
    kt_experts *experts = NULL;
    kt_pending *pending = NULL;
    kt_options options = {0};
    kt_layer layer;
    kt_plan_bytes plan;
    char text[8];
    size_t i, needed;
    float *numbers;
    char *old;

    if (argc != 2 || kt_c_version() != KT_C_VERSION) {
        return 2;
    }
    /* Types, as `tests/c.rs` knows them. */
    printf("%zu %zu %zu %zu %zu %zu %zu %zu %zu\n", sizeof(kt_error), sizeof(kt_options), sizeof(kt_layer), sizeof(kt_plan_bytes),
           sizeof(kt_batch), offsetof(kt_options, in_place), offsetof(kt_options, batch_invariant), offsetof(kt_layer, stored_bytes), offsetof(kt_batch, weights));

    says(kt_open("/nonexistent/model", &source, &error), KT_IO, "/nonexistent/model");
    says(kt_open(NULL, &source, &error), KT_INVALID, "path is NULL");
    says(kt_open(argv[1], NULL, &error), KT_INVALID, "source is NULL");
    says(kt_open("\xff\xfe", &source, &error), KT_INVALID, "UTF-8");
    if (kt_open("/nonexistent/model", &source, NULL) != KT_IO || source != NULL || kt_layers(NULL) != 0) {
        return 3;
    }

    says(kt_runtime_new(&options, &runtime, &error), KT_INVALID, "options.size is 0");
    options.size = sizeof options + 1;
    says(kt_runtime_new(&options, &runtime, &error), KT_INVALID, "no older than kt.h");
    /* As a program has them that was compiled before in_place: no byte more. */
    old = calloc(1, offsetof(kt_options, in_place));
    if (old == NULL) {
        return 13;
    }
    *(size_t *)(old + offsetof(kt_options, size)) = offsetof(kt_options, in_place) - 1;
    says(kt_runtime_new((kt_options *)old, &runtime, &error), KT_INVALID, "options.size");
    *(size_t *)(old + offsetof(kt_options, size)) = offsetof(kt_options, in_place);
    *(size_t *)(old + offsetof(kt_options, threads)) = 1;
    if (kt_runtime_new((kt_options *)old, &runtime, &error) != KT_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 13;
    }
    kt_runtime_free(runtime);
    free(old);
    options.size = sizeof options;
    options.backend = "abacus";
    says(kt_runtime_new(&options, &runtime, &error), KT_UNSUPPORTED, "abacus");
    options.backend = "portable";
    options.max_tier = "abacus";
    says(kt_runtime_new(&options, &runtime, &error), KT_UNSUPPORTED, "unknown tier");
    options.max_tier = NULL;
    options.memory_limit = 1;
    if (kt_runtime_new(&options, &runtime, &error) != KT_OK || kt_open(argv[1], &source, &error) != KT_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 4;
    }
    says(kt_load(runtime, source, &experts, &error), KT_MEMORY, "REFUSE");
    if (kt_plan(runtime, source, &plan, &error) != KT_OK || plan.verdict != KT_REFUSE) {
        return 5;
    }
    kt_runtime_free(runtime);
    options.memory_limit = 0;
    options.in_place = 1;
    if (kt_runtime_new(&options, &runtime, &error) != KT_OK || kt_load(runtime, source, &experts, &error) != KT_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 6;
    }
    says(kt_explain(runtime, source, NULL, 5, &needed, &error), KT_INVALID, "text is NULL");
    memset(text, 'x', sizeof text);
    if (kt_explain(runtime, source, text, 4, &needed, &error) != KT_OK || strlen(text) != 3 || needed <= 8 || text[4] != 'x') {
        return 7;
    }
    says(kt_layer_at(source, 1000, &layer, &error), KT_INVALID, "1000");
    if (kt_layer_at(source, 0, &layer, &error) != KT_OK) {
        return 8;
    }
    numbers = calloc(layer.hidden, sizeof *numbers);
    {
        int32_t far[1] = {(int32_t)layer.experts}, none[1] = {-1}, one[1] = {0};
        float weights[1] = {1};
        kt_batch batch = {1, layer.hidden, 1, numbers, far, weights};
        says(kt_forward(experts, layer.index, &batch, numbers, &error), KT_INVALID, "topk_ids");
        says(kt_forward(experts, 1000, &batch, numbers, &error), KT_INVALID, "1000");
        batch.experts = one;
        says(kt_forward(experts, layer.index, &batch, NULL, &error), KT_INVALID, "output is NULL");
        batch.hidden -= 1;
        says(kt_forward(experts, layer.index, &batch, numbers, &error), KT_INVALID, "input");
        batch.tokens = (size_t)-1;
        says(kt_forward(experts, layer.index, &batch, numbers, &error), KT_INVALID, "does not fit");
        batch = (kt_batch){1, layer.hidden, 1, NULL, none, weights};
        says(kt_submit(experts, layer.index, &batch, &pending, &error), KT_INVALID, "batch.input is NULL");
        batch.input = numbers;
        if (kt_submit(experts, layer.index, &batch, &pending, &error) != KT_OK) {
            return 9;
        }
        says(kt_wait(pending, numbers, 1, &error), KT_INVALID, "output");
        /* Work, experts and runtime may end in any order. */
        batch.experts = one;
        if (kt_submit(experts, layer.index, &batch, &pending, &error) != KT_OK) {
            return 10;
        }
        kt_experts_free(experts);
        kt_runtime_free(runtime);
        if (kt_wait(pending, numbers, layer.hidden, &error) != KT_OK) {
            return 11;
        }
    }
    for (i = 0; i < layer.hidden; i++) {
        if (numbers[i] != numbers[i]) {
            return 12;
        }
    }
    free(numbers);
    kt_source_free(source);
    kt_source_free(NULL);
    kt_runtime_free(NULL);
    kt_experts_free(NULL);
    kt_pending_free(NULL);
    puts("all said");
    return 0;
}
