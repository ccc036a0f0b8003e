/* A stand-in for NVIDIA's management library: NVML's own entry points over a state file that others may change.
 *
 * The entry points, structures and codes are those of NVML's public interface, as its Python binding (nvidia-ml-py)
 * calls them. What is not here is answered by the binding itself, as for an old driver: "function not found".
 * Knows NVML's interface. The state file and who uses a GPU is state.h's part; how a machine is made, machine.py's.
 */

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, LIBRARY_NOT_FOUND = 12, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18 };
#define MAKER NVIDIA

#include "state.h"

typedef device_handle nvmlDevice_t;

static int give_text(char *out, unsigned length, const char *text)
{
    if (!out) return INVALID_ARGUMENT;
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

/* An entry point that answers one number, or one text, about a device. */
#define FIGURE(name, kind, value) \
    API int name(nvmlDevice_t handle, unsigned *out) \
    { \
        FOR_DEVICE(kind); \
        return leave(give(out, value)); \
    }

#define TEXT(name, kind, value) \
    API int name(nvmlDevice_t handle, char *out, unsigned length) \
    { \
        FOR_DEVICE(kind); \
        return leave(give_text(out, length, value)); \
    }

/* Sets of events, which end with the library's session; the calls about them are further below. */
enum { TIMEOUT = 10, XID_CRITICAL = 8, MAX_SETS = 64 };

struct event_set {
    int used;
    uint8_t registered[MAX_DEVICES];
    uint32_t told[MAX_DEVICES]; /* how many of each device's events have been told */
};

static struct event_set event_sets[MAX_SETS]; /* guarded by the mutex; a set is named by 1 + its number */

typedef struct standin_set *nvmlEventSet_t;

static struct event_set *set_of(nvmlEventSet_t name)
{
    uintptr_t number = (uintptr_t)name - 1;
    return number < MAX_SETS && event_sets[number].used ? &event_sets[number] : NULL;
}

/* ---- library and system ---- */

static void began(void) { memset(event_sets, 0, sizeof event_sets); }

API int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return start("nvmlInit_v2");
}
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) { return stop(__func__); }

API const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 10: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

API int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    OPEN_CALL();
    return leave(give_text(out, length, state->driver_version));
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned length)
{
    char text[100];
    OPEN_CALL();
    snprintf(text, sizeof text, "%u.%s", state->cuda_version / 1000, state->driver_version);
    return leave(give_text(out, length, text));
}

API int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    OPEN_CALL();
    return leave(give((unsigned *)out, state->cuda_version));
}
SAME_AS(nvmlSystemGetCudaDriverVersion_v2) int nvmlSystemGetCudaDriverVersion(int *out);

API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned length)
{
    char name[32], text[256];
    OPEN_CALL();
    snprintf(name, sizeof name, "%u", pid);
    if (!read_proc(name, "cmdline", text, sizeof text)) return leave(NOT_FOUND);
    if (!out || !length) return leave(INVALID_ARGUMENT);
    snprintf(out, length, "%s", text);
    return leave(SUCCESS);
}

/* ---- which devices there are ---- */

API int nvmlDeviceGetCount_v2(unsigned *out)
{
    OPEN_CALL();
    return leave(give(out, state->gpus));
}
SAME_AS(nvmlDeviceGetCount_v2) int nvmlDeviceGetCount(unsigned *out);

static int give_handle(const char *function, nvmlDevice_t *out, const struct device *gpu)
{
    if (!out) return INVALID_ARGUMENT;
    int code = state->fail_device ? ordered_failure(function, number_of(gpu) + 1) : SUCCESS;
    if (code != SUCCESS) return code;
    if (whole(gpu)->lost) return GPU_IS_LOST;
    *out = handle_of(gpu);
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    OPEN_CALL();
    return leave(index < state->gpus ? give_handle(__func__, out, &state->device[index]) : INVALID_ARGUMENT);
}
SAME_AS(nvmlDeviceGetHandleByIndex_v2) int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *out);

API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    OPEN_CALL();
    if (!uuid) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->devices; i++)
        if (!strcmp(uuid, state->device[i].uuid)) return leave(give_handle(__func__, out, &state->device[i]));
    return leave(NOT_FOUND);
}

API int nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *out)
{
    OPEN_CALL();
    if (!serial) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->gpus; i++)
        if (!strcmp(serial, state->device[i].serial)) return leave(give_handle(__func__, out, &state->device[i]));
    return leave(NOT_FOUND);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out)
{
    unsigned domain, bus, slot;
    OPEN_CALL();
    if (!bus_id || sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->gpus; i++)
        if (domain == 0 && bus == state->device[i].pci_bus && slot == 0)
            return leave(give_handle(__func__, out, &state->device[i]));
    return leave(NOT_FOUND);
}
SAME_AS(nvmlDeviceGetHandleByPciBusId_v2) int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *out);

