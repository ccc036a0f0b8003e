"""Training in one process or several: ``world`` (who else takes part), ``trainee`` (a module and its optimiser),
``checkpoints`` (complete or absent, exact), ``curves`` (figures by step). Knows no algorithm and no data."""
