"""Reads ``jobs.yaml``: jobs with settings, and entries that expand to a matrix or a sweep. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from gpuherd.batch import sweep
from gpuherd.batch import sweep as matrix
from gpuherd.batch.commands_txt import leading_variables, split_words
from gpuherd.batch.job_options import (
    KEYS,
    MOST_JOBS,
    BadJobFile,
    Draft,
    Problem,
    field_of,
    merged,
    number_from_1,
    unknown,
    value_of,
    variable,
    whole_number,
)
from gpuherd.batch.sweep import (
    BadParameter,
    Combination,
    Distribution,
    Sweep,
    check_keys,
    combinations,
    described,
    filled,
    has_placeholder,
    one_of,
)
from gpuherd.batch.yaml_tree import Mapping, Node, Scalar, Sequence, Wrong, mapping_of, plain, read_tree, word_of
from gpuherd.engines.options import read_block
from gpuherd.errors import UsageError
from gpuherd.options import nearest

# What one entry of ``jobs.yaml`` expands to: the combinations of its ``matrix`` with the settings of its ``sweep``.
#
# Pure. Reads the nodes; what a combination is, ``matrix`` knows, and what a draw is, ``sweep`` and ``distributions``.

# The keys of an entry that make several jobs of it.
EXPANDING = ("matrix", "include", "exclude", "sweep")
_SWEEP = ("method", "samples", "seed", "parameters")
_METHODS = ("grid", "random")


def combinations_of(job: Mapping) -> list[Combination]:
    """All combinations of an entry, those of the matrix one after the other, each with every setting of the sweep; one
    empty one without either. Raises Wrong.
    """
    axes = _axes(job)
    sweep = _sweep(job)
    if matrix.size(axes) > MOST_JOBS:
        raise Wrong(job.line, f"the matrix stands for {matrix.size(axes)} jobs; the most of a file are {MOST_JOBS}")
    include, exclude = (_parts(job, key, axes, whole=key == "include") for key in ("include", "exclude"))
    if not axes and not include:
        found: list[Combination] = [{}]
    else:
        found = list(combinations(axes, include, exclude))
    if not found:
        raise Wrong(job.line, "exclude leaves nothing of the matrix")
    return found if sweep is None else _with_sweep(job, found, sweep)


def _with_sweep(job: Mapping, found: list[Combination], sweep: Sweep) -> list[Combination]:
    line = job.lines["sweep"]
    for name in sweep.parameters:
        if any(name in each for each in found):
            raise Wrong(line, f"{name!r} is in the sweep and in the matrix; leave one of them out")
    size = (sweep.size() or 0) * len(found)
    if size > MOST_JOBS:
        raise Wrong(line, f"the sweep stands for {size} jobs; the most of a file are {MOST_JOBS}")
    try:
        drawn = list(sweep.settings())
    except ValueError as problem:
        raise Wrong(line, f"sweep: {problem}") from None
    return [{**each, **setting} for each in found for setting in drawn]


def _axes(job: Mapping) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    given = job.items.get("matrix")
    if given is None:
        return axes
    table = mapping_of(given, "matrix")
    for key, node in table.items.items():
        line = table.lines[key]
        _check_key(key, line, "a matrix")
        items = node.items if isinstance(node, Sequence) else [node]
        axes[key] = [word_of(item, f"a value of {key}") for item in items]
        try:
            one_of(axes[key])
        except BadParameter as problem:
            raise Wrong(line, f"{key} {problem}") from None
    return axes


def _check_key(key: str, line: int, where: str) -> None:
    if not matrix.KEY.fullmatch(key) or key == "round":
        raise Wrong(line, f"{key!r} can't be a key of {where}; use letters, digits and _ (round is taken)")


def _parts(job: Mapping, key: str, axes: dict[str, list[str]], *, whole: bool) -> list[dict[str, str]]:
    """The entries of ``include`` (``whole``: each must say all keys of the matrix) or ``exclude``."""
    given = job.items.get(key)
    if given is None:
        return []
    if not isinstance(given, Sequence):
        raise Wrong(given.line, f"{key} takes a list of mappings")
    found = []
    for item in given.items:
        part = {name: word_of(node, name) for name, node in mapping_of(item, key).items.items()}
        for name in part:
            if not matrix.KEY.fullmatch(name) or name == "round" or (axes and name not in axes):
                raise Wrong(item.line, f"{key}: {unknown(name, tuple(axes))}" if axes else f"{name!r} can't be a key")
        missing = sorted(axes.keys() - part.keys()) if whole else []
        if missing:
            raise Wrong(item.line, f"{key}: it says nothing of {', '.join(missing)}")
        found.append(part)
    return found


def _sweep(job: Mapping) -> Sweep | None:
    """The entry's sweep, None where it has none. Raises Wrong with all that is wrong in it."""
    given = job.items.get("sweep")
    if given is None or (isinstance(given, Scalar) and given.value is None):
        return None
    said = mapping_of(given, "sweep")
    problems = [Problem(said.lines[key], f"sweep: {unknown(key, _SWEEP)}") for key in said.items if key not in _SWEEP]
    table = said.items.get("parameters")
    if table is None:
        problems.append(Problem(said.line, "sweep: it says nothing of parameters"))
    parameters = {} if table is None else _parameters(mapping_of(table, "parameters"), problems)
    numbers: dict[str, int] = {}
    for key, parse in (("samples", number_from_1), ("seed", whole_number)):
        if key in said.items:
            try:
                numbers[key] = parse(word_of(said.items[key], key))
            except ValueError as problem:
                problems.append(Problem(said.lines[key], f"{key}: {problem}"))
    random = _is_random(said, problems)
    if problems:
        raise Wrong.all_of(problems)
    sweep = Sweep(
        parameters=parameters, samples=numbers.get("samples") if random else None, seed=numbers.get("seed", 0)
    )
    _check_size(said, sweep)
    return sweep


