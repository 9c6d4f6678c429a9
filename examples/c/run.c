/* Runs a package on arguments from files (raw, row by row) and writes the results.
 *
 *     run PACKAGE BATCH INPUT... : for each input its file; sizes that may change are BATCH. Results: INPUT.out.NUMBER
 *     run PACKAGE               : prints what the package has */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "fusewright.h"

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, fw_last_error());
    return 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

static size_t bytes_of(const fw_tensor *tensor) {
    size_t bytes = (size_t)fw_item_size(tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++) bytes *= (size_t)tensor->sizes[i];
    return bytes;
}

static void show(const char *name, const fw_tensor *tensor) {
    printf("  %s: dtype %d, sizes", name, tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++) printf(" %lld", (long long)tensor->sizes[i]);
    printf("\n");
}

int main(int count, char **words) {
    fw_package *package = NULL;
    fw_tensor inputs[8], outputs[16];
    double started = now();
    if (count < 2) return 2;
    if (fw_load(words[1], &package) != FW_OK) return failed("load");
    printf("load %.1f us\n", now() - started);
    for (size_t entry = 0; entry < fw_entry_count(package); entry++) {
        printf("%s\n", fw_entry_name(package, entry));
        for (size_t i = 0; i < fw_input_count(package, entry); i++)
            if (fw_input(package, entry, i, &inputs[0]) == FW_OK) show(fw_input_name(package, entry, i), &inputs[0]);
        for (size_t i = 0; i < fw_output_count(package, entry); i++)
            if (fw_output(package, entry, i, &outputs[0]) == FW_OK) show("result", &outputs[0]);
    }
    if (count > 3) {
        size_t given = (size_t)count - 3, made = fw_output_count(package, 0);
        if (given > 8 || made > 16) return 2;
        for (size_t i = 0; i < given; i++) {
            if (fw_input(package, 0, i, &inputs[i]) != FW_OK) return failed("input");
            for (int k = 0; k < inputs[i].ndim; k++)
                if (inputs[i].sizes[k] < 0) inputs[i].sizes[k] = atoll(words[2]);
            size_t bytes = bytes_of(&inputs[i]);
            FILE *file = fopen(words[3 + i], "rb");
            inputs[i].data = malloc(bytes + 1);
            if (file == NULL || fread(inputs[i].data, 1, bytes, file) != bytes) return fprintf(stderr, "%s is too short\n", words[3 + i]), 1;
            fclose(file);
        }
        if (fw_run(package, 0, inputs, given, outputs, made) != FW_OK) return failed("run");
        for (size_t i = 0; i < made; i++) {
            if (fw_to_cpu(&outputs[i]) != FW_OK) return failed("result"); /* of a program on a GPU */
            char path[4096];
            snprintf(path, sizeof path, "%s.out.%zu", words[3], i);
            FILE *file = fopen(path, "wb");
            if (file == NULL) return 1;
            fwrite(outputs[i].data, 1, bytes_of(&outputs[i]), file);
            fclose(file);
            fw_free(&outputs[i]);
        }
        double best = 1e30;
        for (int round = 0; round < 200; round++) {
            started = now();
            if (fw_run(package, 0, inputs, given, outputs, made) != FW_OK) return failed("run");
            if (now() - started < best) best = now() - started;
            for (size_t i = 0; i < made; i++) fw_free(&outputs[i]);
        }
        printf("call %.2f us\n", best);
        for (size_t i = 0; i < given; i++) free(inputs[i].data);
    }
    fw_close(package);
    return 0;
}
