"""The web page (``gpuherd web``): the machine, queues and runs, for one user in a browser.

It runs as its user and shows what that user may read. ``access`` decides who may ask, ``live`` reads and sends what
changes, ``page`` is what pages use, ``pages/`` has a module a page, ``app`` puts them together, ``serve`` listens.
Needs ``gpuherd[web]``.
"""
