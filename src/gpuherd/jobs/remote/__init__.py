"""Attempts in an engine beyond this machine, on both sides: the dispatcher here and the agent on a node. Times of this
room, in seconds.
"""

# --- here ---------------------------------------------------------------------------------------------------------

# A report may be on its way for so long after the engine calls its attempt ended; in addition to the grace, in which a
# guardian may still be ending the attempt. A known end needs no further query, only so much time, since the engine may
# be away.
REPORT_DELAY_S = 15.0
LONGEST_WAIT_S = 60.0
# Retry interval after a failed write, or after the refusal of a batch of which a part may be accepted; a refusal that
# may pass is reported at most so often.
AGAIN_S = 1.0
REFUSAL_EVERY_S = 600.0
# Each submission is a command to the engine: jobs that come so soon after the last one wait for more.
SUBMIT_EVERY_S = 1.0
# Work that is done for each of thousands of jobs is split into pieces of so many seconds.
AT_A_TIME_S = 0.5
# Queries: the shortest interval, and the longest while the engine does not answer.
QUERY_SOON_S, QUERY_LONGEST_S = 1.0, 60.0
# The spool folder: between two reads, at least and at most; between two removals of files of batches that are over (a
# queue may be served for months), and the age at which files of unknown batches are removed.
SPOOL_SHORTEST_S, SPOOL_LONGEST_S = 0.2, 1.0
SWEEP_S = 600.0
SWEEP_AGE_S = 600.0
# Requested time: what a node needs to start an attempt's agent and to report its end; rounded up to whole minutes up to
# an hour, then to quarters of an hour. A partition's own limit consists of such steps, too, so that rounding does not
# exceed it.
AROUND_S = 60.0
SHORT_S, SHORT_STEP_S, LONG_STEP_S = 3600.0, 60, 900

# --- on a node ----------------------------------------------------------------------------------------------------

# A claim, a start or a report that fails for lack of space, processes or files is retried for so long, after these
# pauses; a guardian retries its report.
PATIENCE_S = 60.0
PAUSES_S = (0.1, 0.5, 2.0)
# Between two looks for the reports of the attempts that this one depends on.
NEEDS_LOOK_S = 0.1
# Samples of the GPU peak: the first, which short jobs don't reach; between two; at the end the thread is waited for.
PEAK_FIRST_S, PEAK_EVERY_S, PEAK_END_S = 2.0, 5.0, 1.0
# So much of the notice of an end is ours, to end what is left and to report it.
LAST_S = 5.0
# Other nodes: between two looks, and how long beyond their grace they are waited for.
OTHERS_LOOK_S = 0.5
OTHERS_END_S = 30.0