FIGURE(nvmlDeviceGetIndex, ANY, gpu->parent ? gpu->position : number_of(gpu))
FIGURE(nvmlDeviceGetMinorNumber, WHOLE_GPU, number_of(gpu))
TEXT(nvmlDeviceGetUUID, ANY, gpu->uuid)
TEXT(nvmlDeviceGetName, ANY, gpu->name)
TEXT(nvmlDeviceGetSerial, WHOLE_GPU, gpu->serial)
FIGURE(nvmlDeviceGetBrand, WHOLE_GPU, 14) /* NVML_BRAND_NVIDIA */
FIGURE(nvmlDeviceGetArchitecture, WHOLE_GPU, 7) /* NVML_DEVICE_ARCH_AMPERE */
TEXT(nvmlDeviceGetVbiosVersion, WHOLE_GPU, "00.00.00.00.00")

struct pci_info {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

static int give_pci(struct pci_info *out, const struct device *gpu)
{
    if (!out) return INVALID_ARGUMENT;
    *out = (struct pci_info){.bus = gpu->pci_bus, .device_id = 0x20B010DE, .subsystem_id = 0x144E10DE};
    snprintf(out->legacy_bus_id, sizeof out->legacy_bus_id, "0000:%02X:00.0", gpu->pci_bus & 0xFF);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", gpu->pci_bus & 0xFF);
    return SUCCESS;
}

API int nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, struct pci_info *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give_pci(out, gpu));
}
SAME_AS(nvmlDeviceGetPciInfo_v3) int nvmlDeviceGetPciInfo_v2(nvmlDevice_t handle, struct pci_info *out);

API int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t handle, int *major, int *minor)
{
    FOR_DEVICE(ANY);
    if (!major || !minor) return leave(INVALID_ARGUMENT);
    *major = (int)whole(gpu)->capability_major;
    *minor = (int)whole(gpu)->capability_minor;
    return leave(SUCCESS);
}

FIGURE(nvmlDeviceGetNumGpuCores, WHOLE_GPU, gpu->multiprocessors * 64) /* compute capability 8.0 has 64 a multiprocessor */

/* ---- memory and processes ---- */

struct memory {
    uint64_t total, free, used;
};

struct memory_v2 {
    unsigned version;
    uint64_t total, reserved, free, used;
};

API int nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, struct memory *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    uint64_t used = used_bytes(gpu);
    *out = (struct memory){gpu->total, gpu->total - used, used};
    return leave(SUCCESS);
}

API int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, struct memory_v2 *out)
{
    FOR_DEVICE(ANY);
    if (!out || out->version != (sizeof *out | 2u << 24)) return leave(INVALID_ARGUMENT);
    uint64_t used = used_bytes(gpu);
    *out = (struct memory_v2){out->version, gpu->total, 0, gpu->total - used, used};
    return leave(SUCCESS);
}

API int nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t handle, struct memory *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    *out = (struct memory){gpu->total, gpu->total, 0};
    return leave(SUCCESS);
}

struct process_info_v1 {
    unsigned pid;
    uint64_t used;
};

struct process_info { /* versions 2 and 3 */
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
};

/* Lists compute or graphics processes: with too little room tells how many there are, as NVML does. */
static int give_processes(const struct device *gpu, uint32_t graphics, unsigned *count, void *out, int version)
{
    struct use uses[MAX_PROCESSES];
    unsigned found = 0, all = state->hide_pids ? 0 : uses_of(gpu, uses);
    if (!count) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < all; i++)
        if (uses[i].graphics == graphics) uses[found++] = uses[i];
    unsigned room = *count;
    *count = found;
    if (found > room) return INSUFFICIENT_SIZE;
    if (found && !out) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < found; i++) {
        const struct device *on = &state->device[uses[i].device];
        unsigned instance = on->parent ? on->position + 1 : 0xFFFFFFFFu;
        uint64_t bytes = state->hide_memory ? UINT64_MAX : uses[i].bytes;
        if (version == 1)
            ((struct process_info_v1 *)out)[i] = (struct process_info_v1){uses[i].pid, bytes};
        else
            ((struct process_info *)out)[i] =
                (struct process_info){uses[i].pid, bytes, instance, on->parent ? 0 : 0xFFFFFFFFu};
    }
    return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, struct process_info *out)
{
    FOR_DEVICE(ANY);
    return leave(give_processes(gpu, 0, count, out, 3));
}
SAME_AS(nvmlDeviceGetComputeRunningProcesses_v3)
int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, unsigned *count, struct process_info *out);

