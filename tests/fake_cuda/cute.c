// What kernels of CuTe DSL are loaded and launched with: its library has a CUDA runtime built in, which asks the driver
// for tables that nobody has published. `build.py` adds `_cudaLaunchKernelEx` and the like, which call this runtime.
#include <stddef.h>

int cudaGetDeviceCount(int *number);

int cuda_dialect_init_library_once(void **library, int (*load)(void **), int (*prepare)(void **, int device),
                                   void (*say)(const char *kind, const char *message)) {
    int number = 0;
    if (*library) return 0;
    if (load(library)) return say("RuntimeError", "the fake runtime did not load a library"), -1;
    cudaGetDeviceCount(&number);
    for (int device = 0; prepare && device < number; device++) prepare(library, device);
    return 0;
}
void cuda_dialect_unload_library_once(void **library) { *library = NULL; }
