"""Grid Engine (Son of Grid Engine 8.1 and what descends from it) as an engine."""