API int nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t handle, unsigned *count, struct process_info_v1 *out)
{
    FOR_DEVICE(ANY);
    return leave(give_processes(gpu, 0, count, out, 1));
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, struct process_info *out)
{
    FOR_DEVICE(ANY);
    return leave(give_processes(gpu, 1, count, out, 3));
}
SAME_AS(nvmlDeviceGetGraphicsRunningProcesses_v3)
int nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t handle, unsigned *count, struct process_info *out);

API int nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t handle, unsigned *count, struct process_info_v1 *out)
{
    FOR_DEVICE(ANY);
    return leave(give_processes(gpu, 1, count, out, 1));
}

/* ---- figures: those that were not set follow use ---- */

struct utilisation {
    unsigned gpu, memory;
};

API int nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, struct utilisation *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!out) return leave(INVALID_ARGUMENT);
    unsigned percent = figure(gpu, gpu->utilisation, 0, 90);
    *out = (struct utilisation){percent, percent / 2};
    return leave(SUCCESS);
}

API int nvmlDeviceGetTemperature(nvmlDevice_t handle, unsigned sensor, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (sensor != 0) return leave(INVALID_ARGUMENT);
    return leave(give(out, figure(gpu, gpu->temperature, 34, 61)));
}

struct temperature {
    unsigned version, sensor;
    int celsius;
};

API int nvmlDeviceGetTemperatureV(nvmlDevice_t handle, struct temperature *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!out || out->version != (sizeof *out | 1u << 24) || out->sensor != 0) return leave(INVALID_ARGUMENT);
    out->celsius = (int)figure(gpu, gpu->temperature, 34, 61);
    return leave(SUCCESS);
}

API int nvmlDeviceGetTemperatureThreshold(nvmlDevice_t handle, unsigned threshold, unsigned *out)
{
    static const unsigned celsius[] = {92, 89, 95, 85}; /* shutdown, slowdown, memory, GPU */
    FOR_DEVICE(WHOLE_GPU);
    return leave(threshold < 4 ? give(out, celsius[threshold]) : NOT_SUPPORTED);
}

FIGURE(nvmlDeviceGetPowerUsage, WHOLE_GPU, figure(gpu, gpu->power, 55000, 240000))
FIGURE(nvmlDeviceGetPowerManagementLimit, WHOLE_GPU, gpu->power_limit)
SAME_AS(nvmlDeviceGetPowerManagementLimit) int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t handle, unsigned *out);
SAME_AS(nvmlDeviceGetPowerManagementLimit)
int nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t handle, unsigned *out);

FIGURE(nvmlDeviceGetPerformanceState, WHOLE_GPU, is_used(gpu) ? 0 : 8)
SAME_AS(nvmlDeviceGetPerformanceState) int nvmlDeviceGetPowerState(nvmlDevice_t handle, unsigned *out);

static int give_clock(const struct device *gpu, unsigned type, int most, unsigned *out)
{
    static const unsigned idle[] = {210, 210, 405, 585}, busy[] = {1410, 1410, 1593, 1275}; /* graphics SM memory video */
    if (type > 3) return INVALID_ARGUMENT;
    return give(out, most || is_used(gpu) ? busy[type] : idle[type]);
}

API int nvmlDeviceGetClockInfo(nvmlDevice_t handle, unsigned type, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give_clock(gpu, type, 0, out));
}

API int nvmlDeviceGetMaxClockInfo(nvmlDevice_t handle, unsigned type, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give_clock(gpu, type, 1, out));
}

FIGURE(nvmlDeviceGetComputeMode, ANY, whole(gpu)->compute_mode)
FIGURE(nvmlDeviceGetPersistenceMode, WHOLE_GPU, 1)
FIGURE(nvmlDeviceGetDisplayActive, WHOLE_GPU, 0)
SAME_AS(nvmlDeviceGetDisplayActive) int nvmlDeviceGetDisplayMode(nvmlDevice_t handle, unsigned *out);

API int nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, unsigned type, unsigned counter, unsigned long long *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!out || type > 1 || counter > 1) return leave(INVALID_ARGUMENT);
    *out = type == 1 ? gpu->ecc_errors : 0;
    return leave(SUCCESS);
}

/* ---- events: critical Xid errors, and no others ---- */

