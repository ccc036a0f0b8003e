"""SLURM as an engine: by its own programs (sbatch, squeue, sacct, scancel, sinfo), never by its libraries."""
