// libcudnn.so.9: of a version with which torch takes flash attention, whose kernels are its own, for packed sequences.
#include <stdlib.h>

#include "core.h"

size_t cudnnGetVersion(void) { return 91700; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 17 : 0, 0; }
int cudnnCreate(void **out) { return *out = malloc(64), 0; }
