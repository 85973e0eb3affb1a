#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
#define LOCK pthread_mutex_lock(&mutex)
#define UNLOCK pthread_mutex_unlock(&mutex)
#define MIB ((size_t)1 << 20)
#define PAGE (2 * MIB)

static long long setting(const char *name, long long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoll(value) : otherwise;
}

// ---- devices: what each process has of each is in a file that all processes share ----

typedef struct { int pid, device; long long bytes; } share;
#define SHARES 1024
static share *shares;
static __thread int current;

int *fk_device(void) { return &current; }

int fk_num_devices(void) {
    int number = (int)setting("FAKE_CUDA_DEVICES", 1), visible = 1;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return number;
    if (!*list || *list == '-') return 0;
    for (; *list; list++) visible += *list == ',';
    return visible < number ? visible : number;
}

// The devices of a process that sees only some of them have other numbers than those of the machine.
static int of_machine(int device) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; list && i < device; i++) list = strchr(list, ',') ? strchr(list, ',') + 1 : list;
    return list && *list >= '0' && *list <= '9' ? atoi(list) : device;
}

static void open_shares(void) {
    if (shares) return;
    const char *path = getenv("FAKE_CUDA_TABLE");
    int file = path ? open(path, O_RDWR | O_CREAT, 0600) : memfd_create("shares", 0);
    if (file < 0 || ftruncate(file, sizeof(share) * SHARES)) abort();
    shares = mmap(NULL, sizeof(share) * SHARES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
}

static share *share_of_this_process(int device) {
    share *unused = NULL;
    for (int i = 0; i < SHARES; i++)
        if (shares[i].pid && kill(shares[i].pid, 0) && errno == ESRCH) shares[i].pid = 0;
    for (int i = 0; i < SHARES; i++) {
        if (shares[i].pid == getpid() && shares[i].device == device) return &shares[i];
        if (!unused && !shares[i].pid) unused = &shares[i];
    }
    if (!unused) abort();
    *unused = (share){getpid(), device, setting("FAKE_CUDA_CONTEXT_MIB", 512) * (long long)MIB};
    return unused;
}

void fk_memory_info(int device, size_t *free_bytes, size_t *total_bytes) {
    long long used = 0, total = setting("FAKE_CUDA_MEMORY_MIB", 81079) * (long long)MIB;
    device = of_machine(device);
    LOCK;
    open_shares();
    share_of_this_process(device);
    for (int i = 0; i < SHARES; i++) used += shares[i].pid && shares[i].device == device ? shares[i].bytes : 0;
    UNLOCK;
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
}

int fk_charge(int device, long long bytes) {
    size_t free_bytes, total;
    LOCK;
    fk_memory_info(device, &free_bytes, &total);
    int fits = bytes <= (long long)free_bytes;
    if (fits) share_of_this_process(of_machine(device))->bytes += bytes;
    UNLOCK;
    return fits ? 0 : OUT_OF_MEMORY;
}

int fk_attribute(int attribute) {  // of an H100, by the numbers that driver and runtime share
    static const int values[][2] = {
        {1, 1024},     {2, 1024},     {3, 1024},   {4, 64},     {5, 2147483647}, {6, 65535},  {7, 65535},
        {8, 49152},    {9, 65536},    {10, 32},    {12, 65536}, {13, 1980000},   {14, 512},   {16, 132},
        {19, 1},       {31, 1},       {36, 2619000}, {37, 5120}, {38, 52428800}, {39, 2048},  {40, 3},
        {41, 1},       {75, 9},       {78, 1},     {81, 233472}, {82, 65536},    {83, 1},     {89, 1},
        {90, 1},       {95, 1},       {97, 232448}, {99, 1},    {102, 1},        {103, 1},    {106, 32},
        {111, 1024},   {115, 1},      {120, 1},
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i][0] == attribute) return values[i][1];
    return 0;
}

// ---- memory: one sparse file for each process, in which no place is given out twice ----

#define HANDLES (16 * MIB)  // the file begins with a byte for each allocation: 1 as long as it lives
static int pages = -1;
static char *alive;
static size_t end_of_pages = HANDLES;
static unsigned serial;
static fk_range *ranges;
static size_t num_ranges, room;

static void open_pages(void) {
    if (pages >= 0) return;
    pages = memfd_create("fake_cuda", 0);
    if (pages < 0 || ftruncate(pages, (off_t)1 << 46)) abort();
    alive = mmap(NULL, HANDLES, PROT_READ | PROT_WRITE, MAP_SHARED, pages, 0);
}

