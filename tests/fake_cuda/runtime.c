// libcudart.so.13: the runtime's functions that do more than succeed; `build.py` adds the others.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "driver_types.h"

typedef enum cudaError E;
static __thread E last;
static E result(int error) { return error ? last = (E)error : 0; }

E cudaGetLastError(void) {
    E error = last;
    return last = 0, error;
}
E cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(E error) {
    static __thread char text[48];
    return snprintf(text, sizeof text, "error %d of the fake runtime", error), text;
}
const char *cudaGetErrorName(E error) { return cudaGetErrorString(error); }
E cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
E cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }

// ---- devices ----

E cudaGetDeviceCount(int *number) { return result((*number = fk_num_devices()) ? 0 : NO_DEVICE); }
E cudaGetDevice(int *device) { return *device = *fk_device(), 0; }
E cudaSetDevice(int device) {
    if (device < 0 || device >= fk_num_devices()) return result(INVALID_DEVICE);
    return *fk_device() = device, 0;
}
E cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return *value = fk_attribute(attribute), 0;
}
E cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    size_t free_bytes, total;
    fk_memory_info(device, &free_bytes, &total);
    *out = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3", .totalGlobalMem = total, .sharedMemPerBlock = 49152, .regsPerBlock = 65536,
        .warpSize = 32, .memPitch = 2147483647, .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .totalConstMem = 65536, .major = 9, .textureAlignment = 512,
        .multiProcessorCount = 132, .canMapHostMemory = 1, .concurrentKernels = 1, .ECCEnabled = 1,
        .pciBusID = device + 1, .asyncEngineCount = 3, .unifiedAddressing = 1, .memoryBusWidth = 5120,
        .l2CacheSize = 52428800, .maxThreadsPerMultiProcessor = 2048, .streamPrioritiesSupported = 1,
        .sharedMemPerMultiprocessor = 233472, .managedMemory = 1, .concurrentManagedAccess = 1, .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = 232448, .maxBlocksPerMultiProcessor = 32, .reservedSharedMemPerBlock = 1024,
        .hostRegisterSupported = 1, .memoryPoolsSupported = 1, .ipcEventSupported = 1, .clusterLaunch = 1,
    };
    memset(&out->uuid, 0x40 + device, 16);
    return 0;
}
E cudaDeviceGetPCIBusId(char *id, int room, int device) { return snprintf(id, room, "0000:%02x:00.0", device + 1), 0; }
E cudaDeviceGetByPCIBusId(int *device, const char *id) {
    return sscanf(id, "0000:%x", (unsigned *)device) == 1 ? --*device, 0 : result(INVALID_VALUE);
}
E cudaDeviceCanAccessPeer(int *can, int device, int other) { return *can = device != other, 0; }
E cudaDeviceGetP2PAttribute(int *value, int attribute, int device, int other) { return *value = 1, 0; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
E cudaDeviceGetLimit(size_t *value, int limit) { return *value = 1024, 0; }
E cudaDeviceGetDefaultMemPool(void **pool, int device) { return *pool = (void *)1, 0; }
E cudaMemGetInfo(size_t *free_bytes, size_t *total) { return fk_memory_info(*fk_device(), free_bytes, total), 0; }
E cudaDeviceSynchronize(void) { return result(fk_may_wait("cudaDeviceSynchronize")); }

// ---- memory ----

E cudaMalloc(void **pointer, size_t bytes) {
    fk_count("api", "cudaMalloc");
    *pointer = bytes ? fk_allocate(bytes, *fk_device()) : NULL;
    return result(bytes && !*pointer ? OUT_OF_MEMORY : 0);
}
E cudaFree(void *pointer) { return fk_count("api", "cudaFree"), result(fk_free(pointer)); }
E cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }
E cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
E cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    return result((*pointer = fk_pinned(bytes)) ? 0 : OUT_OF_MEMORY);
}
E cudaMallocHost(void **pointer, size_t bytes, unsigned flags) { return cudaHostAlloc(pointer, bytes, flags); }
E cudaFreeHost(void *pointer) { return result(fk_untrack(pointer, ON_HOST)); }
E cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    return fk_track(pointer, bytes, *fk_device(), REGISTERED), 0;
}
E cudaHostUnregister(void *pointer) { return result(fk_untrack(pointer, REGISTERED)); }
E cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags) { return *out = pointer, 0; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    fk_range range = fk_find(pointer);
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (range.kind == UNKNOWN) return 0;
    int on_host = range.kind == ON_HOST || range.kind == REGISTERED;
    *out = (struct cudaPointerAttributes){
        .type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice,
        .device = range.device,
        .devicePointer = (void *)pointer,
        .hostPointer = on_host ? (void *)pointer : NULL,
    };
    return 0;
}
static void count_copy(const void *to, const void *from) {
    static const char *names[] = {"device", "pinned", "device", "other process's device", "pageable", "pinned"};
    char text[80];
    snprintf(text, sizeof text, "%s to %s", names[fk_kind(from)], names[fk_kind(to)]);
    fk_count("copy", text);
}
E cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return count_copy(to, from), fk_copy(to, from, bytes), 0;
}
E cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    int error = fk_may_wait("cudaMemcpy");
    return error ? result(error) : cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
E cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
E cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
                    enum cudaMemcpyKind kind, cudaStream_t stream) {
    count_copy(to, from);
    for (size_t i = 0; i < height; i++) fk_copy((char *)to + i * pitch, (const char *)from + i * other, width);
    return 0;
}
E cudaMemset(void *to, int value, size_t bytes) { return fk_count("api", "cudaMemset"), fk_fill(to, value, bytes), 0; }
E cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) { return cudaMemset(to, value, bytes); }
E cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char there[4096];
    return *pointer = there, 0;
}
E cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *pointer) {
    return fk_count("api", "cudaIpcGetMemHandle"), result(fk_make_handle(pointer, out->reserved));
}
E cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    fk_count("api", "cudaIpcOpenMemHandle");
    return result((*pointer = fk_open_handle(handle.reserved, *fk_device())) ? 0 : INVALID_VALUE);
}
E cudaIpcCloseMemHandle(void *pointer) {
    return fk_count("api", "cudaIpcCloseMemHandle"), result(fk_untrack(pointer, OF_OTHER_PROCESS));
}

// ---- streams and events ----

E cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return *stream = (cudaStream_t)fk_new_stream(priority, flags), 0;
}
E cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
E cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
E cudaStreamDestroy(cudaStream_t stream) { return fk_delete_stream((fk_stream *)stream), 0; }
E cudaStreamGetPriority(cudaStream_t stream, int *out) { return *out = fk_stream_of(stream)->priority, 0; }
E cudaStreamGetFlags(cudaStream_t stream, unsigned *out) { return *out = fk_stream_of(stream)->flags, 0; }
E cudaStreamGetDevice(cudaStream_t stream, int *out) { return *out = fk_stream_of(stream)->device, 0; }
E cudaStreamGetId(cudaStream_t stream, unsigned long long *out) { return *out = fk_stream_of(stream)->id, 0; }
E cudaStreamSynchronize(cudaStream_t stream) { return result(fk_may_wait("cudaStreamSynchronize")); }
E cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return *event = (cudaEvent_t)fk_new_event(), 0; }
E cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
E cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaEventCreate(event); }
E cudaEventDestroy(cudaEvent_t event) { return free(event), 0; }
E cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    fk_record((fk_event *)event, fk_stream_of(stream));
    if (flags & cudaEventRecordExternal) ((fk_event *)event)->capture = 0;  // a node of the graph, not a fork of it
    return 0;
}
E cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
E cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (!(flags & cudaEventWaitExternal)) fk_wait(fk_stream_of(stream), (fk_event *)event);
    return 0;
}
E cudaEventSynchronize(cudaEvent_t event) { return result(fk_may_wait("cudaEventSynchronize")); }
E cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    return *ms = 1e-3f + 1e3f * (float)(((fk_event *)to)->seconds - ((fk_event *)from)->seconds), 0;
}
E cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void *), void *argument) { return function(argument), 0; }

// ---- graphs ----

E cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return fk_begin_capture(fk_stream_of(stream)), 0;
}
E cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
    unsigned long long capture = fk_stream_of(stream)->capture;
    if (!capture) return result(cudaErrorIllegalState);
    fk_end_capture(capture);
    fk_count("api", "captured graph");
    return *out = (cudaGraph_t)capture, 0;
}
E cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
    int capturing = fk_stream_of(stream)->capture != 0;
    return *out = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, 0;
}
E cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                           cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                           size_t *number) {
    unsigned long long capture = fk_stream_of(stream)->capture;
    if (id) *id = capture;
    if (graph) *graph = (cudaGraph_t)capture;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (number) *number = 0;
    return cudaStreamIsCapturing(stream, status);
}
E cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    return *out = (cudaGraphExec_t)graph, 0;
}
E cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(out, graph, flags);
}
E cudaGraphInstantiateWithParams(cudaGraphExec_t *out, cudaGraph_t graph, void *how) {
    return cudaGraphInstantiate(out, graph, 0);
}
E cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return fk_count("api", "cudaGraphLaunch"), 0; }
E cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) { return *number = 0, 0; }

