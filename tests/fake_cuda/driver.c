// libcuda.so.1: the driver's functions that torch, Triton and torch_memory_saver call; `build.py` adds the others.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core.h"

typedef int R;
typedef unsigned long long P;  // an address of a device
static int contexts[64];

// ---- devices and contexts ----

R cuInit(unsigned flags) { return fk_num_devices() ? 0 : NO_DEVICE; }
R cuDriverGetVersion(int *version) { return *version = 13000, 0; }
R cuDeviceGetCount(int *number) { return *number = fk_num_devices(), 0; }
R cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < 0 || ordinal >= fk_num_devices() ? INVALID_DEVICE : 0;
}
R cuDeviceGetName(char *name, int room, int device) { return snprintf(name, room, "NVIDIA H100 80GB HBM3"), 0; }
R cuDeviceTotalMem_v2(size_t *bytes, int device) {
    size_t unused;
    return fk_memory_info(device, &unused, bytes), 0;
}
R cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 0x40 + device, 16), 0; }
R cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = fk_attribute(attribute), 0; }
R cuDeviceGetPCIBusId(char *id, int room, int device) { return snprintf(id, room, "0000:%02x:00.0", device + 1), 0; }
R cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &contexts[device], 0; }
R cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
R cuCtxGetCurrent(void **context) { return *context = &contexts[*fk_device()], 0; }
R cuCtxSetCurrent(int *context) { return *fk_device() = context ? context - contexts : 0, 0; }
R cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : 0; }
R cuCtxGetDevice(int *device) { return *device = *fk_device(), 0; }
R cuCtxSynchronize(void) { return fk_may_wait("cuCtxSynchronize"); }
R cuGetErrorString(R error, const char **text) {
    static __thread char buffer[40];
    snprintf(buffer, sizeof buffer, "error %d of the fake driver", error);
    return *text = buffer, 0;
}
R cuGetErrorName(R error, const char **text) { return cuGetErrorString(error, text); }
R cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *found) {
    static void *library;
    char newer[160];
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(library, newer);
    if (!*function) *function = dlsym(library, name);
    if (found) *found = *function ? 0 : 1;
    return *function ? 0 : NOT_FOUND;
}
R cuGetExportTable(const void **table, const void *id) { return *table = NULL, NOT_FOUND; }

// ---- memory ----

R cuMemAlloc_v2(P *address, size_t bytes) { return (*address = (P)fk_allocate(bytes, *fk_device())) ? 0 : OUT_OF_MEMORY; }
R cuMemFree_v2(P address) { return fk_free((void *)address); }
R cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return fk_memory_info(*fk_device(), free_bytes, total), 0; }
R cuMemcpyHtoD_v2(P to, const void *from, size_t bytes) { return fk_copy((void *)to, from, bytes), 0; }
R cuMemcpyDtoH_v2(void *to, P from, size_t bytes) { return fk_copy(to, (void *)from, bytes), 0; }
R cuMemcpyHtoDAsync_v2(P to, const void *from, size_t bytes, void *stream) { return cuMemcpyHtoD_v2(to, from, bytes); }
R cuMemcpyDtoHAsync_v2(void *to, P from, size_t bytes, void *stream) { return cuMemcpyDtoH_v2(to, from, bytes); }
R cuMemcpyAsync(P to, P from, size_t bytes, void *stream) { return fk_copy((void *)to, (void *)from, bytes), 0; }
R cuMemsetD8Async(P to, unsigned char value, size_t bytes, void *stream) { return fk_fill((void *)to, value, bytes), 0; }
R cuMemAllocHost_v2(void **pointer, size_t bytes) { return (*pointer = fk_pinned(bytes)) ? 0 : OUT_OF_MEMORY; }
R cuMemFreeHost(void *pointer) { return fk_untrack(pointer, ON_HOST); }
R cuMemGetAddressRange_v2(P *base, size_t *size, P address) {
    fk_range range = fk_find((void *)address);
    if (base) *base = range.base;
    if (size) *size = range.size;
    return range.kind == UNKNOWN ? INVALID_VALUE : 0;
}
R cuPointerGetAttribute(void *value, int attribute, P address) {
    fk_range range = fk_find((void *)address);
    if (range.kind == UNKNOWN) return INVALID_VALUE;
    switch (attribute) {
        case 1: *(void **)value = &contexts[range.device]; break;
        case 2: *(unsigned *)value = range.kind == ON_HOST ? 1 : 2; break;
        case 3:
        case 4: *(P *)value = address; break;
        case 9: *(int *)value = range.device; break;
        case 11: *(P *)value = range.base; break;
        case 12: *(size_t *)value = range.size; break;
        default: *(int *)value = 0;
    }
    return 0;
}
R cuPointerGetAttributes(unsigned number, int *attributes, void **values, P address) {
    for (unsigned i = 0; i < number; i++) cuPointerGetAttribute(values[i], attributes[i], address);
    return 0;
}

// ---- virtual memory: of expandable segments and of torch_memory_saver ----

typedef struct { size_t size, offset; int device; } handle;
typedef struct { int type, handles; struct { int type, id; } location; } properties;

