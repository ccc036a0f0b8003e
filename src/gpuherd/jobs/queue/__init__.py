"""The queue: SQLite, the only truth about a run's progress."""
