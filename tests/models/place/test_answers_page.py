"""How plans look, of made-up models whose bytes are easy to count. Of real ones: tests/cli/test_plan.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.models.memory.toy import NOTHING, gpus_of, toy

from gpuherd.errors import UsageError
from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import MIB, Reserve, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.answers_page import PlannedModelRow, render_models, render_plan
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.page import Line, RenderContext, Window, memory_option, text_of, unit_for
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.request import PlanOptions, PlanRequest, TrainingOptions, command_words, parse_precision

ASKED = PlanRequest(("toy",), PlanOptions(gpus="3x20MB"), TrainingOptions())
ONE = Workload(1, 16, 16)


def look(lines: list[Line]) -> str:
    return "\n".join(text_of(line) for line in lines)


def told(
    architecture: Architecture,
    cards: tuple[GpuSpec, ...],
    width: int,
    *,
    workload: Workload = ONE,
    reserve: Reserve = NOTHING,
    unicode: bool = True,
) -> str:
    plan = make_plan(architecture, cards, Precision.BF16, workload, reserve)
    return look(
        render_plan(plan, RenderContext(cards, ASKED, ("GPU 9 is left out: alice uses it",)), Window(width, unicode))
    )


PLAN_AT_80 = """\
toy in bf16 fits on 3 of 3 GPUs of 22 MiB: 1 replica, at most 3 answers of 32
tokens at once.

GPU 0  |████████████████████████·············|  14 of 22 MiB  embedding, layer 0
GPU 1  |██████████████████████████████████░··|  21 of 22 MiB  layers 1-2
GPU 2  |████████████████████████·············|  14 of 22 MiB  layer 3, head
█ weights  ▒ KV cache  ░ workspace  · left

GPU  weights  KV cache  workspace  context  reserve  together  left  (MiB)
0         14        <1         <1        0        0        14     8
1         20        <1         <1        0        0        21     1
2         14        <1         <1        0        0        14     8
all       48         1         <1        0        0        49    17

model    toy: 25,165,824 parameters in 4 layers (toy); as transformers builds it
         from its config
weights  48 MiB (0.05 GB) in bf16
planned  1 answer, 16 + 16 tokens each
speed    one GPU computes at a time: several give room, not speed; --parallel
         tensor gives both
note: GPU 9 is left out: alice uses it

In your own queue:
  gpuherd submit --num-gpus 3 --mem 21MB -- python your_script.py

By SLURM:
  sbatch --gres=gpu:3 your_job.sh

The device map for from_pretrained, as JSON:
  gpuherd plan toy --gpus 3x20MB --device-map"""

REFUSAL_AT_40 = """\
Doesn't fit: toy in bf16 needs 49 MiB on
2 GPUs of 22 MiB: the fullest, GPU 0
(embedding, layers 0-1), lacks 3 MiB.

GPU 0  25 of 22 MiB: embedding, layers
       0-1
|##################################!!!!|
GPU 1  25 of 22 MiB: layers 2-3, head
|##################################!!!!|
# weights  ! does not fit

GPU  weights  KV cache  workspace  left
0         24        <1         <1    -3
1         24        <1         <1    -3
all       48         1         <1    -5

model    toy: 25,165,824 parameters in 4
         layers (toy); as transformers
         builds it from its config
weights  48 MiB (0.05 GB) in bf16
planned  1 answer, 16 + 16 tokens each
note: GPU 9 is left out: alice uses it

