/* A stand-in for NVIDIA's management library: NVML's own entry points over a state file that others may change.
 *
 * The GPUs, their memory and their processes are in the file that the environment variable GPUHERD_STANDIN names;
 * gpuherd/standin/layout.py documents its fields and machine.py writes it. This file only answers questions about it.
 * Entry points, structures and codes are those of NVML's public interface, as its Python binding (nvidia-ml-py) calls
 * them. What is not here is answered by the binding itself, as for an old driver: "function not found".
 *
 * Knows: the layout of the state file, /proc. Doesn't know: how a machine is made, what gpuherd is.
 *
 * Consistency: a writer changes the file under an exclusive flock, and each call here reads it under a shared one, so
 * no call sees half a change. The lock of a writer that dies is dropped by the kernel; the flag that makes a process
 * entry count is written last, so that half an entry never counts. A lock was preferred to a sequence counter because
 * it can't be left odd by a dead writer, and costs half a microsecond.
 */

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define SAME_AS(name) __attribute__((visibility("default"), alias(#name)))

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18 };

/* ---- the state file; gpuherd/standin/layout.py mirrors it field by field ---- */

enum { LAYOUT_VERSION = 1, MAX_GPUS = 32, MAX_DEVICES = 128, MAX_PROCESSES = 512, MAX_LINKS = 18,
       MAX_MIG_INSTANCES = 7 };
#define FOLLOWS_USE 0xFFFFFFFFu /* a figure that nobody has set: low when the GPU is idle, high when it is used */

struct device {
    char uuid[64];
    char name[64];
    char serial[32];
    uint64_t total;       /* bytes */
    uint64_t ghost;       /* bytes in use that no listed process owns */
    uint32_t parent;      /* 1 + the GPU that this MIG instance is cut from; 0: a whole GPU */
    uint32_t position;    /* number of the MIG instance on its GPU */
    uint32_t pci_bus;
    uint32_t numa_node;
    uint32_t lost;        /* 1: fallen off the bus */
    uint32_t mig_mode;    /* 1: split into instances */
    uint32_t utilisation; /* percent, or FOLLOWS_USE */
    uint32_t temperature; /* degrees Celsius, or FOLLOWS_USE */
    uint32_t power;       /* milliwatts, or FOLLOWS_USE */
    uint32_t power_limit; /* milliwatts */
    uint32_t capability_major;
    uint32_t capability_minor;
    uint32_t multiprocessors;
    uint32_t compute_mode;
};

struct process {
    uint32_t counts;   /* 1: this entry is in use; written last */
    uint32_t device;
    uint32_t pid;
    uint32_t phantom;  /* 1: no such process need exist */
    uint32_t graphics; /* 1: a display process */
    uint32_t reserved;
    uint64_t start;    /* start of the process in clock ticks since boot: a pid that is used again is another one */
    uint64_t bytes;
    int64_t until;     /* CLOCK_MONOTONIC nanoseconds; 0: for good */
};

struct state {
    char magic[16];
    uint32_t version;
    uint32_t size;
    uint8_t seed[16];
    uint64_t creator_start;
    uint32_t creator_pid;
    uint32_t gpus;        /* whole GPUs: the first entries of devices */
    uint32_t attribute;   /* 1: tagged jobs show with their own memory */
    uint32_t hide_pids;   /* 1: as in a container: memory is in use, but nobody is listed */
    uint32_t hide_memory; /* 1: processes are listed without their memory */
    uint32_t fail_code;   /* the code that every call answers, if not 0 */
    uint32_t fail_calls;  /* how many calls more; 0: until it is changed */
    uint32_t latency;     /* microseconds that every call takes */
    uint32_t cuda_version;
    uint32_t devices;     /* whole GPUs and MIG instances */
    uint64_t calls;       /* calls answered so far */
    char driver_version[80];
    uint8_t nvlinks[MAX_GPUS][MAX_GPUS];
    uint8_t proximity[MAX_GPUS][MAX_GPUS];
    struct device device[MAX_DEVICES];
    struct process process[MAX_PROCESSES];
};

typedef char device_has_no_padding[sizeof(struct device) == 232 ? 1 : -1];
typedef char process_has_no_padding[sizeof(struct process) == 48 ? 1 : -1];
typedef char state_has_no_padding[sizeof(struct state) == 2224 + 128 * 232 + 512 * 48 ? 1 : -1];

/* What this build believes the layout to be: version, sizes and some offsets, for a test to compare. */
API void gpuherd_standin_layout(uint32_t out[8])
{
    out[0] = LAYOUT_VERSION;
    out[1] = sizeof(struct state);
    out[2] = sizeof(struct device);
    out[3] = sizeof(struct process);
    out[4] = offsetof(struct state, calls);
    out[5] = offsetof(struct state, nvlinks);
    out[6] = offsetof(struct state, device);
    out[7] = offsetof(struct state, process);
}

/* ---- opening, and the lock around each call ---- */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards all statics; the flock guards the file */
static struct state *state;                               /* NULL: not initialised */
static char state_path[4096];
static int state_fd = -1;
static unsigned initialisations;                          /* less shutdowns: several users in one process */

typedef struct standin_handle *nvmlDevice_t; /* 1 + number of the device, so that it outlives a re-initialisation */

static void close_state(void)
{
    if (state) munmap(state, sizeof *state);
    if (state_fd >= 0) close(state_fd);
    state = NULL;
    state_fd = -1;
    state_path[0] = 0;
    initialisations = 0;
}

static int open_state(const char *path)
{
    struct stat info;
    if (strlen(path) >= sizeof state_path) return DRIVER_NOT_LOADED;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return errno == EACCES ? NO_PERMISSION : DRIVER_NOT_LOADED;
    if (fstat(fd, &info) || info.st_size != (off_t)sizeof *state) {
        close(fd);
        return LIB_RM_VERSION_MISMATCH;
    }
    struct state *map = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        close(fd);
        return DRIVER_NOT_LOADED;
    }
    state = map;
    state_fd = fd;
    strcpy(state_path, path);
    if (memcmp(map->magic, "gpuherd standin", 16) || map->version != LAYOUT_VERSION || map->size != sizeof *map) {
        close_state();
        return LIB_RM_VERSION_MISMATCH;
    }
    return SUCCESS;
}

/* A forked child shares the open file, and with it the flock: it must have its own. */
static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&mutex); }
static void after_fork_in_child(void)
{
    if (state) {
        char path[sizeof state_path];
        unsigned users = initialisations;
        strcpy(path, state_path);
        close_state();
        if (open_state(path) == SUCCESS) initialisations = users;
    }
    pthread_mutex_unlock(&mutex);
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void refresh_attributed(void);

/* The code that this call shall fail with, by order of the state file; counts orders that are for some calls only. */
static int ordered_failure(void)
{
    int code = (int)__atomic_load_n(&state->fail_code, __ATOMIC_RELAXED);
    uint32_t left = __atomic_load_n(&state->fail_calls, __ATOMIC_RELAXED);
    if (code == SUCCESS || left == 0) return code;
    if (__atomic_sub_fetch(&state->fail_calls, 1, __ATOMIC_RELAXED) == 0) state->fail_code = SUCCESS;
    return code;
}

/* Begins a call. On SUCCESS the mutex and a shared lock on the file are held, and leave() must follow. */
static int enter(void)
{
    pthread_mutex_lock(&mutex);
    const char *path = getenv("GPUHERD_STANDIN");
    /* Another machine, or none, since nvmlInit: as if the driver had been unloaded. The caller may initialise again. */
    if (state && (!path || strcmp(path, state_path))) close_state();
    int code = state ? SUCCESS : UNINITIALIZED;
    if (code == SUCCESS) {
        __atomic_add_fetch(&state->calls, 1, __ATOMIC_RELAXED);
        uint32_t latency = state->latency;
        if (latency) {
            struct timespec wait = {latency / 1000000, (long)(latency % 1000000) * 1000};
            nanosleep(&wait, NULL);
        }
        code = ordered_failure();
    }
    if (code != SUCCESS) {
        pthread_mutex_unlock(&mutex);
        return code;
    }
    if (state->attribute) refresh_attributed();
    while (flock(state_fd, LOCK_SH) && errno == EINTR) continue;
    return SUCCESS;
}

static int leave(int code)
{
    flock(state_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    return code;
}

static uint32_t number_of(const struct device *gpu) { return (uint32_t)(gpu - state->device); }
static nvmlDevice_t handle_of(const struct device *gpu) { return (nvmlDevice_t)(uintptr_t)(number_of(gpu) + 1); }
static const struct device *whole(const struct device *gpu) { return gpu->parent ? &state->device[gpu->parent - 1] : gpu; }

enum kind { ANY, WHOLE_GPU, MIG_INSTANCE };

/* Begins a call about one device: enter(), then the device, or the code that says why there is none. */
static int enter_device(nvmlDevice_t handle, enum kind kind, struct device **gpu)
{
    int code = enter();
    if (code != SUCCESS) return code;
    uintptr_t number = (uintptr_t)handle - 1;
    if (number >= state->devices) return leave(INVALID_ARGUMENT);
    *gpu = &state->device[number];
    if (whole(*gpu)->lost) return leave(GPU_IS_LOST);
    if (kind == WHOLE_GPU && (*gpu)->parent) return leave(NOT_SUPPORTED);
    if (kind == MIG_INSTANCE && !(*gpu)->parent) return leave(NOT_SUPPORTED);
    return SUCCESS;
}

/* Opens every function about one device: declares `gpu`, and returns at once when the call can't go on. */
#define FOR_DEVICE(kind) \
    struct device *gpu = NULL; \
    int refused = enter_device(handle, kind, &gpu); \
    if (refused != SUCCESS) return refused

#define OPEN_CALL() \
    int refused = enter(); \
    if (refused != SUCCESS) return refused

static int give_text(char *out, unsigned length, const char *text)
{
    if (!out) return INVALID_ARGUMENT;
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int give(unsigned *out, unsigned value)
{
    if (!out) return INVALID_ARGUMENT;
    *out = value;
    return SUCCESS;
}

/* ---- who uses a device ---- */

struct use {
    uint32_t device, pid, graphics;
    uint64_t bytes;
};

static struct use attributed[MAX_PROCESSES]; /* tagged jobs found in /proc, as of attributed_at */
static unsigned attributed_count;
static int64_t attributed_at;

/* The start time of a process in clock ticks since boot, 0 if it is not there or a zombie (which holds no memory). */
static uint64_t start_of(uint32_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    char *at = strrchr(text, ')'); /* the name may hold spaces and brackets; fields are counted from its end */
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
    for (int field = 2; field < 22; field++) {
        at = strchr(at + 1, ' ');
        if (!at) return 0;
    }
    return strtoull(at + 1, NULL, 10);
}

static int is_alive(const struct process *entry, int64_t time)
{
    if (!entry->counts || (entry->until && time >= entry->until)) return 0;
    return entry->phantom || start_of(entry->pid) == entry->start;
}

/* Writes the uses of a device (of a split GPU: of its instances too) to `out`, at most MAX_PROCESSES. */
static unsigned uses_of(const struct device *gpu, struct use *out)
{
    unsigned count = 0;
    int64_t time = now();
    for (int i = 0; i < MAX_PROCESSES && count < MAX_PROCESSES; i++) {
        const struct process *entry = &state->process[i];
        if (!entry->counts || entry->device >= state->devices) continue;
        const struct device *on = &state->device[entry->device];
        if ((on == gpu || whole(on) == gpu) && is_alive(entry, time))
            out[count++] = (struct use){entry->device, entry->pid, entry->graphics, entry->bytes};
    }
    unsigned entries = count;
    for (unsigned i = 0; i < attributed_count && count < MAX_PROCESSES; i++) {
        if (attributed[i].device >= state->devices) continue;
        const struct device *on = &state->device[attributed[i].device];
        unsigned j = 0;
        while (j < entries && out[j].pid != attributed[i].pid) j++; /* what a job itself has claimed is not told twice */
        if (j == entries && (on == gpu || whole(on) == gpu)) out[count++] = attributed[i];
    }
    return count;
}

static uint64_t used_bytes(const struct device *gpu)
{
    struct use uses[MAX_PROCESSES];
    unsigned count = uses_of(gpu, uses);
    uint64_t sum = gpu->ghost;
    for (unsigned i = 0; i < count; i++) sum += uses[i].bytes;
    return sum < gpu->total ? sum : gpu->total;
}

static int is_used(const struct device *gpu)
{
    struct use uses[MAX_PROCESSES];
    return uses_of(gpu, uses) > 0;
}

/* The value of NAME in a block of NUL-separated NAME=value words, or NULL. */
static const char *word(const char *block, size_t length, const char *name)
{
    size_t name_length = strlen(name);
    for (const char *at = block; at < block + length; at += strlen(at) + 1)
        if (!strncmp(at, name, name_length) && at[name_length] == '=') return at + name_length + 1;
    return NULL;
}

/* Reads a whole small /proc file, NUL-terminated, into `out`; its length, 0 if it can't be read. */
static size_t read_proc(const char *pid, const char *name, char *out, size_t size)
{
    char path[300];
    size_t length = 0;
    ssize_t got;
    snprintf(path, sizeof path, "/proc/%s/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    while (length < size - 1 && (got = read(fd, out + length, size - 1 - length)) > 0) length += (size_t)got;
    close(fd);
    out[length] = 0;
    return length;
}

/* The devices that a CUDA_VISIBLE_DEVICES value names (in PCI order), up to the first name that is none. */
static unsigned visible_devices(const char *value, uint32_t out[MAX_DEVICES])
{
    unsigned count = 0;
    while (*value && count < MAX_DEVICES) {
        size_t length = strcspn(value, ",");
        uint32_t found = MAX_DEVICES;
        if (isdigit((unsigned char)*value)) {
            unsigned long index = strtoul(value, NULL, 10);
            if (index < state->gpus) found = (uint32_t)index;
        } else if (length > 4) {
            for (uint32_t i = 0; i < state->devices && found == MAX_DEVICES; i++)
                if (!strncmp(state->device[i].uuid, value, length)) found = i;
        }
        if (found == MAX_DEVICES) break;
        out[count++] = found;
        value += length + (value[length] == ',');
    }
    return count;
}

/* Adds a process to the attributed ones if it is a tagged job of this machine: its anonymous resident memory (what a
 * CUDA program would have put on the GPU) is shared out equally among its GPUs. */
static void attribute_process(const char *pid)
{
    static char environment[1 << 17]; /* static is safe: the mutex is held */
    char status[4096];
    uint32_t devices[MAX_DEVICES];
    size_t length = read_proc(pid, "environ", environment, sizeof environment);
    const char *path = word(environment, length, "GPUHERD_STANDIN");
    const char *visible = word(environment, length, "CUDA_VISIBLE_DEVICES");
    if (!path || !visible || strcmp(path, state_path) || !word(environment, length, "GPUHERD_ATTEMPT")) return;
    unsigned count = visible_devices(visible, devices);
    if (!count || !read_proc(pid, "status", status, sizeof status)) return;
    const char *line = strstr(status, "\nRssAnon:"); /* a zombie has no such line */
    if (!line) return;
    uint64_t bytes = strtoull(line + 9, NULL, 10) * 1024;
    for (unsigned i = 0; i < count && attributed_count < MAX_PROCESSES; i++)
        attributed[attributed_count++] = (struct use){devices[i], (uint32_t)strtoul(pid, NULL, 10), 0, bytes / count};
}

/* Looks through /proc for tagged jobs, at most ten times a second. */
static void refresh_attributed(void)
{
    int64_t time = now();
    if (attributed_at && time - attributed_at < 100000000) return;
    attributed_at = time;
    attributed_count = 0;
    DIR *proc = opendir("/proc");
    if (!proc) return;
    for (struct dirent *entry; (entry = readdir(proc));)
        if (isdigit((unsigned char)entry->d_name[0])) attribute_process(entry->d_name);
    closedir(proc);
}

/* ---- library and system ---- */

API int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&mutex);
    const char *path = getenv("GPUHERD_STANDIN");
    int code = SUCCESS;
    if (state && (!path || strcmp(path, state_path))) close_state();
    attributed_at = 0;
    attributed_count = 0;
    if (!state) code = path && *path ? open_state(path) : DRIVER_NOT_LOADED;
    if (code == SUCCESS) {
        __atomic_add_fetch(&state->calls, 1, __ATOMIC_RELAXED);
        code = ordered_failure();
        if (code == SUCCESS) initialisations++;
        else if (!initialisations) close_state();
    }
    pthread_mutex_unlock(&mutex);
    return code;
}
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void)
{
    pthread_mutex_lock(&mutex);
    int code = state ? SUCCESS : UNINITIALIZED;
    if (state && --initialisations == 0) close_state();
    pthread_mutex_unlock(&mutex);
    return code;
}

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

static int give_handle(nvmlDevice_t *out, const struct device *gpu)
{
    if (!out) return INVALID_ARGUMENT;
    if (whole(gpu)->lost) return GPU_IS_LOST;
    *out = handle_of(gpu);
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    OPEN_CALL();
    return leave(index < state->gpus ? give_handle(out, &state->device[index]) : INVALID_ARGUMENT);
}
SAME_AS(nvmlDeviceGetHandleByIndex_v2) int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *out);

