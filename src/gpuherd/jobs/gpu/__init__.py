"""The dispatcher's GPUs: looks, usage, leases, health."""
