"""commands.txt: commands, what is said of them, and every error with its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.batch.assemble import BadJobFile, Content, FileRules, assemble
from gpuherd.batch.commands_txt import read_commands
from gpuherd.jobs.job import Job


def jobs(text: str, **how: object) -> tuple[Job, ...]:
    return assemble(read_commands(text), FileRules(**how)).jobs  # type: ignore[arg-type]


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(BadJobFile) as told:
        assemble(read_commands(text))
    return [(problem.line, problem.text) for problem in told.value.problems]


def test_everything_that_can_be_said() -> None:
    text = """\
# a comment
#gpuherd default mem=20GB retries=3 env.A=1
python first.py

#gpuherd gpus=1-4 priority=-2 name=large timeout=2h stage-timeout=10m heartbeat=90s nodes=2 cpus=8 host-mem=64GB
# a comment between
#gpuherd needs=line-0003 round=2 cost=1.5 family=f cwd=/tmp result=out.txt env.B="two words" mem=1GB share=no
python second.py
"""
    first, large = jobs(text)
    assert first == Job(name="line-0003", argv=("python", "first.py"), memory_mb=20480, retries=3, env={"A": "1"})
    assert large == Job(
        name="large",
        argv=("python", "second.py"),
        gpus=1,
        gpus_at_most=4,
        nodes=2,
        cpus=8,
        host_memory_mb=65536,
        memory_mb=1024,
        priority=-2,
        needs=("line-0003",),
        round=2,
        cost=1.5,
        family="f",
        retries=3,
        timeout_s=7200,
        stage_timeout_s=600,
        heartbeat_s=90,
        env={"A": "1", "B": "two words"},
        cwd="/tmp",
        result="out.txt",
    )


def test_nodes_cores_and_main_memory_are_numbers_above_0() -> None:
    assert problems("#gpuherd nodes=0 cpus=many host-mem=much\na\n") == [
        (1, "cpus: 'many' is not a whole number above 0"),
        (1, "host-mem: 'much' is not a size; write 20GB, 1.5GB or 800MB"),
        (1, "nodes: '0' is not a whole number above 0"),
    ]


def test_a_bare_share_and_defaults_that_change() -> None:
    text = "#gpuherd default mem=1GB share\na\n#gpuherd default mem=2GB\n#gpuherd share=no\nb\n"
    assert [(job.share, job.memory_mb) for job in jobs(text)] == [(True, 1024), (False, 2048)]


def test_continued_lines_count_from_their_first() -> None:
    first, second = jobs("a \\\n  b \\\r\n  c\r\nd\r\n")
    assert (first.name, first.argv) == ("line-0001", ("a", "b", "c"))
    assert (second.name, second.argv) == ("line-0004", ("d",))


def test_a_comment_is_not_continued() -> None:
    assert [job.argv for job in jobs("# see C:\\\na\n")] == [("a",)]


def test_a_remark_about_gpuherd_is_a_comment_and_a_setting_with_a_blank_is_not() -> None:
    assert jobs("# gpuherd runs these\na\n")[0].gpus == 1
    assert jobs("# gpuherd gpus=2\na\n")[0].gpus == 2
    assert jobs("#gpuherdgpus=2\na\n")[0].gpus == 1


def test_with_a_shell_lines_stay_as_they_are() -> None:
    entries = read_commands("A=1 b | c > d # e\n#gpuherd name=x\nf \\\n  && g\n", shell=True)
    assert [entry.argv for entry in entries] == [
        ("/bin/sh", "-c", "A=1 b | c > d # e"),
        ("/bin/sh", "-c", "f \\\n  && g"),
    ]


def test_all_errors_are_told_at_once_with_their_lines() -> None:
    text = """\
