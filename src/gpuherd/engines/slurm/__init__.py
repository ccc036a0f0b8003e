"""SLURM as an engine. ``spec`` registers it. Pure: ``translate`` writes sbatch's arguments, ``parse`` and ``site`` read
what SLURM prints. ``commands`` runs its programs and reads their complaints; ``engine`` is the connection.
``foreground`` runs a command by srun, or jobs inside of a SLURM job; ``export`` writes scripts; ``node`` is for the
nodes, and ``doctor`` checks the site.
"""
