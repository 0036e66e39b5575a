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
 *   pci <address> | minor <n> | persistence <0|1> | ecc <0|1> | pcie <generation> <width>   of the last GPU
 *   nvlink <address>                          one more NVLink of the last GPU, to that address
 *   near <GPU> <GPU> <level>                  their nearest common ancestor, by NVML's number (default 50, SYS)
 *   driver <version> | cuda <number>          of the whole library
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
#define MAX_LINKS 18
#define MIB (1ULL << 20)

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, UNKNOWN = 999, LOST = 15 };

struct hold { char kind[16]; unsigned pid; long long mib; };
struct gpu {
    unsigned long long total, reserved, leak;
    int lost, count;
    struct hold holds[MAX_HOLDS];
    char pci[32], links[MAX_LINKS][32];
    int link_count, minor, persistence, ecc, generation, width;
};
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct memory_v1 { unsigned long long total, free, used; };

static struct gpu gpus[MAX_GPUS];
static int gpu_count, fail_init, cuda, near[MAX_GPUS][MAX_GPUS];
static char driver[64];

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
    memset(near, 0, sizeof near);
    strcpy(driver, "570.124.06"), cuda = 12080;
    if (!file) return UNKNOWN;
    while (fgets(line, sizeof line, file)) {
        struct gpu *last = gpu_count ? &gpus[gpu_count - 1] : NULL;
        unsigned long long total, reserved;
        unsigned pid, seconds, one, other;
        int level;
        long long mib;
        if (sscanf(line, "gpu %llu %llu", &total, &reserved) == 2 && gpu_count < MAX_GPUS) {
            struct gpu *now = &gpus[gpu_count];
            now->total = total, now->reserved = reserved;
            now->minor = gpu_count, now->persistence = now->ecc = 1, now->generation = 5, now->width = 16;
            snprintf(now->pci, sizeof now->pci, "00000000:%02X:00.0", 16 + gpu_count++);
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
        } else if (last && (sscanf(line, "pcie %d %d", &last->generation, &last->width) == 2 || sscanf(line, "minor %d", &last->minor) == 1 ||
                            sscanf(line, "persistence %d", &last->persistence) == 1 || sscanf(line, "ecc %d", &last->ecc) == 1 ||
                            sscanf(line, "pci %31s", last->pci) == 1)) {
            continue;
        } else if (last && last->link_count < MAX_LINKS && sscanf(line, "nvlink %31s", last->links[last->link_count]) == 1) {
            last->link_count++;
        } else if (sscanf(line, "near %u %u %d", &one, &other, &level) == 3 && one < MAX_GPUS && other < MAX_GPUS) {
            near[one][other] = near[other][one] = level + 1;
        } else if (sscanf(line, "driver %63s", driver) == 1 || sscanf(line, "cuda %d", &cuda) == 1) {
            continue;
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
    case 18: return "Driver/library version mismatch";
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

int nvmlSystemGetDriverVersion(char *version, unsigned length) { snprintf(version, length, "%s", driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = cuda; return OK; }
int nvmlDeviceGetName(void *handle, char *name, unsigned length) { (void)handle; snprintf(name, length, "Double H200"); return OK; }
int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) { *minor = (unsigned)of(handle)->minor; return OK; }
int nvmlDeviceGetPersistenceMode(void *handle, int *mode) { *mode = of(handle)->persistence; return OK; }
int nvmlDeviceGetEccMode(void *handle, int *now, int *pending) { *now = *pending = of(handle)->ecc; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, int *generation) { *generation = of(handle)->generation; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(void *handle, int *width) { *width = of(handle)->width; return OK; }

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    strcpy(pci->address, of(handle)->pci);
    return OK;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *active) {
    *active = (int)link < of(handle)->link_count;
    return of(handle)->link_count ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    strcpy(pci->address, of(handle)->links[link]);
    return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level) {
    int known = near[(size_t)one - 1][(size_t)other - 1];
    *level = known ? known - 1 : 50;
    return OK;
}

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