What would fit:
- in int8 it fits on 2 GPUs, with at
  most"""


def test_a_plan_in_eighty_columns() -> None:
    assert told(toy((10, 10, 10, 10), per_token=4096), gpus_of(22, 22, 22), 80) == PLAN_AT_80


def test_a_refusal_in_forty_columns_of_ascii() -> None:
    text = told(toy((10, 10, 10, 10), per_token=4096), gpus_of(22, 22), 40, unicode=False)
    assert text.startswith(REFUSAL_AT_40), text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_every_look_keeps_within_its_window(width: int, unicode: bool) -> None:
    for architecture in (toy(), toy((10,) * 40), toy((300,), tied=True)):
        for cards in (gpus_of(22, 22), gpus_of(*[80] * 40), gpus_of(2000, 40, 22)):
            for reserve in (NOTHING, Reserve(2 * MIB, MIB, 0.05)):
                text = told(architecture, cards, width, reserve=reserve, unicode=unicode)
                assert max(map(len, text.splitlines())) <= width, text
                assert unicode or text.isascii()


def test_tensor_parallel_and_replicas_are_told() -> None:
    cards = gpus_of(40, 40, 40, 40)
    plan = make_plan(toy(), cards, Precision.BF16, ONE, NOTHING, parallel="tensor")
    text = look(render_plan(plan, RenderContext(cards, ASKED), Window(120)))
    assert text.count("1/4 of each layer") == 4
    assert "--device-map" not in text
    assert "-- torchrun --nproc-per-node 4 your_script.py" in text
    plan = make_plan(toy(), gpus_of(60, 60, 60), Precision.BF16, ONE, NOTHING)
    text = look(render_plan(plan, RenderContext(gpus_of(60, 60, 60), ASKED), Window(120)))
    assert "fits on 1 of 3 GPUs of 60 MiB: 3 replicas, each with at most" in text
    assert "3 at once, on GPU 0; 1; 2" in text
    assert "sbatch --gres=gpu:1 --array=0-2" in text


def test_memory_that_others_use_is_drawn() -> None:
    cards = tuple(replace(card, free=card.free - 30 * MIB) for card in gpus_of(100))
    text = told(toy(), cards, 100)
    assert "x used by others" in text
    assert "of 70 MiB" in text


def test_names_of_strangers_are_printable() -> None:
    cards = tuple(replace(card, label="0\x1b[31m", name="\x07") for card in gpus_of(100))
    architecture = replace(toy(), model="a\x1b]0;b", assumptions=("it is\nassumed",))
    asked = replace(ASKED, models=("a\x1b]0;b c",))
    text = look(
        render_plan(
            make_plan(architecture, cards, Precision.BF16, ONE, NOTHING), RenderContext(cards, asked), Window(80)
        )
    )
    assert text.replace("\n", "").isprintable()
    assert "$'a\\x1b]0;b c'" in text


def test_figures_of_every_size() -> None:
    assert [unit_for(size << 30).of(size << 30) for size in (1, 5, 50)] == ["1024", "5.00", "50.0"]
    assert unit_for(50 << 30).of(-1) == "-<0.1"
    assert unit_for(1 << 30).of(1) == "<1"


def test_a_line_for_each_of_several_models() -> None:
    cards = gpus_of(60, 60)
    fits = make_plan(toy(), cards, Precision.BF16, ONE, NOTHING)
    refused = make_plan(toy((200,)), cards, Precision.BF16, ONE, NOTHING)
    rows = [
        PlannedModelRow("one", fits),
        PlannedModelRow("two", refused),
        PlannedModelRow("three\x1b", None, "three is no model"),
    ]
    lines = [text_of(line) for line in render_models(rows, cards, ("a remark",), Window(120))]
    assert lines[0] == "1 of 3 models fit on 2 GPUs of 60 MiB, one at a time."
    assert [line.split()[0] for line in lines[3:6]] == ["one", "two", "three\\x1b"]
    assert [line.rstrip().rpartition("  ")[2] for line in lines[3:6]] == ["fits", "lacks 0.1 GiB", "no plan"]
    assert lines[-1] == "note: a remark"
    assert any(line.startswith("- toy in bf16 needs") for line in lines)


# ---- commands --------------------------------------------------------------------------------------------------------


def test_an_alternative_changes_what_was_asked_and_keeps_the_rest() -> None:
    options = PlanOptions(gpus="2x24GB", batch=8, dtype=Precision.BF16, reserve="1GB+5%", cuda_context=300)
    asked = PlanRequest(("org/model name",), options, TrainingOptions(), simulate="2x24GB")
    words = ["gpuherd", "--simulate", "2x24GB", "plan", "org/model name"]
    kept = ["--reserve", "1GB+5%", "--cuda-context", "300MB"]
    before = ["--dtype", "bf16", "--batch", "8", "--gpus", "2x24GB"]
    assert command_words(asked) == [*words, *before, *kept]
    before[1] = "int8"
    assert command_words(asked, ("--dtype", "int8")) == [*words, *before, *kept]


def test_another_dtype_takes_the_place_of_the_names_ending() -> None:
    asked = PlanRequest(("m-8bit",), PlanOptions(), TrainingOptions())
    assert command_words(asked, ("--batch", "2")) == ["gpuherd", "plan", "m-8bit", "--batch", "2"]
    assert command_words(asked, ("--dtype", "nf4")) == ["gpuherd", "plan", "m", "--dtype", "nf4"]


def test_an_alternative_takes_back_what_it_replaces() -> None:
    asked = PlanRequest(("m",), PlanOptions(gpus_per_job=3, parallel="tensor"), TrainingOptions())
    assert command_words(asked, ("--parallel", "auto")) == ["gpuherd", "plan", "m", "--parallel", "auto"]
    asked = PlanRequest(("m",), PlanOptions(), TrainingOptions(train="sft", no_checkpointing=True))
    changed = command_words(asked, ("--checkpointing", "--loss", "chunked"))
    assert changed == ["gpuherd", "plan", "m", "--train", "sft", "--loss", "chunked"]


def test_memory_to_ask_for_leaves_room_for_the_driver() -> None:
    assert memory_option(37_000, 40 << 30) == "37GB"
    assert memory_option(24_100, 24 << 30) == "24100MB"


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "reserve"),
    [
        ("2GB", Reserve(fixed=2048 * MIB, share=0.0)),
        ("5%", Reserve(fixed=0, share=0.05)),
        ("1GB+2.5%", Reserve(fixed=1024 * MIB, share=0.025)),
        ("0", Reserve(fixed=0, share=0.0)),
    ],
)
def test_a_reserve_in_words(word: str, reserve: Reserve) -> None:
    assert PlanOptions(reserve=word).kept() == reserve


def test_a_context_in_words() -> None:
    assert PlanOptions(cuda_context=300).kept() == replace(Reserve(), context=300 * MIB)


def test_dtypes_as_libraries_write_them() -> None:
    words = ("torch.bfloat16", "float16", "half", "8bit", "NF4_DQ", "nf4dq")
    assert [parse_precision(word).value for word in words] == ["bf16", "fp16", "fp16", "int8", "nf4-dq", "nf4-dq"]
    with pytest.raises(UsageError, match="'int7' is no dtype"):
        parse_precision("int7")
