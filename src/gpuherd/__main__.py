"""``python -m gpuherd``: the same as the command ``gpuherd``."""

from gpuherd.cli.main import main

main()
