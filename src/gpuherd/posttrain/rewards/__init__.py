"""Scores completions: by rules, by tests of code in a sandbox, by reward models, by functions of the user's."""
