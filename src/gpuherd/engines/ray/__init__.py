"""Ray as an engine: tasks of a cluster that we join, or jobs of its job server by address."""
