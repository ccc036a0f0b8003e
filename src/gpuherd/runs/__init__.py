"""The skeleton that every run of jobs shares: answers, judgings, statistics, spectra, rounds of post-training.

``spec`` says what a run's results depend on and by which versions it was begun, ``stage`` takes it from "is it there
already?" over the plan and the jobs to its end, ``shards`` divides a list of items among jobs and ``shard_file`` keeps
their lines so that a kill loses one batch at most, ``worker`` is a job's main program, ``records`` turns frozen
dataclasses into JSON and back, ``files`` writes files whole, once, and by one writer at a time, ``console`` has the log
and the progress bars.
"""
