"""Which job starts next, on which GPUs, and why the others wait. Pure."""
