"""Data sets that are known by name: where each is on the Hub, which split is asked, how its rows become questions."""
