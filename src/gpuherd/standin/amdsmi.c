/* A stand-in for AMD's management library: AMD SMI's own entry points over a state file that others may change.
 *
 * The entry points, structures and codes are those of amdsmi.h, in the versions 24.7 to 27 that gpuherd reads: which one
 * is a field of the state. Knows AMD SMI's interface. The state file and who uses a GPU is state.h's part; how a machine
 * is made, machine.py's.
 */

/* amdsmi_status_t. A GPU that has fallen off the bus is a processor that is not found; without a machine it is as where
 * the library can't be loaded. */
enum { SUCCESS = 0, INVALID_ARGUMENT = 1, NOT_SUPPORTED = 2, LIBRARY_NOT_FOUND = 4, NO_PERMISSION = 10,
       INSUFFICIENT_SIZE = 15, LIB_RM_VERSION_MISMATCH = 18, NOT_FOUND = 31, GPU_IS_LOST = 31, UNINITIALIZED = 32,
       DRIVER_NOT_LOADED = 34 };
#define MAKER AMD

#include "state.h"

typedef struct standin_socket *socket_handle; /* 1 + number of the GPU by PCI bus */

static void began(void) {}

static unsigned major_version(void) { return state->smi_version / 1000; }

/* Places a value in a structure whose layout depends on the version. */
#define PLACE(out, offset, value) memcpy((char *)(out) + (offset), &(value), sizeof(value))

/* ---- library and system ---- */

API int amdsmi_init(uint64_t flags)
{
    (void)flags;
    return start(__func__);
}

API int amdsmi_shut_down(void) { return stop(__func__); }

/* Up to 25 a year stands in front, the first number of the version; the second and third follow in each. */
API int amdsmi_get_lib_version(void *out)
{
    OPEN_CALL();
    if (!out) return leave(INVALID_ARGUMENT);
    uint32_t version[3] = {major_version(), state->smi_version % 1000, 0};
    memcpy(out, version, sizeof version);
    return leave(SUCCESS);
}

API int amdsmi_status_code_to_string(int status, const char **out)
{
    if (!out) return INVALID_ARGUMENT;
    switch (status) {
    case SUCCESS: *out = "AMDSMI_STATUS_SUCCESS"; break;
    case NOT_SUPPORTED: *out = "AMDSMI_STATUS_NOT_SUPPORTED"; break;
    case NO_PERMISSION: *out = "AMDSMI_STATUS_NO_PERM"; break;
    case NOT_FOUND: *out = "AMDSMI_STATUS_NOT_FOUND"; break;
    default: *out = "AMDSMI_STATUS_UNKNOWN_ERROR";
    }
    return SUCCESS;
}

/* ---- which devices there are: sockets in the order of PCI buses, each with a GPU or the partitions of one ---- */

static const struct device *gpu_of(socket_handle socket)
{
    uintptr_t number = (uintptr_t)socket;
    for (uint32_t i = 0; number && i < state->gpus; i++) {
        uintptr_t before = 1;
        for (uint32_t j = 0; j < state->gpus; j++) before += state->device[j].pci_bus < state->device[i].pci_bus;
        if (before == number) return &state->device[i];
    }
    return NULL;
}

API int amdsmi_get_socket_handles(uint32_t *count, socket_handle *out)
{
    OPEN_CALL();
    if (!count) return leave(INVALID_ARGUMENT);
    uint32_t room = out ? *count : state->gpus;
    *count = state->gpus < room ? state->gpus : room;
    for (uintptr_t i = 0; out && i < *count; i++) out[i] = (socket_handle)(i + 1);
    return leave(SUCCESS);
}

