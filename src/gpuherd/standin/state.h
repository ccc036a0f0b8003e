/* The state file of a simulated machine: its layout, the lock around each call, and who uses a GPU.
 *
 * GPUs, their memory and their processes are in the file that the environment variable GPUHERD_STANDIN names;
 * state.py documents its fields and machine.py writes it. Each library that includes this defines before the codes that
 * it answers, and its maker: SUCCESS, UNINITIALIZED and so on have other numbers in each.
 *
 * Consistency: a writer changes the file under an exclusive flock, and each call reads it under a shared one, so no
 * call sees half a change. The lock of a writer that dies is dropped by the kernel; the flag that makes a process
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

/* ---- the state file; state.py mirrors it field by field ---- */

enum { NVIDIA = 0, AMD = 1 };
enum { LAYOUT_VERSION = 4, MAX_GPUS = 32, MAX_DEVICES = 128, MAX_PROCESSES = 512, MAX_LINKS = 18,
       MAX_MIG_INSTANCES = 7 };
#define SMALLEST_JOB (4u << 20) /* bytes; less has a shell around a job, which would never start CUDA */
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
    uint64_t ecc_errors;  /* uncorrectable ones since the driver was loaded */
    uint32_t xid;         /* the last critical Xid error */
    uint32_t xids;        /* how many there have been */
};

struct process {
    uint32_t counts;   /* 1: this entry is in use; written last */
    uint32_t device;
    uint32_t pid;
    uint32_t phantom;  /* 1: no such process need exist */
    uint32_t graphics; /* 1: a display process */
    uint32_t ticket;   /* tells entries apart that have used the same place */
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
    char fail_name[60];   /* the only function that fails; empty: all do */
    uint32_t fail_device; /* 1 + the only device whose calls fail; 0: calls about any, and those about none */
    uint32_t fail_code;   /* the code that these calls answer, if not 0 */
    uint32_t fail_calls;  /* how many calls more; 0: until it is changed */
    uint32_t latency;     /* microseconds that every call takes */
    uint32_t cuda_version;
    uint32_t devices;     /* whole GPUs and MIG instances */
    uint64_t calls;       /* calls answered so far */
    uint32_t maker;       /* NVIDIA or AMD: only that maker's library finds the machine */
    uint32_t smi_version; /* of AMD's library: 1000 times the first number, and the second */
    char driver_version[80];
    uint8_t nvlinks[MAX_GPUS][MAX_GPUS];
    uint8_t proximity[MAX_GPUS][MAX_GPUS];
    struct device device[MAX_DEVICES];
    struct process process[MAX_PROCESSES];
};

typedef char device_has_no_padding[sizeof(struct device) == 248 ? 1 : -1];
typedef char process_has_no_padding[sizeof(struct process) == 48 ? 1 : -1];
typedef char state_has_no_padding[sizeof(struct state) == 2296 + 128 * 248 + 512 * 48 ? 1 : -1];

/* ---- opening, and the lock around each call ---- */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards all statics; the flock guards the file */
static struct state *state;                               /* NULL: not initialised */
static char state_path[4096];
static int state_fd = -1;
static unsigned initialisations;                          /* less shutdowns: several users in one process */

typedef struct standin_handle *device_handle; /* 1 + number of the device, so that it outlives a re-initialisation */

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
static void forget_attributed(void);
static void began(void); /* the library's own: a session has begun */

/* The code that this call of a function, about a device (1 + its number) or none (0), shall fail with, by order of the
 * state file; counts orders that are for some calls only. */
static int ordered_failure(const char *function, uint32_t device)
{
    int code = (int)__atomic_load_n(&state->fail_code, __ATOMIC_RELAXED);
    if (code == SUCCESS || (state->fail_device && state->fail_device != device)) return SUCCESS;
    if (*state->fail_name && strcmp(state->fail_name, function)) return SUCCESS;
    uint32_t left = __atomic_load_n(&state->fail_calls, __ATOMIC_RELAXED);
    if (left == 0) return code;
    if (__atomic_sub_fetch(&state->fail_calls, 1, __ATOMIC_RELAXED) == 0) state->fail_code = SUCCESS;
    return code;
}