a | b
#gpuherd gpu=2 mem=lots
c
CUDA_VISIBLE_DEVICES=1 d
#gpuherd name=a,b needs
e 'f
#gpuherd env.GPUHERD_X=1 env.1=2 gpus=2 gpus=3
A=1
#gpuherd
g
#gpuherd default nonsense
#gpuherd name=last
"""
    told = problems(text)
    assert [line for line, _ in told] == [1, 2, 2, 4, 5, 5, 6, 7, 7, 7, 8, 9, 11, 12]
    by_line = {line: " / ".join(text for at, text in told if at == line) for line, _ in told}
    assert "did you mean gpus?" in by_line[2]
    assert "'lots' is not a size" in by_line[2]
    assert "--gpu-list" in by_line[4]
    assert "needs=…" in by_line[5]
    assert "not closed" in by_line[6]
    assert "twice" in by_line[7]
    assert "none follows" in by_line[12]


def test_a_name_given_twice_a_need_of_nothing_and_a_circle() -> None:
    assert problems("#gpuherd name=x\na\n#gpuherd name=x\nb\n") == [(4, "the name 'x' is taken: line 2 has it")]
    assert problems("#gpuherd name=train\na\n#gpuherd needs=trian\nb\n") == [
        (4, "'line-0004' needs 'trian', and there is no such job; did you mean 'train'?")
    ]
    [(line, circle)] = problems("#gpuherd name=x needs=y\na\n#gpuherd name=y needs=x\nb\n")
    assert (line, circle) == (2, "jobs need each other in a circle: 'x' needs 'y' needs 'x' (lines 2, 4)")
    both = problems("#gpuherd name=x needs=x\na\n#gpuherd name=y needs=z\nb\n#gpuherd name=z needs=y\nc\n")
    assert [line for line, _ in both] == [2, 4] and "'y' needs 'z' needs 'y' (lines 4, 6)" in both[1][1]
    assert problems("true\n#gpuherd name=x needs=x\na\n") == [(3, "jobs need each other in a circle: 'x' needs 'x'")]
    [(line, late)] = problems("#gpuherd name=x round=1\na\n#gpuherd needs=x\nb\n")
    assert line == 4
    assert "'x' of round 1" in late


def test_a_name_that_begins_as_a_flag_does() -> None:
    for said in ("name=-f", "name=--all", "family=-", "needs=a,-b"):
        [(line, text)] = problems(f"#gpuherd {said}\na\n")
        assert line == 1
        assert "begins with - would be taken for a flag" in text
    assert problems("#gpuherd share\na\n")[0][0] == 2


def test_a_last_line_that_is_not_finished() -> None:
    assert problems("a\nb \\") == [(2, "a backslash at the end, with nothing after it")]


def test_names_stay_with_their_commands() -> None:
    """Lines may move; a line that was changed is another job; names never tell the command."""
    before = jobs("secret --key 1\nb\nb\nc\n")
    assert [job.name for job in before] == ["line-0001", "line-0002", "line-0003", "line-0004"]
    known = {job.name: Content.of(job) for job in before}
    after = jobs("new\nb\nsecret --key 1\nb\nb\nchanged\n", known=known)
    assert [(job.name, job.argv[0]) for job in after] == [
        ("line-0001.2", "new"),
        ("line-0002", "b"),
        ("line-0001", "secret"),
        ("line-0003", "b"),
        ("line-0005", "b"),
        ("line-0006", "changed"),
    ]
    again = jobs("new\nb\nsecret --key 1\nb\nb\nchanged\n", known=known | {job.name: Content.of(job) for job in after})
    assert [job.name for job in again] == [job.name for job in after]


def test_what_the_command_line_says_counts_for_jobs_that_say_nothing() -> None:
    first, second = jobs("a\n#gpuherd gpus=0 retries=0\nb\n", gpus=2, retries=5)
    assert (first.gpus, first.retries) == (2, 5)
    assert (second.gpus, second.retries) == (0, 0)


@given(st.text(alphabet="ab=#gpuherd defalt nam\\\n'\"|$", max_size=80))
def test_any_text_gives_jobs_or_problems_with_lines(text: str) -> None:
    try:
        found = assemble(read_commands(text)).jobs
    except BadJobFile as told:
        assert told.problems
        assert all(0 <= problem.line <= text.count("\n") + 1 for problem in told.problems)
    else:
        assert len({job.name for job in found}) == len(found)


def test_twenty_thousand_lines_take_moments() -> None:
    import time

    began = time.process_time()
    found = jobs("".join(f"python train.py --seed {seed}\n" for seed in range(20_000)))
    assert len(found) == 20_000
    assert time.process_time() - began < 2


def test_errors_are_one_printable_line_each() -> None:
    with pytest.raises(BadJobFile) as told:
        read_commands("x\x1b[31m | y\n#gpuherd \x1b]0;evil\x07=1\nz\n")
    lines = told.value.of("evil\nname.txt").lines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in [*lines, str(told.value)])
