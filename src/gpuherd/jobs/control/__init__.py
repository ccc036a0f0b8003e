"""Requests to a run: cancel, retry, pause, resume, set, drain, stop."""
