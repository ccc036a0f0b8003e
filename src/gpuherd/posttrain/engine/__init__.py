"""Training in one process or several: ``dist_env`` (who else takes part), ``train_engine`` (a module and its
optimiser), ``checkpoints`` (complete or absent, exact), ``curves`` (figures by step).

Knows no algorithm and no data.
"""
