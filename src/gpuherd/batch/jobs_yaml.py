"""Reads ``jobs.yaml``: jobs with options, and entries that expand to a matrix or a sweep of values. Pure.

::

    engine: {name: slurm, partition: gpu}
    defaults: {mem: 20GB, retries: 2}
    jobs:
      - name: train
        command: python train.py --lr {lr} --seed {seed}
        matrix: {lr: [0.1, 0.01], seed: [1, 2]}
      - command: [python, evaluate.py, "two words"]
        needs: train

Words stay as they are written: ``0.10`` is not turned into 0.1. All errors are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuherd.batch.assemble import (
    KEYS,
    MOST_JOBS,
    SHELL,
    BadJobFile,
    Entry,
    Problem,
    merged,
    option_of,
    unknown,
    variable,
)
from gpuherd.batch.commands_txt import leading_variables, split_words
from gpuherd.batch.sweep import (
    KEY,
    BadParameter,
    Combination,
    Distribution,
    Sweep,
    check_keys,
    combinations,
    described,
    filled,
    has_placeholder,
    name_part,
    one_of,
    size,
)
from gpuherd.engines.options import read_block
from gpuherd.errors import UsageError
from gpuherd.options import nearest, parse
from gpuherd.units import positive_int, whole_number

# --- the document as a tree ------------------------------------------------------------------------------------------
#
# Plain nodes that know their lines, made of the events of PyYAML's parser, a state machine in C. A hostile document
# can't run code (tags are refused), turn a name into a number (scalars stay as they are written), repeat a key
# unnoticed, or grow: an alias is the same node again, and depth is bounded, for the parser, which needs no stack, as
# for the recursion here.

_MOST_DEPTH = 20
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))


@dataclass(slots=True)
class Scalar:
    """A word as it is written; None for null or nothing."""

    line: int
    value: str | None


@dataclass(slots=True)
class Sequence:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Mapping:
    """Keys with values, in order; each key with its own line."""

    line: int
    items: dict[str, Node] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


Node = Scalar | Sequence | Mapping


def read_tree(text: str) -> Node:
    """The document's top node. Raises BadJobFile for text that is no YAML, or uses what a job file can't have."""
    import yaml

    reader = _Reader(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    try:
        return reader.document()
    except yaml.MarkedYAMLError as problem:
        line = 0 if problem.problem_mark is None else problem.problem_mark.line + 1
        raise _wrong(line, f"no YAML: {problem.problem or problem.context}") from None
    except yaml.YAMLError as problem:
        raise _wrong(0, f"no YAML: {problem}") from None


def as_data(node: Node) -> Any:
    """The node as dicts, lists, texts and None."""
    if isinstance(node, Mapping):
        return {key: as_data(item) for key, item in node.items.items()}
    return [as_data(item) for item in node.items] if isinstance(node, Sequence) else node.value


class _Reader:
    """Builds nodes from the parser's events."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        # None for a node that is not complete: an alias inside it would make a circle.
        self._anchors: dict[str, Node | None] = {}

    def document(self) -> Node:
        import yaml

        top: Node | None = None
        for event in self._events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent) and top is not None:
                raise _wrong(line, "a second document begins; a job file is one")
            if isinstance(event, yaml.NodeEvent):
                top = self._node(event, 0)
        if top is None:
            raise _wrong(0, "nothing is in it")
        return top

    def _node(self, event: Any, depth: int) -> Node:
        import yaml

        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            known = self._anchors.get(str(event.anchor))
            if known is None:
                raise _wrong(line, f"*{event.anchor} refers to nothing that is complete above it")
            return known
        if event.tag not in (None, "!") and event.tag not in _PLAIN_TAGS:
            raise _wrong(line, f"the tag {event.tag} is not possible in a job file")
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            is_null = not event.style and event.tag is None and event.value in _NOTHING
            node = Scalar(line, None if is_null else event.value)
        elif depth == _MOST_DEPTH:
            raise _wrong(line, f"nested more than {_MOST_DEPTH} deep")
        else:
            if event.anchor is not None:
                self._anchors[event.anchor] = None
            inside = self._inside(depth + 1)
            if isinstance(event, yaml.SequenceStartEvent):
                node = Sequence(line, list(inside))
            else:
                node = _mapping(line, inside)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _inside(self, depth: int) -> Iterator[Node]:
        """The nodes up to the end of the list or mapping that has begun."""
        from yaml import CollectionEndEvent

        for event in self._events:
            if isinstance(event, CollectionEndEvent):
                return
            yield self._node(event, depth)