API int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    OPEN_CALL();
    if (!uuid) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->devices; i++)
        if (!strcmp(uuid, state->device[i].uuid)) return leave(give_handle(out, &state->device[i]));
    return leave(NOT_FOUND);
}

API int nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *out)
{
    OPEN_CALL();
    if (!serial) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->gpus; i++)
        if (!strcmp(serial, state->device[i].serial)) return leave(give_handle(out, &state->device[i]));
    return leave(NOT_FOUND);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *out)
{
    unsigned domain, bus, slot;
    OPEN_CALL();
    if (!bus_id || sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) return leave(INVALID_ARGUMENT);
    for (uint32_t i = 0; i < state->gpus; i++)
        if (domain == 0 && bus == state->device[i].pci_bus && slot == 0)
            return leave(give_handle(out, &state->device[i]));
    return leave(NOT_FOUND);
}
SAME_AS(nvmlDeviceGetHandleByPciBusId_v2) int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *out);

API int nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(ANY);
    return leave(give(out, gpu->parent ? gpu->position : number_of(gpu)));
}

API int nvmlDeviceGetMinorNumber(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, number_of(gpu)));
}

API int nvmlDeviceGetUUID(nvmlDevice_t handle, char *out, unsigned length)
{
    FOR_DEVICE(ANY);
    return leave(give_text(out, length, gpu->uuid));
}

