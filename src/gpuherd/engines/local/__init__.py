"""This machine as an engine: ``process`` starts, follows and ends a job; ``export`` writes a script for bash."""