def _is_random(said: Mapping, problems: list[Problem]) -> bool:
    """Whether settings are drawn: where ``method`` says so, and where it says nothing but ``samples`` are asked for."""
    method = word_of(said.items["method"], "method") if "method" in said.items else None
    if method is not None and method not in _METHODS:
        problems.append(Problem(said.lines["method"], f"method: {method!r}; possible: {', '.join(_METHODS)}"))
    if method == "random" and "samples" not in said.items:
        problems.append(Problem(said.lines["method"], "method: random needs samples: how many settings are drawn"))
    random = method == "random" or (method is None and "samples" in said.items)
    for key in ("samples", "seed"):
        if method in (None, "grid") and not random and key in said.items:
            problems.append(Problem(said.lines[key], f"{key} is for method: random; a grid has all combinations"))
    return random


def _check_size(said: Mapping, sweep: Sweep) -> None:
    """Raises Wrong for a grid of what can't be counted off, and for more samples than there are settings."""
    table = mapping_of(said.items["parameters"], "parameters")
    there = sweep.combinations()
    if sweep.samples is None and there is None:
        raise Wrong.all_of(
            [
                Problem(
                    table.lines[name], f"{name} can't be counted off: a grid needs a list or a step (or say samples)"
                )
                for name, parameter in sweep.parameters.items()
                if parameter.size() is None
            ]
        )
    if sweep.samples is not None and there is not None and sweep.samples > there:
        raise Wrong(
            said.lines["samples"],
            f"samples: {sweep.samples}, and there are only {there} different settings; method: grid takes all of them",
        )


def _parameters(table: Mapping, problems: list[Problem]) -> dict[str, Distribution]:
    """Each parameter's distribution; what is wrong with them is added to the problems."""
    found: dict[str, Distribution] = {}
    for name, node in table.items.items():
        try:
            _check_key(name, table.lines[name], "a sweep")
            found[name] = _distribution(name, table.lines[name], node)
        except Wrong as wrong:
            problems += wrong.problems
    if not table.items:
        problems.append(Problem(table.line, "sweep: there are no parameters"))
    return found


def _distribution(name: str, line: int, node: Node) -> Distribution:
    try:
        if isinstance(node, Mapping):
            check_keys(node.items)
            return described({key: word_of(item, f"{name}: {key}") for key, item in node.items.items()})
        items = node.items if isinstance(node, Sequence) else [node]
        return one_of([word_of(item, f"a value of {name}") for item in items])
    except BadParameter as problem:
        at = node.lines.get(problem.key, line) if isinstance(node, Mapping) and problem.key is not None else line
        raise Wrong(at, f"{name}{' ' if problem.key is None else ': '}{problem}") from None


# Reads ``jobs.yaml``: jobs with settings, and a matrix or a sweep of values to expand. Pure.
#
# ::
#
#     engine: {name: slurm, partition: gpu}
#     defaults: {mem: 20GB, retries: 2}
#     jobs:
#       - name: train
#         command: python train.py --lr {lr} --seed {seed}
#         matrix: {lr: [0.1, 0.01], seed: [1, 2]}
#       - command: [python, evaluate.py, "two words"]
#         needs: train
#
# Words stay as they are written: ``0.10`` is not turned into 0.1. All that is wrong is told at once.

