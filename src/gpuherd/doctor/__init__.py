"""Is this machine ready? One check a question, each with what was found and what to do about it.

What is found is judged by pure functions; models run in child processes. ``gpuherd doctor`` shows the results.
"""
