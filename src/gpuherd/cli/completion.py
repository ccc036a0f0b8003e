"""``gpuherd completion``: prints a completion script for a shell, and the names of jobs for that script."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress

from gpuherd.cli.common import has_queue, run_of
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.options import Parser

COMPLETION = """\
Prints a script with which a shell completes commands, flags and their values, names of jobs, and files.

examples:
  gpuherd completion bash > ~/.local/share/bash-completion/completions/gpuherd
  gpuherd completion fish > ~/.config/fish/completions/gpuherd.fish
  gpuherd completion zsh > ~/.zfunc/_gpuherd           where ~/.zfunc is in fpath
"""
SHELLS = ("bash", "fish", "zsh", "tcsh")
# The scripts call ``gpuherd completion jobs`` for the names of jobs.
_JOB_NAMES = "jobs"
_MOST_NAMES = 1000

# Bash splits words at = and :, so only the part of a name after the last of them is printed.
_BASH_JOBS = """
_gpuherd_jobs() {
  local line="${COMP_LINE:0:COMP_POINT}" name whole
  whole="${line##*[[:space:]]}"
  gpuherd completion jobs "$whole" "${COMP_WORDS[@]:0:COMP_CWORD}" 2>/dev/null | while IFS= read -r name; do
    printf '%q\\n' "${name:$(( ${#whole} - ${#1} ))}"
  done
  compgen -d -- "$1"
}
"""
_FISH_JOBS = """
function _gpuherd_jobs
  gpuherd completion jobs (commandline -ct) (commandline -opc) 2>/dev/null
  __fish_complete_directories
end
"""
_ZSH_JOBS = """
_gpuherd_jobs() {
  compadd -- ${(f)"$(gpuherd completion jobs "$PREFIX" "${words[@]:0:$(( CURRENT - 1 ))}" 2>/dev/null)"}
  _files -/
}
"""
_JOBS = {
    "bash": "_gpuherd_jobs",
    "fish": "(_gpuherd_jobs)",
    "zsh": "_gpuherd_jobs",
    "tcsh": "d",
    "preamble": {"bash": _BASH_JOBS, "fish": _FISH_JOBS, "zsh": _ZSH_JOBS},
}


def add_completion(parser: Parser) -> None:
    parser.add_argument(
        "shell", choices=(*SHELLS, _JOB_NAMES), metavar="|".join(SHELLS), help="which shell the script is for"
    )
    # For job names: the beginning of the name, then the words of the command line before it.
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run_completion(args: argparse.Namespace) -> int:
    """Prints the script for ``args.shell``, or the names of jobs for a script."""
    if args.shell == _JOB_NAMES:
        prefix, *words = args.words or [""]
        with suppress(GpuherdError):  # without a queue there are no names
            for name in _names(prefix, words):
                print(name)
        return ExitCode.OK
    if args.words:
        raise UsageError(f"completion takes one word, a shell: not also {args.words[0]!r}")
    import shtab

    from gpuherd.cli.main import build_parser

    parser = build_parser()
    _set_completions(parser)
    script: str = shtab.complete(parser, shell=args.shell)
    # Without a completion of ours bash offers files, as for any other program.
    print(script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F"))
    return ExitCode.OK


def _set_completions(parser: argparse.ArgumentParser) -> None:
    """Tells shtab how to complete each argument without choices, for which it offers nothing by default."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _set_completions(each)
        elif action.choices is None and action.nargs != 0:
            kind = {"JOB": _JOBS, "DIR": "directory"}.get(str(action.metavar), "file")
            action.complete = kind  # type: ignore[attr-defined]


def _names(prefix: str, words: Sequence[str]) -> list[str]:
    """Names of jobs with this prefix, of the run that the words of the line name, else of the user's own queue."""
    from gpuherd.jobs.monitor.status import opened

    named = _value_of("--run", words) or next(filter(has_queue, words[2:]), None)
    with opened(run_of(argparse.Namespace(folder=named, engine=_value_of("--engine", words)))) as reader:
        found = reader.rows(
            "SELECT name FROM jobs WHERE substr(name, 1, ?) = ? ORDER BY id LIMIT ?", (len(prefix), prefix, _MOST_NAMES)
        )
    return [row["name"] for row in found if row["name"].isprintable()]


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag among words that bash may have split at the ``=`` of the flag."""
    for place, word in enumerate(words):
        if word == flag:
            return next((each for each in words[place + 1 :] if each != "="), None)
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None
