"""How completions are scored: by rules, by tests of code in a sandbox, by reward models."""