/* Starts the library of this maker, under the name by which it can be made to fail. */
static int start(const char *function)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&mutex);
    const char *path = getenv("GPUHERD_STANDIN");
    int code = SUCCESS;
    if (state && (!path || strcmp(path, state_path))) close_state();
    forget_attributed();
    if (!state) {
        /* Without a machine of this maker it is as where no driver is installed. */
        code = path && *path ? open_state(path) : LIBRARY_NOT_FOUND;
        if (code == SUCCESS && state->maker != MAKER) {
            close_state();
            code = LIBRARY_NOT_FOUND;
        }
        if (code == SUCCESS) began();
    }
    if (code == SUCCESS) {
        __atomic_add_fetch(&state->calls, 1, __ATOMIC_RELAXED);
        code = ordered_failure(function, 0);
        if (code == SUCCESS) initialisations++;
        else if (!initialisations) close_state();
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

static int stop(const char *function)
{
    pthread_mutex_lock(&mutex);
    int code = state ? ordered_failure(function, 0) : UNINITIALIZED;
    if (state && code == SUCCESS && --initialisations == 0) close_state();
    pthread_mutex_unlock(&mutex);
    return code;
}

/* Begins a call about a device (1 + its number) or none (0). On SUCCESS the mutex and a shared lock on the file are held,
 * and leave() must follow. */
static int enter(const char *function, uintptr_t device)
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
        code = ordered_failure(function, (uint32_t)device);
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
static device_handle handle_of(const struct device *gpu) { return (device_handle)(uintptr_t)(number_of(gpu) + 1); }
static const struct device *whole(const struct device *gpu) { return gpu->parent ? &state->device[gpu->parent - 1] : gpu; }

enum kind { ANY, WHOLE_GPU, MIG_INSTANCE };

/* Begins a call about one device: enter(), then the device, or the code that says why there is none. */
static int enter_device(const char *function, device_handle handle, enum kind kind, struct device **gpu)
{
    int code = enter(function, (uintptr_t)handle);
    if (code != SUCCESS) return code;
    uintptr_t number = (uintptr_t)handle - 1;
    if (number >= state->devices) return leave(INVALID_ARGUMENT);
    *gpu = &state->device[number];
    if (whole(*gpu)->lost) return leave(GPU_IS_LOST);
    if (kind == WHOLE_GPU && (*gpu)->parent) return leave(NOT_SUPPORTED);
    if (kind == MIG_INSTANCE && !(*gpu)->parent) return leave(NOT_SUPPORTED);
    return SUCCESS;
}

/* ---- who uses a device ---- */

struct use {
    uint32_t device, pid, graphics;
    uint64_t bytes, start;
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
            out[count++] = (struct use){entry->device, entry->pid, entry->graphics, entry->bytes, entry->start};
    }
    unsigned entries = count;
    for (unsigned i = 0; i < attributed_count && count < MAX_PROCESSES; i++) {
        if (attributed[i].device >= state->devices) continue;
        const struct device *on = &state->device[attributed[i].device];
        unsigned j = 0;
        while (j < entries && out[j].pid != attributed[i].pid) j++; /* what a job itself has claimed is not told twice */
        if (j < entries || (on != gpu && whole(on) != gpu)) continue;
        /* Found up to a tenth of a second ago; the memory of a job that has ended since is free at once. */
        if (start_of(attributed[i].pid) == attributed[i].start) out[count++] = attributed[i];
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

/* A figure that follows use where it was not set. */
static unsigned figure(const struct device *gpu, uint32_t set, unsigned idle, unsigned busy)
{
    return set != FOLLOWS_USE ? set : is_used(gpu) ? busy : idle;
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

/* What CUDA runs on when it is given this GPU: of a split one the first instance. */
static uint32_t first_usable(uint32_t number)
{
    for (uint32_t i = state->gpus; i < state->devices && state->device[number].mig_mode; i++)
        if (state->device[i].parent == number + 1) return i;
    return number;
}

/* The devices that a CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES value names (by number), up to the first name that is none. */
static unsigned visible_devices(const char *value, uint32_t out[MAX_DEVICES])
{
    unsigned count = 0;
    while (*value && count < MAX_DEVICES) {
        size_t length = strcspn(value, ",");
        uint32_t found = MAX_DEVICES;
        if (isdigit((unsigned char)*value)) {
            unsigned long index = strtoul(value, NULL, 10);
            if (index < state->gpus) found = first_usable((uint32_t)index);
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
    const char *visible = word(environment, length, MAKER == AMD ? "ROCR_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES");
    if (!path || !visible || strcmp(path, state_path) || !word(environment, length, "GPUHERD_ATTEMPT")) return;
    unsigned count = visible_devices(visible, devices);
    if (!count || !read_proc(pid, "status", status, sizeof status)) return;
    const char *line = strstr(status, "\nRssAnon:"); /* a zombie has no such line */
    if (!line) return;
    uint64_t bytes = strtoull(line + 9, NULL, 10) * 1024;
    if (bytes < SMALLEST_JOB) return;
    uint32_t number = (uint32_t)strtoul(pid, NULL, 10);
    uint64_t start = start_of(number);
    for (unsigned i = 0; i < count && attributed_count < MAX_PROCESSES; i++)
        attributed[attributed_count++] = (struct use){devices[i], number, 0, bytes / count, start};
}

static void forget_attributed(void)
{
    attributed_at = 0;
    attributed_count = 0;
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

/* ---- what entry points are made of ---- */

#define API __attribute__((visibility("default")))
#define SAME_AS(name) __attribute__((visibility("default"), alias(#name)))

/* Opens every function about one device: declares `gpu`, and returns at once when the call can't go on. */
#define FOR_DEVICE(kind) \
    struct device *gpu = NULL; \
    int refused = enter_device(__func__, handle, kind, &gpu); \
    if (refused != SUCCESS) return refused

#define OPEN_CALL() \
    int refused = enter(__func__, 0); \
    if (refused != SUCCESS) return refused

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

static int give(unsigned *out, unsigned value)
{
    if (!out) return INVALID_ARGUMENT;
    *out = value;
    return SUCCESS;
}
