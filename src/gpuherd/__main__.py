"""``python -m gpuherd``: the same as the ``gpuherd`` command."""

from gpuherd.cli.main import main

if __name__ == "__main__":
    main()
