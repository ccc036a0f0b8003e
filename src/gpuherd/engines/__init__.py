"""Where a job runs, and how a running job tells how far it is. This room knows nothing of queues and of policy."""
