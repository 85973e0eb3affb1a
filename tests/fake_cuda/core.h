// What the stand-ins share: devices, memory, counters, streams. A "device" is a number; its memory is address space.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { OUT_OF_MEMORY = 2, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_FOUND = 500, IN_CAPTURE = 900 };
enum { ON_DEVICE, ON_HOST, RESERVED, OF_OTHER_PROCESS, UNKNOWN, REGISTERED };

typedef struct fk_stream {
    int id, device, priority;
    unsigned flags;
    unsigned long long capture;  // number of the graph that is being captured, 0 for none
    struct fk_stream *next;
} fk_stream;

typedef struct { double seconds; unsigned long long capture; } fk_event;

typedef struct { uintptr_t base; size_t size; int device, kind; unsigned number; size_t offset; } fk_range;

int *fk_device(void);  // the current one of this thread
int fk_num_devices(void);
void fk_memory_info(int device, size_t *free_bytes, size_t *total_bytes);
int fk_charge(int device, long long bytes);  // 0, or OUT_OF_MEMORY

void *fk_allocate(size_t bytes, int device);  // NULL: out of memory
int fk_free(void *pointer);
void fk_track(void *pointer, size_t bytes, int device, int kind);
int fk_untrack(const void *pointer, int kind);  // and unmap it, unless it is REGISTERED
fk_range fk_find(const void *pointer);  // of kind UNKNOWN where there is none
int fk_kind(const void *pointer);
int fk_attribute(int attribute);  // of a device
void *fk_pinned(size_t bytes);
size_t fk_new_pages(size_t bytes);  // offset in this process's memory of devices
int fk_map_pages(void *address, size_t bytes, size_t offset);
void fk_drop_pages(size_t offset, size_t bytes);
int fk_make_handle(const void *pointer, char handle[64]);
void *fk_open_handle(const char handle[64], int device);  // NULL: the memory is gone, or this process has it already
void fk_copy(void *to, const void *from, size_t bytes);  // large copies are left out
void fk_fill(void *to, int value, size_t bytes);

void fk_count(const char *kind, const char *name);
void fk_violation(const char *what);
int fk_launch(const char *name, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes);
int fk_default(const char *function);  // what a function that is not written here does: it is counted and returns 0

fk_stream *fk_new_stream(int priority, unsigned flags);
void fk_delete_stream(fk_stream *stream);
fk_stream *fk_stream_of(void *handle);  // the default streams have the handles 0, 1 and 2
int fk_may_wait(const char *what);      // 0, or IN_CAPTURE and a violation
void fk_begin_capture(fk_stream *stream);
void fk_end_capture(unsigned long long capture);
fk_event *fk_new_event(void);
void fk_record(fk_event *event, fk_stream *stream);
void fk_wait(fk_stream *stream, const fk_event *event);
