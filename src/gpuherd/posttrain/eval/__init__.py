"""How good policies are, and how far from the reference: metrics with intervals, and comparisons that are fair."""
