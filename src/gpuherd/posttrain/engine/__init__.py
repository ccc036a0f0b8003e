"""Training in one process or several: ``dist_env`` (which processes take part), ``train_engine`` (a module and its
optimiser), ``checkpoints`` (complete or absent, exact), ``recorder`` (what follows each step: figures, checkpoints).

Knows no algorithm and no data.
"""
