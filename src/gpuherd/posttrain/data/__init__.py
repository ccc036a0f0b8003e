"""Tasks (problems and what completions earn), files of rows, and rows as tokens."""
