"""What one entry of ``jobs.yaml`` expands to: the combinations of its ``matrix`` with the settings of its ``sweep``.

Pure. Reads the nodes; what a combination is, ``matrix`` knows, and what a draw is, ``sweep`` and ``distributions``.
"""

from __future__ import annotations

from gpuherd.batch import matrix
from gpuherd.batch.distributions import BadParameter, Distribution, check_keys, described, one_of
from gpuherd.batch.draft import MOST_JOBS, Problem
from gpuherd.batch.job_options import number_from_1, unknown, whole_number
from gpuherd.batch.matrix import Combination, combinations
from gpuherd.batch.nodes import Wrong, mapping_of, word_of
from gpuherd.batch.sweep import Sweep
from gpuherd.batch.yaml_tree import Mapping, Node, Scalar, Sequence

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
