"""Views of a run: status, tables, live display, logs, metrics, notices."""