size_t fk_new_pages(size_t bytes) {
    LOCK;
    open_pages();
    size_t offset = end_of_pages;
    end_of_pages += (bytes + PAGE - 1) / PAGE * PAGE;
    UNLOCK;
    return offset;
}

int fk_map_pages(void *address, size_t bytes, size_t offset) {
    void *there = mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, pages, offset);
    return there == MAP_FAILED ? INVALID_VALUE : 0;
}

void fk_drop_pages(size_t offset, size_t bytes) {
    fallocate(pages, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

static void add_range(fk_range range) {
    if (num_ranges == room) ranges = realloc(ranges, sizeof(fk_range) * (room = room ? 2 * room : 1024));
    ranges[num_ranges++] = range;
}

static fk_range *find(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    for (size_t i = num_ranges; i-- > 0;)
        if (address >= ranges[i].base && address < ranges[i].base + ranges[i].size) return &ranges[i];
    return NULL;
}

void fk_track(void *pointer, size_t bytes, int device, int kind) {
    LOCK;
    add_range((fk_range){(uintptr_t)pointer, bytes, device, kind, 0, 0});
    UNLOCK;
}

static int take(const void *pointer, int kind, fk_range *taken) {
    LOCK;
    fk_range *range = find(pointer);
    int found = range && range->kind == kind && range->base == (uintptr_t)pointer;
    if (found) {
        *taken = *range;
        *range = ranges[--num_ranges];
    }
    UNLOCK;
    return found;
}

int fk_untrack(const void *pointer, int kind) {
    fk_range range;
    if (!take(pointer, kind, &range)) return INVALID_VALUE;
    if (kind != REGISTERED) munmap((void *)range.base, range.size);
    return 0;
}

fk_range fk_find(const void *pointer) {
    LOCK;
    fk_range *range = find(pointer), found = range ? *range : (fk_range){.kind = UNKNOWN};
    UNLOCK;
    return found;
}

int fk_kind(const void *pointer) { return fk_find(pointer).kind; }

void *fk_allocate(size_t bytes, int device) {
    size_t size = (bytes + PAGE - 1) / PAGE * PAGE;  // the driver hands out whole pages
    if (fk_charge(device, size)) return NULL;
    LOCK;
    size_t offset = fk_new_pages(size);
    void *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, pages, offset);
    if (pointer == MAP_FAILED || ++serial >= HANDLES) abort();
    alive[serial] = 1;
    add_range((fk_range){(uintptr_t)pointer, size, device, ON_DEVICE, serial, offset});
    UNLOCK;
    return pointer;
}

int fk_free(void *pointer) {
    fk_range range;
    if (!pointer) return 0;
    if (!take(pointer, ON_DEVICE, &range)) return INVALID_VALUE;
    alive[range.number] = 0;
    munmap(pointer, range.size);
    fk_drop_pages(range.offset, range.size);
    return fk_charge(range.device, -(long long)range.size);
}

void *fk_pinned(size_t bytes) {
    size_t size = (bytes + 4096) / 4096 * 4096;
    void *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pointer == MAP_FAILED) return NULL;
    fk_track(pointer, size, current, ON_HOST);
    return pointer;
}

int fk_make_handle(const void *pointer, char handle[64]) {
    fk_range range = fk_find(pointer);
    if (range.kind != ON_DEVICE) return INVALID_VALUE;
    memset(handle, 0, 64);
    snprintf(handle, 64, "%d %d %u %zu %zu", getpid(), pages, range.number, range.offset, range.size);
    return 0;
}

void *fk_open_handle(const char handle[64], int device) {
    int pid, file;
    unsigned number;
    size_t offset, size;
    if (sscanf(handle, "%d %d %u %zu %zu", &pid, &file, &number, &offset, &size) != 5 || pid == getpid()) return NULL;
    char path[64], lives = 0;
    snprintf(path, 64, "/proc/%d/fd/%d", pid, file);
    file = open(path, O_RDWR);
    if (file < 0) return NULL;
    void *pointer = MAP_FAILED;
    if (pread(file, &lives, 1, number) == 1 && lives)
        pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, offset);
    close(file);
    if (pointer == MAP_FAILED) return NULL;
    fk_track(pointer, size, device, OF_OTHER_PROCESS);
    return pointer;
}

static int is_copied(size_t bytes) {
    static long long most = -1;
    if (most < 0) most = setting("FAKE_CUDA_COPY_KIB", 1024) * 1024;
    if ((long long)bytes <= most) return bytes > 0;
    fk_count("left out", "copy or fill");
    return 0;
}