_MOST_PROBLEMS = 100
_MOST_ROUNDS = 10_000
_TOP = ("engine", "defaults", "jobs")
_ENTRY = ("command", *EXPANDING, "rounds")
_SETTINGS = (*(key for key in KEYS if key != "env.NAME"), "env")
_SHELL = "/bin/sh"
A = TypeVar("A")
B = TypeVar("B")


def read_document(text: str, *, shell: bool = False) -> tuple[Draft, ...]:
    """The jobs of a document, in order, each matrix expanded. ``shell``: commands that are one string are run by
    /bin/sh. Raises BadJobFile with everything that is wrong (the first 100 of it).
    """
    problems: list[Problem] = []
    drafts: list[Draft] = []
    top = read_tree(text)
    defaults: dict[str, Any] = {}
    try:
        if isinstance(top, Mapping):
            for key in top.items:
                if key not in _TOP:
                    problems.append(Problem(top.lines[key], unknown(key, _TOP)))
            try:
                _engine(top)
            except UsageError as problem:
                problems.append(Problem(top.lines["engine"], str(problem)))
            given = top.items.get("defaults")
            defaults = {} if given is None else _settings(mapping_of(given, "defaults"), (), None)
        entries = _entries(top)
    except Wrong as wrong:
        raise BadJobFile([*problems, *wrong.problems]) from None
    for number, entry in enumerate(entries, start=1):
        try:
            for draft in _expanded(entry, number, defaults, shell):
                drafts.append(draft)
                if len(drafts) > MOST_JOBS:
                    raise BadJobFile([Problem(entry.line, f"more than {MOST_JOBS} jobs; split the file")])
        except Wrong as wrong:
            problems += wrong.problems
        if len(problems) >= _MOST_PROBLEMS:
            break
    if problems:
        # An entry that is named by an alias is read twice; what is wrong with it is told once.
        raise BadJobFile(sorted(set(problems))[:_MOST_PROBLEMS])
    return tuple(drafts)


def read_engine(text: str) -> dict[str, Any]:
    """What the document says under ``engine``, as ``engines.block`` reads it; {} where it says nothing, and where that
    is wrong, which ``read_document`` tells with all else that is."""
    if "engine" not in text:  # a document may be long, and is read as a whole only once more for this
        return {}
    try:
        top = read_tree(text)
        return _engine(top) if isinstance(top, Mapping) else {}
    except (BadJobFile, UsageError):
        return {}


def _engine(top: Mapping) -> dict[str, Any]:
    return read_block(plain(top.items["engine"])) if "engine" in top.items else {}


def _entries(top: Node) -> list[Node]:
    jobs = top.items.get("jobs") if isinstance(top, Mapping) else top
    if not isinstance(jobs, Sequence) or not jobs.items:
        raise Wrong(top.line, "no jobs: write a list of them under the key jobs")
    return jobs.items


def _expanded(entry: Node, number: int, defaults: dict[str, Any], shell: bool) -> Iterator[Draft]:
    """The drafts of one entry. Raises Wrong with all that is wrong in it."""
    if isinstance(entry, Scalar):
        entry = Mapping(entry.line, {"command": entry}, {"command": entry.line})
    job = mapping_of(entry, "a job")
    command = job.items.get("command")
    if command is None:
        near = next((key for key in job.items if key in ("cmd", "run", "argv", "script", "commands")), None)
        near = near or next(iter(nearest("command", job.items)), None)
        raise Wrong(job.line, "a job without a command" + (f"; did you mean it by {near!r}?" if near else ""))
    values, rounds = combinations_of(job), _rounds(job)
    expands = any(key in job.items for key in ("matrix", "include", "sweep", "rounds"))
    if len(values) * rounds > MOST_JOBS:
        raise Wrong(job.line, f"{len(values) * rounds} jobs; the most of a file are {MOST_JOBS}")
    index = 0
    for number_of_round in range(1, rounds + 1):
        for value in values:
            index += 1
            places = {**value, "round": str(number_of_round)} if "rounds" in job.items else value
            fill = places if expands else None
            said, (argv, variables) = _both(partial(_settings, job, _ENTRY, fill), partial(_argv, command, fill, shell))
            said = merged(defaults, said)
            if variables:
                said = merged(said, {"env": variables})
            group = _name_all(said, job, value, number_of_round, expands)
            if "rounds" in job.items:
                said["round"] = (said.get("round") or 0) + number_of_round - 1
            proposed = f"job-{number:04d}" + (f"-{index:04d}" if expands else "")
            yield Draft(line=job.line, argv=argv, said=said, proposed=proposed, group=group)


