"""Jobs whose names and words are as bad as they may be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gpuherd.jobs.job import Job

# Told by each job as it got them, in a file of its own.
_TELL = "import json, os, sys; open(sys.argv[1], 'wb').write(json.dumps([[os.fsencode(w).hex() for w in sys.argv[2:]], \
os.getcwd(), os.environ.get('V'), os.environ.get('CUDA_VISIBLE_DEVICES')]).encode())"
HOSTILE = (
    "plain",
    "",
    "two words",
    'it\'s "quoted"',
    "line\nend\n",
    "$(touch pwned) `touch pwned`",
    "${HOME} $HOME !! # no comment",
    "; rm -rf x & | > y",
    "back\\slash\\n",
    "tab\tbell\a\r",
    "~ * ? [a] {a,b}",
    "-n",
    "a=b",
    "Grüße 日本",
    "\udcff no UTF-8",
    "%a %x %%",
)


def job(name: str, **more: Any) -> Job:
    return Job(name=name, **{"argv": ("true",), "gpus": 0, **more})


def telling(name: str, into: Path, *words: str, **more: Any) -> Job:
    """A job that writes down how it was called."""
    return job(name, argv=(sys.executable, "-c", _TELL, str(into), *words), **more)
