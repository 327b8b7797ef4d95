/* A libcuda.so.1 whose device is the host: streams are queues that any call drives on, a wait really holds its stream, and the
 * copies of a batch run from the last to the first. It knows what CudaDriver calls, and fails on everything else. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600 };
enum { WAIT, COPY, EVENT, KERNEL, GRAPH };
typedef uint64_t u64;
typedef struct operation {
  int kind;
  size_t count;
  u64 *targets, *sources, *lengths; /* of a wait: addresses, values */
  struct operation *next;
} operation;
typedef struct { operation *first, *last, *captured; int capturing; } stream;
typedef struct { int32_t order, source_kind, source_id, target_kind, target_id; uint32_t flags; } attributes;
typedef union { struct { int32_t kind; u64 address; u64 value; uint32_t flags; u64 alias; } wait; u64 pad[6]; } memory_op;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static stream streams[64];
static int created, context_here;
static __thread void *current;

static int version(void) { const char *said = getenv("STUB_CUDA_VERSION"); return said ? atoi(said) : 13000; }

static int run(operation *next) {
  for (size_t at = next->count; at-- > 0;) {
    if (next->kind == WAIT && (int32_t)(*(volatile uint32_t *)next->targets[at] - (uint32_t)next->sources[at]) < 0) return 0;
    if (next->kind == COPY) memcpy((void *)next->targets[at], (void *)next->sources[at], next->lengths[at]);
    if (next->kind == EVENT) --*(int *)next->targets[at];
  }
  return 1;
}

static void drive(void) {
  for (int moved = 1; moved;) {
    moved = 0;
    for (int at = 0; at < created; ++at)
      while (streams[at].first && run(streams[at].first)) { streams[at].first = streams[at].first->next; moved = 1; }
  }
}

static u64 *copied(const u64 *from, size_t count) {
  return from ? memcpy(malloc(count * sizeof(u64)), from, count * sizeof(u64)) : NULL;
}

