"""``gpuherd export``: a plan of jobs as files that a person can read, change and submit by hand.

``reading`` finds the jobs, ``plan`` puts like ones together (pure), ``slurm`` and ``shell`` write them down (pure, on
``quoting``), ``writing`` puts the files into their folder. What is written runs without gpuherd.
"""
