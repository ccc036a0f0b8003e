"""The tasks, a file each: problems and what completions earn."""
