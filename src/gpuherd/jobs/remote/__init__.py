"""Jobs of a queue in the hands of an engine beyond this machine."""
