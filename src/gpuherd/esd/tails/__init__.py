"""Tail distributions that can be fitted besides the power law: one file each, found by ``registry``."""