API int amdsmi_get_processor_handles(socket_handle socket, uint32_t *count, device_handle *out)
{
    uint32_t found = 0;
    OPEN_CALL();
    const struct device *gpu = gpu_of(socket);
    if (!gpu || !count) return leave(INVALID_ARGUMENT);
    int code = state->fail_device ? ordered_failure(__func__, number_of(gpu) + 1) : SUCCESS;
    if (code != SUCCESS) return leave(code);
    for (uint32_t i = state->gpus; i < state->devices; i++) {
        if (state->device[i].parent != number_of(gpu) + 1) continue;
        if (out && found < *count) out[found] = handle_of(&state->device[i]);
        found++;
    }
    if (!found && out && *count) out[0] = handle_of(gpu);
    *count = found ? found : 1;
    return leave(SUCCESS);
}

API int amdsmi_get_processor_type(device_handle handle, uint32_t *out)
{
    FOR_DEVICE(ANY);
    return leave(give(out, 1)); /* AMDSMI_PROCESSOR_TYPE_AMD_GPU */
}

API int amdsmi_get_gpu_bdf_id(device_handle handle, uint64_t *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    *out = (uint64_t)whole(gpu)->pci_bus << 8;
    return leave(SUCCESS);
}

/* amdsmi_kfd_info_t. Nodes 0 and 1 are processors; GPUs follow in the order of the machine, which is not that of buses. */
API int amdsmi_get_gpu_kfd_info(device_handle handle, void *out)
{
    struct {
        uint64_t kfd_id;
        uint32_t node_id, partition;
    } info = {0};
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    info.kfd_id = 40000 + number_of(whole(gpu));
    info.node_id = 2 + number_of(whole(gpu));
    info.partition = gpu->position;
    memcpy(out, &info, sizeof info);
    return leave(SUCCESS);
}

/* amdsmi_asic_info_t: market_name[256], vendor_id, vendor_name, subvendor_id, device_id, rev_id, asic_serial, oam_id,
 * num_of_compute_units; the vendor's name has 64 bytes and the serial 32 in version 24, both 256 since. */
API int amdsmi_get_gpu_asic_info(device_handle handle, void *out)
{
    char serial[40];
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    int old = major_version() == 24;
    uint32_t vendor = 0x1002, units = whole(gpu)->multiprocessors;
    memset(out, 0, old ? 376 : 792);
    strcpy(out, whole(gpu)->name);
    PLACE(out, 256, vendor);
    strcpy((char *)out + 260, "Advanced Micro Devices Inc. [AMD/ATI]");
    snprintf(serial, sizeof serial, "0x%s", whole(gpu)->serial);
    strcpy((char *)out + (old ? 340 : 532), serial);
    PLACE(out, old ? 376 : 792, units);
    return leave(SUCCESS);
}

/* amdsmi_driver_info_t: the version comes first, with 64 bytes in version 24 and 256 since. */
API int amdsmi_get_gpu_driver_info(device_handle handle, char *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    snprintf(out, 64, "%.63s", state->driver_version);
    return leave(SUCCESS);
}

API int amdsmi_get_gpu_compute_partition(device_handle handle, char *out, uint32_t length)
{
    FOR_DEVICE(ANY);
    if (!out || length < 4) return leave(INVALID_ARGUMENT);
    strcpy(out, gpu->parent ? "CPX" : "SPX");
    return leave(SUCCESS);
}

/* ---- memory and processes ---- */

static int give_bytes(uint64_t *out, uint32_t type, uint64_t value)
{
    if (!out || type > 2) return INVALID_ARGUMENT;
    *out = type == 2 ? 0 : value; /* GTT is the machine's memory */
    return SUCCESS;
}

API int amdsmi_get_gpu_memory_total(device_handle handle, uint32_t type, uint64_t *out)
{
    FOR_DEVICE(ANY);
    return leave(give_bytes(out, type, gpu->total));
}

API int amdsmi_get_gpu_memory_usage(device_handle handle, uint32_t type, uint64_t *out)
{
    FOR_DEVICE(ANY);
    return leave(give_bytes(out, type, used_bytes(gpu)));
}