def _mapping(line: int, nodes: Iterator[Node]) -> Mapping:
    """The mapping of these keys and values. ``<<: *defaults`` adds the keys of another that this one doesn't have."""
    made = Mapping(line)
    for key in nodes:
        if not isinstance(key, Scalar) or key.value is None:
            raise _wrong(key.line, "a key must be a word")
        if key.value in made.items:
            first = made.lines[key.value]
            raise _wrong(key.line, f"the key {key.value!r} is there twice; the first is in line {first}")
        made.lines[key.value] = key.line
        made.items[key.value] = next(nodes)
    others = made.items.pop("<<", None)
    for other in others.items if isinstance(others, Sequence) else [] if others is None else [others]:
        if not isinstance(other, Mapping):
            raise _wrong(made.lines["<<"], "<< takes a mapping, or a list of some")
        made.items = other.items | made.items
        made.lines = other.lines | made.lines
    return made


def _wrong(line: int, text: str) -> BadJobFile:
    return BadJobFile([Problem(line, text)])


class Wrong(Exception):
    """Something wrong with an entry; the other entries can still be read. ``problems``: at least one."""

    def __init__(self, line: int, text: str, also: Iterable[Problem] = ()):
        super().__init__(text)
        self.problems = (Problem(line, text), *also)

    @staticmethod
    def all_of(problems: Iterable[Problem]) -> Wrong:
        """One for several problems, of which there is at least one."""
        first, *others = problems
        return Wrong(first.line, first.text, others)


def mapping_of(node: Node, what: str) -> Mapping:
    """The node as a mapping. Raises Wrong."""
    if not isinstance(node, Mapping):
        raise Wrong(node.line, f"{what} must be a mapping of keys to values")
    return node


def word_of(node: Node, what: str) -> str:
    """The node as a word. Raises Wrong."""
    if not isinstance(node, Scalar) or node.value is None:
        raise Wrong(node.line, f"{what} must be a word")
    return node.value


# --- the jobs of a document ------------------------------------------------------------------------------------------


_MOST_PROBLEMS = 100
_MOST_ROUNDS = 10_000
_TOP = ("engine", "defaults", "jobs")
# The keys of an entry that are no options of its jobs.
_ENTRY = ("command", "matrix", "include", "exclude", "sweep", "rounds")
_OPTIONS = (*(key for key in KEYS if key != "env.NAME"), "env")
_SWEEP = ("method", "samples", "seed", "parameters")
_METHODS = ("grid", "random")


def read_document(text: str, *, shell: bool = False) -> tuple[Entry, ...]:
    """The jobs of a document, in order, each matrix expanded. ``shell``: /bin/sh runs commands that are one string.

    Raises BadJobFile with everything that is wrong (the first 100 problems).
    """
    problems: list[Problem] = []
    found: list[Entry] = []
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
            if "defaults" in top.items:
                defaults = _options(mapping_of(top.items["defaults"], "defaults"), (), None, problems)
        entries = _entries(top)
    except Wrong as wrong:
        raise BadJobFile([*problems, *wrong.problems]) from None
    for number, entry in enumerate(entries, start=1):
        try:
            for each in _expanded(entry, number, defaults, shell):
                found.append(each)
                if len(found) > MOST_JOBS:
                    raise BadJobFile([Problem(entry.line, f"more than {MOST_JOBS} jobs; split the file")])
        except Wrong as wrong:
            problems += wrong.problems
        if len(problems) >= _MOST_PROBLEMS:
            break
    if problems:
        # An entry that an alias names again is read twice; its problems are reported once.
        raise BadJobFile(sorted(set(problems))[:_MOST_PROBLEMS])
    return tuple(found)


def read_engine(text: str) -> dict[str, Any]:
    """The options of the block ``engine``; {} without one, and where it is wrong, which ``read_document`` reports."""
    if "engine" not in text:  # a document may be long, and is read a second time for this
        return {}
    try:
        top = read_tree(text)
        return _engine(top) if isinstance(top, Mapping) else {}
    except (BadJobFile, UsageError):
        return {}


def _engine(top: Mapping) -> dict[str, Any]:
    return read_block(as_data(top.items["engine"])) if "engine" in top.items else {}