API int nvmlEventSetCreate(nvmlEventSet_t *out)
{
    OPEN_CALL();
    if (!out) return leave(INVALID_ARGUMENT);
    for (uintptr_t i = 0; i < MAX_SETS; i++) {
        if (event_sets[i].used) continue;
        memset(&event_sets[i], 0, sizeof event_sets[i]);
        event_sets[i].used = 1;
        *out = (nvmlEventSet_t)(i + 1);
        return leave(SUCCESS);
    }
    return leave(INSUFFICIENT_SIZE);
}

API int nvmlEventSetFree(nvmlEventSet_t name)
{
    OPEN_CALL();
    struct event_set *set = set_of(name);
    if (!set) return leave(INVALID_ARGUMENT);
    set->used = 0;
    return leave(SUCCESS);
}

API int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t handle, unsigned long long *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!out) return leave(INVALID_ARGUMENT);
    *out = XID_CRITICAL;
    return leave(SUCCESS);
}

API int nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long types, nvmlEventSet_t name)
{
    FOR_DEVICE(WHOLE_GPU);
    struct event_set *set = set_of(name);
    if (!set || !types) return leave(INVALID_ARGUMENT);
    if (types != XID_CRITICAL) return leave(NOT_SUPPORTED);
    set->registered[number_of(gpu)] = 1;
    set->told[number_of(gpu)] = gpu->xids;
    return leave(SUCCESS);
}

struct event {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

/* Tells one event that has come since; it never waits, for whoever asks here asks with no time to wait. */
API int nvmlEventSetWait_v2(nvmlEventSet_t name, struct event *out, unsigned milliseconds)
{
    (void)milliseconds;
    OPEN_CALL();
    struct event_set *set = set_of(name);
    if (!set || !out) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->gpus; i++) {
        const struct device *gpu = &state->device[i];
        if (!set->registered[i] || set->told[i] == gpu->xids) continue;
        set->told[i] = gpu->xids;
        *out = (struct event){handle_of(gpu), XID_CRITICAL, gpu->xid, 0xFFFFFFFFu, 0xFFFFFFFFu};
        return leave(SUCCESS);
    }
    return leave(TIMEOUT);
}
SAME_AS(nvmlEventSetWait_v2) int nvmlEventSetWait(nvmlEventSet_t name, struct event *out, unsigned milliseconds);

/* ---- where a GPU sits ---- */

API int nvmlDeviceGetMemoryAffinity(nvmlDevice_t handle, unsigned words, unsigned long *out, unsigned scope)
{
    FOR_DEVICE(WHOLE_GPU);
    (void)scope;
    unsigned bits = 8 * sizeof *out;
    if (!out || gpu->numa_node >= words * bits) return leave(INVALID_ARGUMENT);
    memset(out, 0, words * sizeof *out);
    out[gpu->numa_node / bits] = 1ul << gpu->numa_node % bits;
    return leave(SUCCESS);
}

FIGURE(nvmlDeviceGetNumaNodeId, WHOLE_GPU, gpu->numa_node)

/* The other device of a call about two: NULL if it is no whole GPU. */
static const struct device *other_gpu(nvmlDevice_t handle)
{
    uintptr_t number = (uintptr_t)handle - 1;
    return number < state->gpus ? &state->device[number] : NULL;
}

API int nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t handle, nvmlDevice_t second, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *other = other_gpu(second);
    if (!other) return leave(INVALID_ARGUMENT);
    if (other->lost) return leave(GPU_IS_LOST);
    return leave(give(out, other == gpu ? 0 : state->proximity[number_of(gpu)][number_of(other)]));
}

/* A GPU's links are numbered by the peers in order: those to GPU 0 first. The peer of a link, or NULL if it is dark. */
static const struct device *link_peer(const struct device *gpu, unsigned link)
{
    for (uint32_t peer = 0; peer < state->gpus; peer++) {
        unsigned links = state->nvlinks[number_of(gpu)][peer];
        if (link < links) return &state->device[peer];
        link -= links;
    }
    return NULL;
}

/* Begins an answer about one link: its peer, or why there is none. A GPU without any link does not support NVLink. */
static int find_link(const struct device *gpu, unsigned link, const struct device **peer)
{
    if (link >= MAX_LINKS) return INVALID_ARGUMENT;
    if (!link_peer(gpu, 0)) return NOT_SUPPORTED;
    *peer = link_peer(gpu, link);
    return SUCCESS;
}

API int nvmlDeviceGetNvLinkState(nvmlDevice_t handle, unsigned link, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *peer = NULL;
    int code = find_link(gpu, link, &peer);
    return leave(code != SUCCESS ? code : give(out, peer != NULL));
}

