"""One attempt of a job on this machine: its start, its supervision, its end. Times of this room, in seconds."""

# Retry intervals: after a start failed for lack of processes, files, memory or space, and after an end could not be
# recorded. Both may pass.
START_AGAIN_S = 1.0
RECORD_AGAIN_S = 1.0
# From SIGTERM to SIGKILL, by default; after SIGKILL, which a process in uninterruptible sleep gets again and again.
GRACE_S = 10.0
KILL_AGAIN_S = 5.0
# A job is ended so many times for not using its GPUs and waits again; after that it fails.
MOST_IDLE_ENDS = 3
# Preforked shells: for jobs shorter than this (for longer jobs the milliseconds don't matter). A shell waits at most so
# long, and none is started later than that after the last short job's end. A quiet moment is longer than the time
# between ends that come together, which must not wait for a prefork.
PREFORK_SHORT_S = 10.0
PREFORK_KEEP_S = 2 * PREFORK_SHORT_S
PREFORK_QUIET_S = 0.02
# Orphans: from the end of an attempt to the first scan, between two scans, from SIGTERM to SIGKILL, until a process is
# given up; between the scans that make sure that none is left.
ORPHANS_FIRST_SCAN_S = 0.2
ORPHANS_NEXT_SCAN_S = 0.3
ORPHANS_GRACE_S = 0.4
ORPHANS_GIVE_UP_S = 20.0
ORPHANS_SURE_S = 0.05
# Between two checks of the disks, and between two reads of a progress file at least and at most.
DISK_CHECK_S = 2.0
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.02, 60.0