def _entries(top: Node) -> list[Node]:
    jobs = top.items.get("jobs") if isinstance(top, Mapping) else top
    if not isinstance(jobs, Sequence) or not jobs.items:
        raise Wrong(top.line, "no jobs: write a list of them under the key jobs")
    return jobs.items


def _expanded(entry: Node, number: int, defaults: dict[str, Any], shell: bool) -> Iterator[Entry]:
    """The jobs of one entry. Raises Wrong with all that is wrong in it."""
    if isinstance(entry, Scalar):
        entry = Mapping(entry.line, {"command": entry}, {"command": entry.line})
    job = mapping_of(entry, "a job")
    command = job.items.get("command")
    if command is None:
        near = next((key for key in job.items if key in ("cmd", "run", "argv", "script", "commands")), None)
        near = near or next(iter(nearest("command", job.items)), None)
        raise Wrong(job.line, "a job without a command" + (f"; did you mean it by {near!r}?" if near else ""))
    values, rounds = _combinations(job), _rounds(job)
    expands = any(key in job.items for key in ("matrix", "include", "sweep", "rounds"))
    if len(values) * rounds > MOST_JOBS:
        raise Wrong(job.line, f"{len(values) * rounds} jobs; the most of a file are {MOST_JOBS}")
    index = 0
    for number_of_round in range(1, rounds + 1):
        for value in values:
            index += 1
            places = {**value, "round": str(number_of_round)} if "rounds" in job.items else value
            problems: list[Problem] = []
            given = _options(job, _ENTRY, places if expands else None, problems)
            argv, variables = _argv(command, places if expands else None, shell, problems)
            if problems:
                raise Wrong.all_of(problems)
            given = merged(defaults, given)
            if variables:
                given = merged(given, {"env": variables})
            group = _complete_name(given, job, value, number_of_round) if expands else None
            if "rounds" in job.items:
                given["round"] = given.get("round", 0) + number_of_round - 1
            proposed = f"job-{number:04d}" + (f"-{index:04d}" if expands else "")
            yield Entry(line=job.line, argv=argv, given=given, proposed=proposed, group=group)


def _complete_name(given: dict[str, Any], job: Mapping, value: Combination, round_: int) -> str | None:
    """Gives each of several jobs of an entry a name of its own, in place; returns the name for all of them together."""
    node = job.items.get("name")
    if not isinstance(node, Scalar) or node.value is None or has_placeholder(node.value):
        return None
    parts = [given["name"], name_part(value), f"round{round_}" if "rounds" in job.items else ""]
    given["name"] = "-".join(part for part in parts if part)
    return node.value


