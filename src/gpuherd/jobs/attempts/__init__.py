"""Attempts of jobs on this machine: launch, supervision, end, failures and retries."""