// ---- kernels: a compiled file registers the names of its kernels by the addresses of their host functions ----

#define NAMES (1u << 21)
static struct { const void *host; const char *name; } *names;
static size_t place_of(const void *host) {
    size_t place = (uintptr_t)host * 0x9e3779b97f4a7c15ull >> 43;
    if (!names) names = calloc(NAMES, sizeof *names);
    while (names[place].host && names[place].host != host) place = (place + 1) % NAMES;
    return place;
}
static const char *name_of(const void *host) {
    const char *name = names[place_of(host)].name;
    return name ? name : "unregistered";
}
void **__cudaRegisterFatBinary(void *code) {
    static void *handle[4];
    return handle;
}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b,
                            void *c, void *d, int *size) {
    size_t place = place_of(host);
    names[place].host = host;
    names[place].name = name;
}
static __thread struct { dim3 grid, block; size_t bytes; cudaStream_t stream; } calls[16];
static __thread unsigned depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t stream) {
    calls[depth % 16].grid = grid;
    calls[depth % 16].block = block;
    calls[depth % 16].bytes = bytes;
    calls[depth++ % 16].stream = stream;
    return 0;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, cudaStream_t *stream) {
    depth--;
    *grid = calls[depth % 16].grid;
    *block = calls[depth % 16].block;
    *bytes = calls[depth % 16].bytes;
    *stream = calls[depth % 16].stream;
    return 0;
}
E cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t bytes, cudaStream_t stream) {
    unsigned blocks[] = {grid.x, grid.y, grid.z}, threads[] = {block.x, block.y, block.z};
    return result(fk_launch(name_of(host), blocks, threads, bytes) ? cudaErrorInvalidConfiguration : 0);
}
E cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t bytes,
                              cudaStream_t stream) {
    return cudaLaunchKernel(host, grid, block, arguments, bytes, stream);
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *host, void **arguments) {
    return cudaLaunchKernel(host, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
}
E __cudaLaunchKernel(void *host, dim3 grid, dim3 block, void **arguments, size_t bytes, cudaStream_t stream) {
    return cudaLaunchKernel(host, grid, block, arguments, bytes, stream);
}
E __cudaGetKernel(void **kernel, const void *host) { return *kernel = (void *)host, 0; }
E cudaGetKernel(void **kernel, const void *host) { return *kernel = (void *)host, 0; }
E cudaGetFuncBySymbol(void **kernel, const void *host) { return *kernel = (void *)host, 0; }
E cudaFuncGetName(const char **name, const void *host) { return *name = name_of(host), 0; }
E cudaLibraryLoadData(void **out, const void *code, void *a, void **b, unsigned n, void *c, void **d, unsigned m) {
    return *out = malloc(1), 0;
}
E cudaLibraryGetKernel(void **out, void *library, const char *name) {
    return *out = malloc(1), __cudaRegisterFunction(NULL, *out, NULL, strdup(name), 0, NULL, NULL, NULL, NULL, NULL), 0;
}
E cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *host) {
    *out = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 64, .ptxVersion = 90, .binaryVersion = 90,
        .maxDynamicSharedSizeBytes = 49152,
    };
    return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t bytes) {
    return *blocks = threads > 1024 ? 1 : threads < 256 ? 8 : 2048 / threads, 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads, size_t bytes,
                                                         unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host, threads, bytes);
}
E cudaOccupancyAvailableDynamicSMemPerBlock(size_t *out, const void *h, int blocks, int n) { return *out = 49152, 0; }
E cudaOccupancyMaxPotentialClusterSize(int *out, const void *host, const void *how) { return *out = 8, 0; }
E cudaOccupancyMaxActiveClusters(int *out, const void *host, const void *how) { return *out = 16, 0; }

// ---- functions of the driver, by name ----

E cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                          enum cudaDriverEntryPointQueryResult *found) {
    int (*find)(const char *, void **, int, unsigned long long, int *) =
        dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), "cuGetProcAddress_v2");
    int missing = find(name, function, 13000, flags, NULL);
    if (found) *found = missing ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return 0;
}
E cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPoint(name, function, flags, found);
}
