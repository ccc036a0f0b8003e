/* A stand-in for libcuda.so.1 that has no device: what runs on simulated GPUs must stay on the CPU.
 *
 * On a machine with real GPUs this file is found before NVIDIA's own (LD_LIBRARY_PATH), so that a job under
 * gpuherd --simulate never touches GPUs that others use. Every driver call answers CUDA_ERROR_NO_DEVICE, which CUDA's
 * runtime and torch take for "no GPU here". Knows nothing of the simulated machine.
 */

#define API __attribute__((visibility("default")))
#define SAME_AS(name) __attribute__((visibility("default"), alias(#name)))

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100 };

API int cuInit(unsigned flags)
{
    (void)flags;
    return NO_DEVICE;
}

API int cuDriverGetVersion(int *version)
{
    if (!version) return INVALID_VALUE;
    *version = 13000;
    return SUCCESS;
}

API int cuDeviceGetCount(int *count)
{
    if (!count) return INVALID_VALUE;
    *count = 0;
    return NO_DEVICE;
}

API int cuGetErrorString(int code, const char **text)
{
    if (!text) return INVALID_VALUE;
    *text = code == SUCCESS ? "no error" : "no CUDA-capable device is detected";
    return SUCCESS;
}

API int cuGetErrorName(int code, const char **text)
{
    if (!text) return INVALID_VALUE;
    *text = code == SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}

static int no_device(void) { return NO_DEVICE; }

static int same(const char *a, const char *b)
{
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

/* CUDA's runtime asks for every driver call by name. All but these few may be one function: callers in C's convention
 * clean up their own arguments. */
API int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags, int *status)
{
    (void)version;
    (void)flags;
    if (!name || !out) return INVALID_VALUE;
    if (same(name, "cuInit")) *out = (void *)cuInit;
    else if (same(name, "cuDriverGetVersion")) *out = (void *)cuDriverGetVersion;
    else if (same(name, "cuDeviceGetCount")) *out = (void *)cuDeviceGetCount;
    else if (same(name, "cuGetErrorString")) *out = (void *)cuGetErrorString;
    else if (same(name, "cuGetErrorName")) *out = (void *)cuGetErrorName;
    else if (same(name, "cuGetProcAddress")) *out = (void *)cuGetProcAddress_v2;
    else *out = (void *)no_device;
    if (status) *status = 0;
    return SUCCESS;
}

API int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, 0);
}

SAME_AS(no_device) int cuDeviceGet(void);
SAME_AS(no_device) int cuCtxGetCurrent(void);
