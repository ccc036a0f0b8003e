"""Tables, progress and logs for people: plain rows in, text out."""
