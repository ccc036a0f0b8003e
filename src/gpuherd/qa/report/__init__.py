"""A run of answers as a page for the browser."""
