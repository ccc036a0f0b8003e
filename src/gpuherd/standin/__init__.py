"""A stand-in for the NVIDIA driver library, for tests and for users without GPUs.

Nothing below the command line imports this room: the code that reads GPUs meets an ordinary ``libnvidia-ml.so.1``.
"""