def _argv(
    command: Node, places: Combination | None, shell: bool, problems: list[Problem]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The argument list of a command, and the variables in front of it. ``places`` None: braces are plain letters."""

    def fill(word: str, *, for_shell: bool = False) -> str:
        return word if places is None else filled(word, places, for_shell=for_shell)

    argv: list[str] = []
    variables: dict[str, str] = {}
    try:
        if isinstance(command, Sequence):
            argv = [fill(word_of(item, "a word of the command")) for item in command.items]
        elif shell:
            argv = [SHELL, "-c", fill(word_of(command, "command"), for_shell=True)]
        else:
            # Filled after the split: a value never becomes several words.
            variables, words = leading_variables(split_words(word_of(command, "command").replace("\n", " ")))
            argv = [fill(word) for word in words]
            variables = {variable(name, value): fill(value) for name, value in variables.items()}
        if not argv:
            raise ValueError("the command is empty")
        if any("\0" in word for word in argv):
            raise ValueError("the command has a NUL byte in it")
    except Wrong as wrong:
        problems += wrong.problems
    except ValueError as problem:
        problems.append(Problem(command.line, str(problem)))
    return tuple(argv), variables


def _options(
    job: Mapping, others: tuple[str, ...], places: Combination | None, problems: list[Problem]
) -> dict[str, Any]:
    """The options in a mapping by field name; keys of ``others`` are none. What is wrong is added to ``problems``."""
    given: dict[str, Any] = {}
    for key, node in job.items.items():
        if key in others or (isinstance(node, Scalar) and node.value is None):
            continue
        try:
            if key == "env":
                given["env"] = _variables(mapping_of(node, "env"), places)
                continue
            field, spec = option_of(key, (*others, *_OPTIONS))
            if field in given:
                raise ValueError(f"{key} is given twice")
            if field == "needs" and isinstance(node, Sequence):
                word = ",".join(word_of(item, key) for item in node.items)
            else:
                word = word_of(node, key)
            try:
                given[field] = parse(spec, word if places is None else filled(word, places))
            except ValueError as problem:
                raise ValueError(f"{key}: {problem}") from None
        except Wrong as wrong:
            problems += wrong.problems
        except ValueError as problem:
            problems.append(Problem(job.lines[key], str(problem)))
    return given


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


# --- matrix and sweep of an entry ------------------------------------------------------------------------------------


def _combinations(job: Mapping) -> list[Combination]:
    """All combinations of an entry: each of the matrix with every setting of the sweep; one empty one without either.

    Raises Wrong.
    """
    axes = _axes(job)
    sweep = _sweep(job)
    if size(axes) > MOST_JOBS:
        raise Wrong(job.line, f"the matrix stands for {size(axes)} jobs; the most of a file are {MOST_JOBS}")
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
    if not KEY.fullmatch(key) or key == "round":
        raise Wrong(line, f"{key!r} can't be a key of {where}; use letters, digits and _ (round is taken)")


def _parts(job: Mapping, key: str, axes: dict[str, list[str]], *, whole: bool) -> list[dict[str, str]]:
    """The entries of ``include`` (``whole``: each must have all keys of the matrix) or ``exclude``."""
    given = job.items.get(key)
    if given is None:
        return []
    if not isinstance(given, Sequence):
        raise Wrong(given.line, f"{key} takes a list of mappings")
    found = []
    for item in given.items:
        part = {name: word_of(node, name) for name, node in mapping_of(item, key).items.items()}
        for name in part:
            if not KEY.fullmatch(name) or name == "round" or (axes and name not in axes):
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
    block = mapping_of(given, "sweep")
    problems = [Problem(block.lines[key], f"sweep: {unknown(key, _SWEEP)}") for key in block.items if key not in _SWEEP]
    table = block.items.get("parameters")
    if table is None:
        problems.append(Problem(block.line, "sweep: it says nothing of parameters"))
    parameters = {} if table is None else _parameters(mapping_of(table, "parameters"), problems)
    numbers: dict[str, int] = {}
    for key, number in (("samples", positive_int), ("seed", whole_number)):
        if key in block.items:
            try:
                numbers[key] = number(word_of(block.items[key], key))
            except ValueError as problem:
                problems.append(Problem(block.lines[key], f"{key}: {problem}"))
    random = _is_random(block, problems)
    if problems:
        raise Wrong.all_of(problems)
    sweep = Sweep(
        parameters=parameters, samples=numbers.get("samples") if random else None, seed=numbers.get("seed", 0)
    )
    _check_size(block, sweep)
    return sweep


def _is_random(block: Mapping, problems: list[Problem]) -> bool:
    """Whether settings are drawn: with ``method: random``, and with ``samples`` where no method is given."""
    method = word_of(block.items["method"], "method") if "method" in block.items else None
    if method is not None and method not in _METHODS:
        problems.append(Problem(block.lines["method"], f"method: {method!r}; possible: {', '.join(_METHODS)}"))
    if method == "random" and "samples" not in block.items:
        problems.append(Problem(block.lines["method"], "method: random needs samples: how many settings are drawn"))
    random = method == "random" or (method is None and "samples" in block.items)
    for key in ("samples", "seed"):
        if method in (None, "grid") and not random and key in block.items:
            problems.append(Problem(block.lines[key], f"{key} is for method: random; a grid has all combinations"))
    return random


def _check_size(block: Mapping, sweep: Sweep) -> None:
    """Raises Wrong for a grid over parameters without a finite number of values, and for more samples than settings."""
    table = mapping_of(block.items["parameters"], "parameters")
    there = sweep.combinations()
    if sweep.samples is None and there is None:
        text = "can't be counted off: a grid needs a list or a step (or say samples)"
        endless = [name for name, parameter in sweep.parameters.items() if parameter.size() is None]
        raise Wrong.all_of([Problem(table.lines[name], f"{name} {text}") for name in endless])
    if sweep.samples is not None and there is not None and sweep.samples > there:
        raise Wrong(
            block.lines["samples"],
            f"samples: {sweep.samples}, and there are only {there} different settings; method: grid takes all of them",
        )


def _parameters(table: Mapping, problems: list[Problem]) -> dict[str, Distribution]:
    """Each parameter's distribution; errors are added to ``problems``."""
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