API int nvmlDeviceGetNvLinkVersion(nvmlDevice_t handle, unsigned link, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *peer = NULL;
    int code = find_link(gpu, link, &peer);
    return leave(code != SUCCESS ? code : give(out, 3));
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t handle, unsigned link, struct pci_info *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *peer = NULL;
    int code = find_link(gpu, link, &peer);
    if (code != SUCCESS) return leave(code);
    if (peer && peer->lost) return leave(GPU_IS_LOST); /* as its neighbours are answered by real drivers */
    return leave(peer ? give_pci(out, peer) : NOT_SUPPORTED);
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t handle, unsigned link, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *peer = NULL;
    int code = find_link(gpu, link, &peer);
    if (code != SUCCESS) return leave(code);
    return leave(peer ? give(out, 0) : NOT_SUPPORTED); /* NVML_NVLINK_DEVICE_TYPE_GPU */
}

API int nvmlDeviceGetP2PStatus(nvmlDevice_t handle, nvmlDevice_t second, unsigned capability, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *other = other_gpu(second);
    if (!other) return leave(INVALID_ARGUMENT);
    if (other->lost) return leave(GPU_IS_LOST);
    int linked = state->nvlinks[number_of(gpu)][number_of(other)] > 0;
    return leave(give(out, capability == 2 && !linked ? 5 : 0)); /* 2: by NVLink; 5: not supported; 0: yes */
}

/* ---- MIG ---- */

API int nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *current, unsigned *pending)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!current || !pending) return leave(INVALID_ARGUMENT);
    *current = *pending = gpu->mig_mode;
    return leave(SUCCESS);
}

FIGURE(nvmlDeviceIsMigDeviceHandle, ANY, gpu->parent != 0)
FIGURE(nvmlDeviceGetMaxMigDeviceCount, WHOLE_GPU, MAX_MIG_INSTANCES)

API int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!gpu->mig_mode) return leave(NOT_SUPPORTED);
    for (uint32_t i = state->gpus; i < state->devices; i++)
        if (state->device[i].parent == number_of(gpu) + 1 && state->device[i].position == index)
            return leave(give_handle(__func__, out, &state->device[i]));
    return leave(index < MAX_MIG_INSTANCES ? NOT_FOUND : INVALID_ARGUMENT);
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *out)
{
    FOR_DEVICE(MIG_INSTANCE);
    return leave(give_handle(__func__, out, whole(gpu)));
}

FIGURE(nvmlDeviceGetGpuInstanceId, MIG_INSTANCE, gpu->position + 1)
FIGURE(nvmlDeviceGetComputeInstanceId, MIG_INSTANCE, 0)

struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    uint64_t memory_mb;
};

API int nvmlDeviceGetAttributes_v2(nvmlDevice_t handle, struct attributes *out)
{
    FOR_DEVICE(MIG_INSTANCE);
    if (!out) return leave(INVALID_ARGUMENT);
    unsigned slices = (unsigned)((gpu->total * 7 + whole(gpu)->total / 2) / whole(gpu)->total);
    if (slices == 0) slices = 1;
    *out = (struct attributes){gpu->multiprocessors, 1, 0, 0, 0, 0, slices, slices, gpu->total >> 20};
    return leave(SUCCESS);
}
SAME_AS(nvmlDeviceGetAttributes_v2) int nvmlDeviceGetAttributes(nvmlDevice_t handle, struct attributes *out);

/* ---- what there is, but not here: tools take this answer more calmly than a missing entry point ---- */

#define NOT_HERE(name) \
    API int name(nvmlDevice_t handle) \
    { \
        FOR_DEVICE(ANY); \
        return leave(NOT_SUPPORTED); \
    }

NOT_HERE(nvmlDeviceGetConfComputeMemSizeInfo)
NOT_HERE(nvmlDeviceGetDecoderUtilization)
NOT_HERE(nvmlDeviceGetDriverModel)
NOT_HERE(nvmlDeviceGetDriverModel_v2)
NOT_HERE(nvmlDeviceGetEncoderUtilization)
NOT_HERE(nvmlDeviceGetFanSpeed)
NOT_HERE(nvmlDeviceGetFieldValues)
NOT_HERE(nvmlDeviceGetMPSComputeRunningProcesses)
NOT_HERE(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NOT_HERE(nvmlDeviceGetMPSComputeRunningProcesses_v3)
NOT_HERE(nvmlDeviceGetPcieThroughput)
NOT_HERE(nvmlDeviceGetProcessUtilization)
NOT_HERE(nvmlDeviceGetRunningProcessDetailList)
