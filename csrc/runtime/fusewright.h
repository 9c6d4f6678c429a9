/* Runs packages of fusewright.package, without Python. Those made with standalone=True need nothing else; others call
 * operators of PyTorch through its C functions, in libtorch_cpu.so, which is opened when such a package is loaded.
 * Those of programs on a GPU need CUDA's driver (libcuda.so.1), and libtorch_cuda.so where they call operators.
 *
 * Every function that can fail gives a status; fw_last_error() says in words what was wrong, on the calling thread.
 * A package may be used by any number of threads at the same time. Its code runs with the rights of the process: load
 * packages only from those whom you would let run a program. */
#ifndef FUSEWRIGHT_H
#define FUSEWRIGHT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FW_API __attribute__((visibility("default")))

typedef enum {
    FW_OK = 0,
    FW_FILE = 1,    /* the file is damaged, or no package */
    FW_MACHINE = 2, /* no code in the file runs on this processor or GPU, or with this libtorch; or there is none */
    FW_INPUT = 3,   /* the arguments are not what the program takes */
    FW_MEMORY = 4,  /* no memory is left */
    FW_RUN = 5      /* the program failed: an index out of range; or the GPU did */
} fw_status;

typedef enum {
    FW_FLOAT64, FW_FLOAT32, FW_FLOAT16, FW_BFLOAT16, FW_INT64, FW_INT32, FW_INT16, FW_INT8, FW_UINT8, FW_BOOL
} fw_dtype;

#define FW_MOST_DIMS 16

typedef enum { FW_CPU, FW_CUDA } fw_device;

/* A tensor in memory, row by row. In a description, `data` is null and a size that may change is -1. */
typedef struct {
    void *data;
    int32_t dtype; /* fw_dtype */
    int32_t ndim;
    int64_t sizes[FW_MOST_DIMS];
    int32_t device;       /* fw_device: where `data` lies */
    int32_t device_index; /* the number of a GPU */
} fw_tensor;

typedef struct fw_package fw_package;

/* Where libtorch_cpu.so is: its path, or its folder's. For packages that are not standalone, before the first of them
 * is loaded. Without it the one that is in the process is taken, or the dynamic loader's own places are searched. */
FW_API fw_status fw_use_torch(const char *path);

FW_API fw_status fw_load(const char *path, fw_package **package);
/* The same, refusing a package that the owner of this Ed25519 key did not sign (FW_FILE). key: its 32 public bytes. */
FW_API fw_status fw_load_signed(const char *path, const uint8_t *key, fw_package **package);
FW_API void fw_close(fw_package *package);
FW_API const char *fw_last_error(void);
FW_API int64_t fw_item_size(int32_t dtype); /* in bytes; 0 for an unknown one */

/* Entry points, in the order of the file. A null name, or FW_INPUT, where there is none of this number. */
FW_API size_t fw_entry_count(const fw_package *package);
FW_API const char *fw_entry_name(const fw_package *package, size_t entry);
FW_API size_t fw_input_count(const fw_package *package, size_t entry);
FW_API size_t fw_output_count(const fw_package *package, size_t entry);
FW_API const char *fw_input_name(const fw_package *package, size_t entry, size_t input);
FW_API fw_status fw_input(const fw_package *package, size_t entry, size_t input, fw_tensor *description);
FW_API fw_status fw_output(const fw_package *package, size_t entry, size_t output, fw_tensor *description);

/* Fills `outputs`, whose memory the caller gives back by fw_free. Nothing is to be given back after a failure.
 * inputs: aligned as their dtype. What the program reads on a GPU may be given on the CPU: it is copied. Results of a
 * program on a GPU lie there, and are complete when this returns. */
FW_API fw_status fw_run(const fw_package *package, size_t entry, const fw_tensor *inputs, size_t input_count,
                        fw_tensor *outputs, size_t output_count);
/* The same on a stream (CUstream, cudaStream_t) of the program's GPU, without waiting for it: inputs must stay as they
 * are until the stream has come so far. Errors of kernels are told by whoever waits for the stream. A stream that is
 * recorded into a graph may be given after a first call; the memory of a recorded call, its results' too, stays until
 * the process ends, since the graph may be started at any time. */
FW_API fw_status fw_run_on(const fw_package *package, size_t entry, const fw_tensor *inputs, size_t input_count,
                           fw_tensor *outputs, size_t output_count, void *stream);
/* Moves a result to memory of the CPU, where it is not there yet. Waits for it. */
FW_API fw_status fw_to_cpu(fw_tensor *tensor);
/* Memory of a GPU: when nothing that is still to run reads it. */
FW_API void fw_free(fw_tensor *tensor);

#ifdef __cplusplus
}
#endif
#endif
