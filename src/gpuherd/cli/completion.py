"""``gpuherd completion``: prints a completion script for the user's shell, and what that script asks for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress

from gpuherd.cli.common import add_command
from gpuherd.errors import ExitCode, GpuherdError, UsageError
from gpuherd.options import Parser

COMPLETION = """\
Prints a completion script: for commands, flags and their values, names of jobs, and files.

examples:
  gpuherd completion bash > ~/.local/share/bash-completion/completions/gpuherd
  gpuherd completion fish > ~/.config/fish/completions/gpuherd.fish
  gpuherd completion zsh > ~/.zfunc/_gpuherd           where ~/.zfunc is in fpath
"""
SHELLS = ("bash", "fish", "zsh", "tcsh")
_JOBS_ASKED = "jobs"
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


def add_completion(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Registers the command."""
    parser = add_command(subparsers, "completion", COMPLETION)
    parser.add_argument(
        "shell", choices=(*SHELLS, _JOBS_ASKED), metavar="|".join(SHELLS), help="which shell the script is for"
    )
    # The scripts call this command too: with the beginning of a job's name, and the words of the line before it.
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run_completion)


def run_completion(args: argparse.Namespace) -> int:
    """Prints the script for ``args.shell``, or the names of jobs for a script."""
    if args.shell == _JOBS_ASKED:
        beginning, *words = args.words or [""]
        with suppress(GpuherdError):  # no queue, no names
            for name in _names(beginning, words):
                print(name)
        return ExitCode.OK
    if args.words:
        raise UsageError(f"completion takes one word, a shell: not also {args.words[0]!r}")
    import shtab

    from gpuherd.cli.main import build_parser

    parser = build_parser()
    _set_completions(parser)
    script: str = shtab.complete(parser, shell=args.shell)
    # Where we have nothing to offer, bash offers files, as for any other program.
    print(script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F"))
    return ExitCode.OK


def _set_completions(parser: argparse.ArgumentParser) -> None:
    """Sets for shtab how to complete each argument without choices; by default it offers nothing for them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _set_completions(each)
        elif action.choices is None and action.nargs != 0:
            kind = {"JOB": _JOBS, "DIR": "directory"}.get(str(action.metavar), "file")
            action.complete = kind  # type: ignore[attr-defined]


def _names(beginning: str, words: Sequence[str]) -> list[str]:
    """Names of jobs that begin so, of the run that the words of the line name, else of the user's own queue."""
    from gpuherd.cli.common import meant
    from gpuherd.jobs.monitor.status import opened
    from gpuherd.jobs.queue.reader import is_there
    from gpuherd.jobs.run_dir import RunDirectory

    named = _after("--run", words) or next((word for word in words[2:] if is_there(RunDirectory(word).queue)), None)
    with opened(meant(argparse.Namespace(folder=named, engine=_after("--engine", words)))) as reader:
        found = reader.rows(
            "SELECT name FROM jobs WHERE substr(name, 1, ?) = ? ORDER BY id LIMIT ?",
            (len(beginning), beginning, _MOST_NAMES),
        )
    return [row["name"] for row in found if row["name"].isprintable()]


def _after(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag among words that bash may have taken apart at its =."""
    for place, word in enumerate(words):
        if word == flag:
            return next((each for each in words[place + 1 :] if each != "="), None)
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None