API int nvmlDeviceGetName(nvmlDevice_t handle, char *out, unsigned length)
{
    FOR_DEVICE(ANY);
    return leave(give_text(out, length, gpu->name));
}

API int nvmlDeviceGetSerial(nvmlDevice_t handle, char *out, unsigned length)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give_text(out, length, gpu->serial));
}

API int nvmlDeviceGetBrand(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, 14)); /* NVML_BRAND_NVIDIA */
}

API int nvmlDeviceGetArchitecture(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, 7)); /* NVML_DEVICE_ARCH_AMPERE */
}

API int nvmlDeviceGetVbiosVersion(nvmlDevice_t handle, char *out, unsigned length)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give_text(out, length, "00.00.00.00.00"));
}

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

API int nvmlDeviceGetNumGpuCores(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, gpu->multiprocessors * 64)); /* compute capability 8.0 has 64 a multiprocessor */
}

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
    FOR_DEVICE(WHOLE_GPU);
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

/* ---- figures: what nobody has set follows use ---- */

static unsigned figure(const struct device *gpu, uint32_t set, unsigned idle, unsigned busy)
{
    return set != FOLLOWS_USE ? set : is_used(gpu) ? busy : idle;
}

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

API int nvmlDeviceGetPowerUsage(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, figure(gpu, gpu->power, 55000, 240000)));
}