void fk_copy(void *to, const void *from, size_t bytes) {
    if (to != from && is_copied(bytes)) memmove(to, from, bytes);
}

void fk_fill(void *to, int value, size_t bytes) {
    if (is_copied(bytes)) memset(to, value, bytes);
}

// ---- counters ----

typedef struct { char *name; unsigned long long count; } counter;
#define COUNTERS 65536
static counter counters[COUNTERS];

void fk_count(const char *kind, const char *name) {
    char text[256];
    snprintf(text, sizeof text, "%s: %s", kind, name);
    unsigned place = 2166136261u;
    for (char *c = text; *c; c++) {
        place = (place ^ (unsigned char)*c) * 16777619u;
        if (*c == '"' || *c == '\\') *c = '\'';
    }
    LOCK;
    for (place %= COUNTERS; counters[place].name && strcmp(counters[place].name, text);) place = (place + 1) % COUNTERS;
    if (!counters[place].name) counters[place].name = strdup(text);
    counters[place].count++;
    UNLOCK;
}

int fk_default(const char *function) {
    fk_count("default", function);
    return 0;
}

void fk_violation(const char *what) {
    fk_count("violation", what);
    if (getenv("FAKE_CUDA_VERBOSE")) fprintf(stderr, "fake CUDA: %s\n", what);
}

int fk_launch(const char *name, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes) {
    size_t threads = (size_t)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || !threads || threads > 1024 ||
        block[2] > 64 || shared_bytes > 232448) {
        char text[256];
        snprintf(text, sizeof text, "%u x %u x %u blocks of %zu threads, %u bytes: %.150s", grid[0], grid[1], grid[2],
                 threads, shared_bytes, name);
        fk_violation(text);
        return INVALID_VALUE;
    }
    fk_count("kernel", name);
    return 0;
}

// For tests, by ctypes. A counter is written as one line: its count, and its kind and name.
void fake_cuda_write(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return;
    LOCK;
    for (int i = 0; i < COUNTERS; i++)
        if (counters[i].count) fprintf(file, "%llu %s\n", counters[i].count, counters[i].name);
    UNLOCK;
    fclose(file);
}

void fake_cuda_reset(void) {
    LOCK;
    for (int i = 0; i < COUNTERS; i++) counters[i].count = 0;
    UNLOCK;
}

__attribute__((destructor)) static void write_at_the_end(void) {
    const char *folder = getenv("FAKE_CUDA_LOG");
    char path[512];
    if (!folder || pages < 0) return;
    snprintf(path, sizeof path, "%s/%d", folder, getpid());
    fake_cuda_write(path);
}

// ---- streams and events: work is done when it is given, so that there is nothing to wait for ----

static fk_stream *streams, defaults[3];
static int stream_ids;
static unsigned long long captures;

fk_stream *fk_new_stream(int priority, unsigned flags) {
    fk_stream *stream = calloc(1, sizeof *stream);
    LOCK;
    *stream = (fk_stream){.id = ++stream_ids, current, priority, flags, 0, streams};
    streams = stream;
    UNLOCK;
    return stream;
}

void fk_delete_stream(fk_stream *stream) {
    LOCK;
    for (fk_stream **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            free(stream);
            break;
        }
    UNLOCK;
}

fk_stream *fk_stream_of(void *handle) { return (uintptr_t)handle <= 2 ? &defaults[(uintptr_t)handle] : handle; }

int fk_may_wait(const char *what) {
    unsigned long long capturing = 0;
    LOCK;
    for (fk_stream *stream = streams; stream; stream = stream->next) capturing |= stream->capture;
    UNLOCK;
    fk_count("wait", what);
    if (!capturing) return 0;
    char text[128];
    snprintf(text, sizeof text, "%s while a graph is captured", what);
    fk_violation(text);
    return IN_CAPTURE;
}

void fk_begin_capture(fk_stream *stream) {
    LOCK;
    stream->capture = ++captures;
    UNLOCK;
}

void fk_end_capture(unsigned long long capture) {
    LOCK;
    for (fk_stream *stream = streams; stream; stream = stream->next)
        if (stream->capture == capture) stream->capture = 0;
    UNLOCK;
}

fk_event *fk_new_event(void) { return calloc(1, sizeof(fk_event)); }

void fk_record(fk_event *event, fk_stream *stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *event = (fk_event){now.tv_sec + now.tv_nsec * 1e-9, stream->capture};
}

void fk_wait(fk_stream *stream, const fk_event *event) {
    if (event->capture && (stream < defaults || stream > defaults + 2)) stream->capture = event->capture;
}
