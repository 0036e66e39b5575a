/* Copyright: the Relight authors
 * SPDX-License-Identifier: Apache-2.0
 *
 * A double of NVIDIA's management library for tests: the same functions and structures, driven by the text file that
 * NVML_DOUBLE names. It is read anew at every call. Holders are real processes: one that is dead holds nothing.
 *
 *   gpu <total MiB> <reserved MiB>            begins a GPU
 *   hold <compute|graphics|mps> <pid> <MiB>   of the last GPU, while the process lives; -1 MiB: not available
 *   ghost <compute|graphics|mps> <pid> <MiB>  the same, whether such a process is seen here or not
 *   leak <MiB>                                of the last GPU, held by nobody
 *   lost                                      the last GPU does not answer
 *   fail-init <code> | hang <seconds>         of the whole library
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_GPUS 16
#define MAX_HOLDS 256
#define MIB (1ULL << 20)

enum { OK = 0, INVALID = 2, INSUFFICIENT_SIZE = 7, UNKNOWN = 999, LOST = 15 };

struct hold { char kind[16]; unsigned pid; long long mib; };
struct gpu { unsigned long long total, reserved, leak; int lost, count; struct hold holds[MAX_HOLDS]; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct memory_v1 { unsigned long long total, free, used; };

static struct gpu gpus[MAX_GPUS];
static int gpu_count, fail_init;

static int alive(unsigned pid) {
    char path[64], state = 'X';
    if (kill((pid_t)pid, 0) != 0 && errno != EPERM) return 0;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *stat = fopen(path, "r");
    if (!stat) return 0;
    if (fscanf(stat, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
    fclose(stat);
    return state != 'Z' && state != 'X';
}

static int load(void) {
    const char *name = getenv("NVML_DOUBLE");
    FILE *file = name ? fopen(name, "r") : NULL;
    char line[256], kind[16];
    gpu_count = fail_init = 0;
    memset(gpus, 0, sizeof gpus);
    if (!file) return UNKNOWN;
    while (fgets(line, sizeof line, file)) {
        struct gpu *last = gpu_count ? &gpus[gpu_count - 1] : NULL;
        unsigned long long total, reserved;
        unsigned pid, seconds;
        long long mib;
        if (sscanf(line, "gpu %llu %llu", &total, &reserved) == 2 && gpu_count < MAX_GPUS) {
            gpus[gpu_count].total = total;
            gpus[gpu_count++].reserved = reserved;
        } else if (last && sscanf(line, "hold %15s %u %lld", kind, &pid, &mib) == 3) {
            if (!alive(pid)) continue;
            struct hold *hold = &last->holds[last->count++];
            strcpy(hold->kind, kind), hold->pid = pid, hold->mib = mib;
        } else if (last && sscanf(line, "ghost %15s %u %lld", kind, &pid, &mib) == 3) {
            struct hold *hold = &last->holds[last->count++];
            strcpy(hold->kind, kind), hold->pid = pid, hold->mib = mib;
        } else if (last && sscanf(line, "leak %llu", &total) == 1) {
            last->leak = total;
        } else if (last && strncmp(line, "lost", 4) == 0) {
            last->lost = 1;
        } else if (sscanf(line, "hang %u", &seconds) == 1) {
            sleep(seconds);
        } else {
            sscanf(line, "fail-init %d", &fail_init);
        }
    }
    fclose(file);
    return OK;
}

static struct gpu *of(void *handle) { return &gpus[(size_t)handle - 1]; }

static unsigned long long used(const struct gpu *gpu) {
    unsigned long long sum = gpu->leak;
    for (int i = 0; i < gpu->count; i++) sum += gpu->holds[i].mib > 0 ? (unsigned long long)gpu->holds[i].mib : 0;
    return sum * MIB;
}

int nvmlInit_v2(void) { int code = load(); return code ? code : fail_init; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)gpu_count; return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case 9: return "Driver Not Loaded";
    case 4: return "Insufficient Permissions";
    case LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= (unsigned)gpu_count) return INVALID;
    if (gpus[index].lost) return LOST;
    *handle = (void *)(size_t)(index + 1);
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *name, unsigned length) {
    snprintf(name, length, "GPU-double-%zu", (size_t)handle - 1);
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *memory) {
    struct gpu *gpu = of(handle);
    memory->total = gpu->total * MIB;
    memory->used = used(gpu) + gpu->reserved * MIB; /* the first version's fault: the reserve counts as used */
    memory->free = memory->total - memory->used;
    return OK;
}

#ifndef NVML_OLD
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    struct gpu *gpu = of(handle);
    if (memory->version != (sizeof *memory | 2 << 24)) return INVALID;
    memory->total = gpu->total * MIB;
    memory->reserved = gpu->reserved * MIB;
    memory->used = used(gpu);
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
#endif

static int list(void *handle, const char *kind, unsigned *count, struct process *out) {
    struct gpu *gpu = of(handle);
    unsigned room = *count, found = 0;
    for (int i = 0; i < gpu->count; i++) {
        struct hold *hold = &gpu->holds[i];
        if (strcmp(hold->kind, kind)) continue;
        if (found < room) {
            struct process one = {hold->pid, hold->mib < 0 ? ~0ULL : (unsigned long long)hold->mib * MIB, ~0u, ~0u};
            out[found] = one;
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, struct process *out) { return list(h, "compute", n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, struct process *out) { return list(h, "graphics", n, out); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *n, struct process *out) { return list(h, "mps", n, out); }