R cuMemGetAllocationGranularity(size_t *bytes, const properties *of, int option) { return *bytes = 2 << 20, 0; }
R cuMemAddressReserve(P *address, size_t bytes, size_t alignment, P wish, unsigned long long flags) {
    void *there = mmap((void *)wish, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (there == MAP_FAILED) return OUT_OF_MEMORY;
    fk_track(there, bytes, *fk_device(), RESERVED);
    return *address = (P)there, 0;
}
R cuMemAddressFree(P address, size_t bytes) { return fk_untrack((void *)address, RESERVED); }
R cuMemCreate(handle **out, size_t bytes, const properties *of, unsigned long long flags) {
    if (fk_charge(of->location.id, bytes)) return OUT_OF_MEMORY;
    *out = malloc(sizeof **out);
    **out = (handle){bytes, fk_new_pages(bytes), of->location.id};
    return fk_count("api", "cuMemCreate"), 0;
}
R cuMemRelease(handle *of) {
    fk_charge(of->device, -(long long)of->size);
    fk_drop_pages(of->offset, of->size);
    free(of);
    return fk_count("api", "cuMemRelease"), 0;
}
R cuMemMap(P address, size_t bytes, size_t offset, handle *of, unsigned long long flags) {
    return fk_map_pages((void *)address, bytes, of->offset + offset);
}
R cuMemUnmap(P address, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : 0;
}
R cuMemSetAccess(P address, size_t bytes, const void *who, size_t number) {
    return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0;
}
R cuMemExportToShareableHandle(void *out, handle *of, int type, unsigned long long flags) { return 801; }  // no support

// ---- modules and kernels ----

typedef struct { char name[200]; } function;

R cuModuleLoadData(void **module, const void *image) { return *module = malloc(1), 0; }
R cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *o, void **v) {
    return cuModuleLoadData(module, image);
}
R cuModuleGetFunction(function **out, void *module, const char *name) {
    *out = calloc(1, sizeof **out);
    return snprintf((*out)->name, sizeof(*out)->name, "%s", name), 0;
}
R cuModuleGetGlobal_v2(P *address, size_t *bytes, void *module, const char *name) {
    if (bytes) *bytes = 4096;
    return cuMemAlloc_v2(address, 4096);
}
R cuLibraryLoadData(void **library, const void *code, void *a, void **b, unsigned n, void *c, void **d, unsigned m) {
    return cuModuleLoadData(library, code);
}
R cuLibraryGetKernel(function **kernel, void *library, const char *name) {
    return cuModuleGetFunction(kernel, library, name);
}
R cuLibraryGetModule(void **module, void *library) { return *module = library, 0; }
R cuKernelGetFunction(void **out, void *kernel) { return *out = kernel, 0; }
R cuFuncGetModule(void **module, void *of) { return *module = of, 0; }
R cuFuncGetAttribute(int *value, int attribute, void *of) {
    return *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0, 0;  // threads in a block, registers
}
R cuFuncGetName(const char **name, function *of) { return *name = of->name, 0; }
R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *of, int threads, size_t bytes) {
    return *blocks = 2, 0;
}
R cuOccupancyMaxActiveClusters(int *clusters, void *of, const void *settings) { return *clusters = 16, 0; }
R cuLaunchKernel(function *of, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned bytes,
                 void *stream, void **arguments, void **extra) {
    return fk_launch(of->name, (unsigned[]){x, y, z}, (unsigned[]){bx, by, bz}, bytes);
}
typedef struct { unsigned grid[3], block[3], bytes; void *stream, *attributes; unsigned number; } launch;
R cuLaunchKernelEx(const launch *how, function *of, void **arguments, void **extra) {
    return fk_launch(of->name, how->grid, how->block, how->bytes);
}
R cuLaunchCooperativeKernel(function *of, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                            unsigned bytes, void *stream, void **arguments) {
    return fk_launch(of->name, (unsigned[]){x, y, z}, (unsigned[]){bx, by, bz}, bytes);
}

// ---- streams, events, handles for other processes ----

R cuStreamCreate(void **stream, unsigned flags) { return *stream = fk_new_stream(0, flags), 0; }
R cuStreamDestroy_v2(void *stream) { return fk_delete_stream(stream), 0; }
R cuStreamSynchronize(void *stream) { return fk_may_wait("cuStreamSynchronize"); }
R cuStreamIsCapturing(void *stream, int *status) { return *status = fk_stream_of(stream)->capture != 0, 0; }
R cuStreamGetCtx(void *stream, void **context) { return cuCtxGetCurrent(context); }
R cuEventCreate(void **event, unsigned flags) { return *event = fk_new_event(), 0; }
R cuEventDestroy_v2(void *event) { return free(event), 0; }
R cuIpcGetMemHandle(char *out, P address) { return fk_make_handle((void *)address, out); }
typedef struct { char text[64]; } ipc;
R cuIpcOpenMemHandle_v2(P *address, ipc of, unsigned flags) {
    return (*address = (P)fk_open_handle(of.text, *fk_device())) ? 0 : INVALID_VALUE;
}
R cuIpcCloseMemHandle(P address) { return fk_untrack((void *)address, OF_OTHER_PROCESS); }
