"""Star graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.data.star_graph import (
    Settings,
    StarGraphs,
    check_path,
    graph_of,
    make_tokenizer,
)
from gpuherd.posttrain.types import Problem, Split

SPLITS = tuple(Split)


def task(**settings: int) -> StarGraphs:
    return StarGraphs(Settings(**{"train": 300, "heldout": 50, "test": 100, **settings}))


@pytest.mark.parametrize(("degree", "length"), [(2, 2), (2, 3), (3, 3), (2, 5), (5, 5)])
def test_graphs_are_stars_as_the_papers_have_them(degree: int, length: int) -> None:
    for problem in task(degree=degree, length=length, nodes=50, train=100).problems(Split.TRAIN, None, 0):
        graph = graph_of(problem.prompt)
        assert len(graph.edges) == degree * (length - 1)
        assert len({node for edge in graph.edges for node in edge}) == 1 + degree * (length - 1)
        assert len(graph.arms) == degree
        assert all(len(arm) == length and arm[0] == graph.start for arm in graph.arms)
        path = tuple(map(int, problem.answers[0].split(",")))
        assert path in graph.arms
        assert (path[0], path[-1]) == (graph.start, graph.goal)
        wrong = [",".join(map(str, arm)) for arm in graph.arms if arm[-1] != graph.goal]
        assert len(set(wrong)) == degree - 1
        assert problem.answers[0] not in wrong
        for each in wrong:
            check = check_path(graph, each)
            assert all(check.follows)
            assert not check.right


def test_no_graph_is_in_two_splits_whatever_the_order_of_its_edges_and_the_seed() -> None:
    def graphs(split: Split, seed: int) -> list[object]:
        found: list[object] = []
        for problem in task(degree=2, length=3, nodes=6, train=120, seed=seed).problems(split, None, 0):
            graph = graph_of(problem.prompt)
            found.append((frozenset(graph.edges), graph.goal))
        return found

    seen = {split: {*graphs(split, 0), *graphs(split, 1)} for split in SPLITS}
    assert not seen[Split.TRAIN] & seen[Split.TEST]
    assert not seen[Split.TRAIN] & seen[Split.HELDOUT]
    assert not seen[Split.HELDOUT] & seen[Split.TEST]
    assert len(graphs(Split.TRAIN, 0)) > len(set(graphs(Split.TRAIN, 0)))  # the space is small enough to meet again
    prompts = [each.prompt for each in task(degree=2, length=3, nodes=6, train=120).problems(Split.TRAIN, None, 0)]
    assert len(prompts) == len(set(prompts)) == 120
    assert graphs(Split.TRAIN, 0) != graphs(Split.TRAIN, 1)
    assert graphs(Split.TRAIN, 0) == graphs(Split.TRAIN, 0)


def test_paths_are_checked_node_by_node() -> None:
    problem = Problem("p", "5,2|3,8|5,3|2,7/5,8=", ("5,3,8",))
    said = ["5,3,8", "5 3 8", " 5, 3, 8\n", "5,2,7", "5,3", "5,3,8,8", "3,5,8", "", "5,x", "5,3,8 done", "9" * 40]
    rewards = task().rewards([problem] * len(said), said)
    assert [each.value for each in rewards] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert rewards[3].note == "follows edges, not to the goal"
    assert rewards[3].parts == {"edges": 1.0}
    assert rewards[6].parts["edges"] == 0.0
    assert rewards[7].note == "not a list of nodes"
    assert check_path(graph_of(problem.prompt), "5,3,8,8").follows == (True, True, True, False)
    with pytest.raises(ValueError, match="invalid literal"):
        graph_of("no graph")


def test_the_tokenizer_has_a_token_a_node(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path, 50)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    problem = task(degree=2, length=5).problems(Split.TRAIN, 1, 0)[0]
    prompt = tokenizer(problem.prompt)["input_ids"]
    answer = tokenizer(problem.answers[0])["input_ids"]
    assert (len(prompt), len(answer)) == (27, 5)  # 3 d (l - 1) + 3, and l, as published
    assert tokenizer.unk_token_id not in prompt + answer
    assert tokenizer(problem.prompt + problem.answers[0])["input_ids"] == prompt + answer
    assert task().rewards([problem], [tokenizer.decode(answer)])[0].correct
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert len(tokenizer) == 50 + 7


def test_more_graphs_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="there are about"):
        make_task("star-graph", TaskOptions({"degree": 2, "length": 2, "nodes": 4}))
    with pytest.raises(UsageError, match="too few"):
        make_task("star_graph", TaskOptions({"degree": 5, "length": 5, "nodes": 20}))
    for huge in ({"nodes": 10**9, "degree": 10**4, "length": 10**4}, {"nodes": 10**6}):
        with pytest.raises(UsageError, match="10000 at most"):
            make_task("star_graph", TaskOptions(huge))
    with pytest.raises(UsageError, match="train=100000000; from 0 to"):
        make_task("star_graph", TaskOptions({"train": 10**8}))
    with pytest.raises(UsageError, match="at least 2"):
        make_task("star_graph", TaskOptions({"length": 1}))
    with pytest.raises(UsageError, match="star_graph, test: 101 problems were asked for and there are 100"):
        task().problems(Split.TEST, 101, 0)