API int nvmlDeviceGetPowerManagementLimit(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, gpu->power_limit));
}
SAME_AS(nvmlDeviceGetPowerManagementLimit) int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t handle, unsigned *out);
SAME_AS(nvmlDeviceGetPowerManagementLimit)
int nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t handle, unsigned *out);

API int nvmlDeviceGetPerformanceState(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, is_used(gpu) ? 0 : 8));
}
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

API int nvmlDeviceGetComputeMode(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(ANY);
    return leave(give(out, whole(gpu)->compute_mode));
}

API int nvmlDeviceGetPersistenceMode(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, 1));
}

API int nvmlDeviceGetDisplayActive(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, 0));
}
SAME_AS(nvmlDeviceGetDisplayActive) int nvmlDeviceGetDisplayMode(nvmlDevice_t handle, unsigned *out);

API int nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, unsigned type, unsigned counter, unsigned long long *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!out || type > 1 || counter > 1) return leave(INVALID_ARGUMENT);
    *out = 0;
    return leave(SUCCESS);
}

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

API int nvmlDeviceGetNumaNodeId(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, gpu->numa_node));
}

/* The other device of a call about two: NULL if it is no usable whole GPU. */
static const struct device *other_gpu(nvmlDevice_t handle)
{
    uintptr_t number = (uintptr_t)handle - 1;
    return number < state->gpus && !state->device[number].lost ? &state->device[number] : NULL;
}

API int nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t handle, nvmlDevice_t second, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    const struct device *other = other_gpu(second);
    if (!other) return leave(INVALID_ARGUMENT);
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

API int nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(ANY);
    return leave(give(out, gpu->parent != 0));
}

API int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(WHOLE_GPU);
    return leave(give(out, MAX_MIG_INSTANCES));
}

API int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *out)
{
    FOR_DEVICE(WHOLE_GPU);
    if (!gpu->mig_mode) return leave(NOT_SUPPORTED);
    for (uint32_t i = state->gpus; i < state->devices; i++)
        if (state->device[i].parent == number_of(gpu) + 1 && state->device[i].position == index)
            return leave(give_handle(out, &state->device[i]));
    return leave(index < MAX_MIG_INSTANCES ? NOT_FOUND : INVALID_ARGUMENT);
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *out)
{
    FOR_DEVICE(MIG_INSTANCE);
    return leave(give_handle(out, whole(gpu)));
}

API int nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(MIG_INSTANCE);
    return leave(give(out, gpu->position + 1));
}

API int nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned *out)
{
    FOR_DEVICE(MIG_INSTANCE);
    return leave(give(out, 0));
}

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
