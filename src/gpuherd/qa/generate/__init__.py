"""Answers to a list of questions: prompts made, jobs on free GPUs, one immutable folder.

``config`` has the options, ``prepared`` everything that is known before a GPU is taken, ``experiment`` the stage and
its output, ``worker`` answers a shard through a backend, ``finish`` writes the files of a complete run.
"""
