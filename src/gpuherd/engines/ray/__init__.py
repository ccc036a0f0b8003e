"""Ray as an engine: tasks of a cluster that we join, or jobs of its job server by address.

``engine`` is the dispatcher's side and its channel to a process next to Ray (``driver``), which alone imports Ray and
runs jobs by ``tasks`` or ``job_server``; ``worker`` runs in Ray's own workers. ``cluster`` says which cluster is meant,
and what it can grant. ``spec`` registers the engine.
"""
