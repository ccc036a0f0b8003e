"""Jobs handed to SLURM. Pure: ``translate`` writes sbatch's words, ``parse`` and ``site`` read what SLURM prints, and
``refusals`` what it complains of. ``commands`` runs its programs; ``engine`` is the engine.
"""