/* amdsmi_proc_info_t: name, pid, mem, two engines and 12 words, gtt_mem, cpu_mem, vram_mem and 10 words, container_name
 * and 48 bytes (16 in version 24). Names have 32 bytes in version 24 and 256 since. */
API int amdsmi_get_gpu_process_list(device_handle handle, uint32_t *count, char *out)
{
    struct use uses[MAX_PROCESSES];
    FOR_DEVICE(ANY);
    if (!count) return leave(INVALID_ARGUMENT);
    unsigned room = *count, found = state->hide_pids ? 0 : uses_of(gpu, uses);
    size_t name = major_version() == 24 ? 32 : 256, size = major_version() == 24 ? 224 : 704;
    *count = found;
    if (!room || !found) return leave(SUCCESS);
    if (!out) return leave(INVALID_ARGUMENT);
    if (found > room) return leave(INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < found; i++) {
        char *entry = out + i * size;
        uint64_t bytes = state->hide_memory ? 0 : uses[i].bytes;
        memset(entry, 0, size);
        PLACE(entry, name, uses[i].pid);
        PLACE(entry, name + 8, bytes);
        PLACE(entry, name + 96, bytes);
    }
    return leave(SUCCESS);
}

/* ---- figures ---- */

/* amdsmi_engine_usage_t: percent of the graphics, memory and media engines. */
API int amdsmi_get_gpu_activity(device_handle handle, void *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    uint32_t percent[3] = {figure(whole(gpu), whole(gpu)->utilisation, 0, 90), 0, 0};
    memcpy(out, percent, sizeof percent);
    return leave(SUCCESS);
}

/* Like Instinct GPUs since MI300: no sensor at the edge (0), one at the hottest place (1); degrees Celsius. */
API int amdsmi_get_temp_metric(device_handle handle, uint32_t sensor, uint32_t metric, int64_t *out)
{
    FOR_DEVICE(ANY);
    if (!out || metric != 0) return leave(INVALID_ARGUMENT);
    if (sensor != 1) return leave(NOT_SUPPORTED);
    *out = figure(whole(gpu), whole(gpu)->temperature, 34, 61);
    return leave(SUCCESS);
}

/* amdsmi_power_info_t: current and average power in watts, the second not supported; since 25 behind their sum. */
API int amdsmi_get_power_info(device_handle handle, void *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    uint32_t watts[2] = {figure(whole(gpu), whole(gpu)->power, 55000, 240000) / 1000, 0xFFFF};
    uint64_t sum = watts[0];
    if (major_version() > 24) PLACE(out, 0, sum);
    PLACE(out, major_version() > 24 ? 8 : 0, watts);
    return leave(SUCCESS);
}

/* amdsmi_error_count_t: correctable ones, uncorrectable ones. */
API int amdsmi_get_gpu_total_ecc_count(device_handle handle, void *out)
{
    FOR_DEVICE(ANY);
    if (!out) return leave(INVALID_ARGUMENT);
    uint64_t errors[2] = {0, whole(gpu)->ecc_errors};
    memcpy(out, errors, sizeof errors);
    return leave(SUCCESS);
}

/* ---- where a GPU sits ---- */

API int amdsmi_topo_get_numa_node_number(device_handle handle, uint32_t *out)
{
    FOR_DEVICE(ANY);
    return leave(give(out, whole(gpu)->numa_node));
}

API int amdsmi_topo_get_link_type(device_handle handle, device_handle second, uint64_t *hops, uint32_t *type)
{
    FOR_DEVICE(ANY);
    uintptr_t number = (uintptr_t)second - 1;
    if (number >= state->devices || !hops || !type) return leave(INVALID_ARGUMENT);
    const struct device *other = whole(&state->device[number]);
    if (other->lost) return leave(GPU_IS_LOST);
    int linked = state->nvlinks[number_of(whole(gpu))][number_of(other)] > 0;
    *hops = linked ? 1 : 2;
    *type = linked ? 2 : 1; /* XGMI, or PCI Express */
    return leave(SUCCESS);
}
