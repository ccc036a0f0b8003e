"""A plugin of the tests: a sweeper that reads what jobs return."""
