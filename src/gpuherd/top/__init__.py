"""The full-screen view of a run: GPUs, jobs and logs, with keys to steer it (the extra ``top``)."""