def _both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """What both return. Raises Wrong with the problems of both."""
    try:
        one = first()
    except Wrong as wrong:
        try:
            second()
        except Wrong as also:
            raise Wrong(wrong.problems[0].line, wrong.problems[0].text, (*wrong.problems[1:], *also.problems)) from None
        raise
    return one, second()


def _name_all(said: dict[str, Any], job: Mapping, value: Combination, round_: int, expands: bool) -> str | None:
    """Completes the name of one of several jobs in place; returns what all of them are called together."""
    given = job.items.get("name")
    if not expands or said.get("name") is None or not isinstance(given, Scalar) or given.value is None:
        return None
    if has_placeholder(given.value):
        return None
    parts = [said["name"], sweep.name_part(value), f"round{round_}" if "rounds" in job.items else ""]
    said["name"] = "-".join(part for part in parts if part)
    return given.value


def _argv(command: Node, places: Combination | None, shell: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """The argument list of a command, and the variables in front of it. ``places`` None: braces are mere letters."""
    try:
        if isinstance(command, Sequence):
            words = [word_of(item, "a word of the command") for item in command.items]
            argv = [word if places is None else filled(word, places) for word in words]
            variables: dict[str, str] = {}
        elif shell:
            line = word_of(command, "command")
            argv = [_SHELL, "-c", line if places is None else filled(line, places, for_shell=True)]
            variables = {}
        else:
            variables, argv = leading_variables(split_words(word_of(command, "command").replace("\n", " ")))
            if places is not None:
                argv = [filled(word, places) for word in argv]
                variables = {name: filled(value, places) for name, value in variables.items()}
            variables = {variable(name, value): value for name, value in variables.items()}
        if not argv:
            raise ValueError("the command is empty")
        if any("\0" in word for word in argv):
            raise ValueError("the command has a NUL byte in it")
    except ValueError as problem:
        raise Wrong(command.line, str(problem)) from None
    return tuple(argv), variables


def _settings(job: Mapping, others: tuple[str, ...], places: Combination | None) -> dict[str, Any]:
    """The settings of a mapping by field name; keys of ``others`` are not settings. Raises Wrong with all problems."""
    said: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, node in job.items.items():
        if key in others or (isinstance(node, Scalar) and node.value is None):
            continue
        try:
            if key == "env":
                said["env"] = _variables(mapping_of(node, "env"), places)
                continue
            field = _field(key, others)
            if field in said:
                raise ValueError(f"{key} is said twice")
            said[field] = _value(key, field, _comma_list(node) if field == "needs" else word_of(node, key), places)
        except Wrong as wrong:
            problems += wrong.problems
        except ValueError as problem:
            problems.append(Problem(job.lines[key], str(problem)))
    if problems:
        raise Wrong(problems[0].line, problems[0].text, problems[1:])
    return said


def _field(key: str, others: tuple[str, ...]) -> str:
    if key.replace("_", "-") not in _SETTINGS and key != "num_gpus":
        raise ValueError(unknown(key, (*others, *_SETTINGS)))
    return field_of(key)


def _value(key: str, field: str, word: str, places: Combination | None) -> Any:
    try:
        return value_of(field, word if places is None else filled(word, places))
    except ValueError as problem:
        raise ValueError(f"{key}: {problem}") from None


def _variables(node: Mapping, places: Combination | None) -> dict[str, str]:
    found = {}
    for name, item in node.items.items():
        value = "" if isinstance(item, Scalar) and item.value is None else word_of(item, name)
        found[variable(name, value)] = value if places is None else filled(value, places)
    return found


def _rounds(job: Mapping) -> int:
    node = job.items.get("rounds")
    if node is None:
        return 1
    word = word_of(node, "rounds")
    if not word.isascii() or not word.isdigit() or not 1 <= int(word[:9]) <= _MOST_ROUNDS:
        raise Wrong(node.line, f"rounds: {word!r} is not a whole number from 1 to {_MOST_ROUNDS}")
    return int(word)


def _comma_list(node: Node) -> str:
    return (
        ",".join(word_of(item, "needs") for item in node.items)
        if isinstance(node, Sequence)
        else word_of(node, "needs")
    )