static int put(void *handle, int kind, size_t count, const u64 *targets, const u64 *sources, const u64 *lengths) {
  size_t number = (size_t)handle - 1;
  if (current != &context_here) return INVALID_CONTEXT;
  if (number >= (size_t)created) return INVALID_HANDLE;
  operation *last = malloc(sizeof *last);
  *last = (operation){kind, count, copied(targets, count), copied(sources, count), copied(lengths, count), NULL};
  if (streams[number].capturing) {
    last->next = streams[number].captured;
    streams[number].captured = last;
    return OK;
  }
  pthread_mutex_lock(&mutex);
  if (streams[number].first) streams[number].last->next = last; else streams[number].first = last;
  streams[number].last = last;
  drive();
  pthread_mutex_unlock(&mutex);
  return OK;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
int cuDriverGetVersion(int *value) { *value = version(); return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &context_here; return device ? INVALID_VALUE : OK; }
int cuCtxSetCurrent(void *context) { current = context; return OK; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
int cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
  if (flags != 1 || (priority != 0 && priority != -5)) return INVALID_VALUE;
  pthread_mutex_lock(&mutex);
  *handle = (void *)(size_t)++created;
  pthread_mutex_unlock(&mutex);
  return OK;
}
int cuStreamBeginCapture_v2(stream *handle, int mode) {
  streams[(size_t)handle - 1].capturing = 1;
  streams[(size_t)handle - 1].captured = NULL;
  return mode == 2 ? OK : INVALID_VALUE; /* relaxed */
}
int cuStreamEndCapture(stream *handle, operation **graph) {
  stream *captured = &streams[(size_t)handle - 1];
  *graph = malloc(sizeof **graph);
  **graph = (operation){GRAPH, 0, NULL, NULL, NULL, captured->captured};
  captured->capturing = 0;
  return OK;
}
int cuGraphGetNodes(operation *graph, operation **nodes, size_t *count) {
  size_t found = 0;
  for (operation *node = graph->next; node; node = node->next, ++found)
    if (nodes && found < *count) nodes[found] = node;
  *count = found;
  return OK;
}
int cuGraphNodeGetType(operation *node, int *type) { *type = node->kind == KERNEL ? 0 : node->kind == COPY ? 1 : 12; return OK; }
int cuGraphDestroy(operation *graph) { return graph->kind == GRAPH ? OK : INVALID_VALUE; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned u, unsigned v, unsigned w, unsigned memory,
                   void *handle, void **arguments, void **extra) {
  (void)function, (void)x, (void)y, (void)z, (void)u, (void)v, (void)w, (void)memory, (void)arguments, (void)extra;
  return put(handle, KERNEL, 0, NULL, NULL, NULL);
}
int cuStreamDestroy_v2(void *handle) { return (size_t)handle - 1 < (size_t)created ? OK : INVALID_HANDLE; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = calloc(1, sizeof(int)); return OK; }
int cuEventRecord(void *event, void *handle) {
  u64 address = (u64)event;
  __atomic_add_fetch((int *)event, 1, __ATOMIC_SEQ_CST);
  return put(handle, EVENT, 1, &address, NULL, NULL);
}
int cuEventQuery(void *event) {
  pthread_mutex_lock(&mutex);
  drive();
  int left = *(int *)event;
  pthread_mutex_unlock(&mutex);
  return left ? NOT_READY : OK;
}
int cuMemcpyAsync(u64 target, u64 source, size_t length, void *handle) { return put(handle, COPY, 1, &target, &source, &length); }
int cuMemcpyBatchAsync_v2(u64 *targets, u64 *sources, size_t *lengths, size_t count, attributes *how, size_t *from, size_t kinds,
                          void *handle) {
  if (kinds != 1 || from[0] != 0 || how->order != 1 || how->flags != 1) return INVALID_VALUE;
  return put(handle, COPY, count, targets, sources, lengths);
}
int cuMemcpyBatchAsync(u64 *targets, u64 *sources, size_t *lengths, size_t count, attributes *how, size_t *from, size_t kinds,
                       size_t *failed, void *handle) {
  if (failed) *failed = SIZE_MAX;
  return cuMemcpyBatchAsync_v2(targets, sources, lengths, count, how, from, kinds, handle);
}
int cuStreamBatchMemOp_v2(void *handle, unsigned count, memory_op *waits, unsigned flags) {
  u64 addresses[256], values[256];
  if (flags || count >= 256) return INVALID_VALUE;
  for (unsigned at = 0; at < count; ++at) {
    if (waits[at].wait.kind != 1 || waits[at].wait.flags != 0) return INVALID_VALUE; /* 32 bits, greater or equal */
    addresses[at] = waits[at].wait.address;
    values[at] = waits[at].wait.value;
  }
  return put(handle, WAIT, count, addresses, values, NULL);
}
int cuGetErrorName(int error, const char **name) { (void)error; *name = "stub"; return OK; }

static int unknown(void) { return NOT_FOUND; }

int cuGetProcAddress_v2(const char *name, void **function, int wanted, u64 flags, int *status) {
  char newer[200];
  void *self;
  Dl_info here;
  dladdr((void *)cuGetProcAddress_v2, &here);
  self = dlopen(here.dli_fname, RTLD_NOW);
  snprintf(newer, sizeof newer, "%s_v2", name);
  *function = dlsym(self, newer); /* a second version replaces the first, but for this one, which needs CUDA 13 */
  if (!*function || (!strcmp(name, "cuMemcpyBatchAsync") && wanted < 13000)) *function = dlsym(self, name);
  if (!*function) *function = (void *)unknown;
  if (wanted > version()) *function = NULL;
  (void)flags;
  if (status) *status = 0;
  return OK;
}
int cuGetProcAddress(const char *name, void **function, int wanted, u64 flags) {
  return cuGetProcAddress_v2(name, function, wanted, flags, NULL);
}
