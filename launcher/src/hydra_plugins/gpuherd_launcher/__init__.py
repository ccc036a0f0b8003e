"""Hydra's launcher for free GPUs, SLURM and Ray, by gpuherd.

Hydra itself finds ``launcher`` and ``configs`` when a program starts; what begins with ``_`` it leaves alone.
"""
