"""Is this machine ready? Each check gives its finding and, unless all is well, a remedy.

Pure functions judge the findings; models run in child processes. ``gpuherd doctor`` shows the results.
"""
