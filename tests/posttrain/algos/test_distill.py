"""On-policy distillation: its divergence, its gradient, and what it learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.posttrain import tiny
from tests.posttrain.algos.training_work import SAMPLING, curves, same, weights, work
from tests.posttrain.letters import Letters
from tests.posttrain.policy_gradient.rollouts import MIXED
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos import distill
from gpuherd.posttrain.algos.distill import Distill, Distillation, DistillOptions, teacher_device
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks, LossType
from gpuherd.posttrain.rollout.mismatch import MismatchMeter
from gpuherd.posttrain.types import Collecting, Policy, Precision, Rollout, Split


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the policy's tokens."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("teacher"), seed=7)


def logits_of(law: Sequence[float]) -> Tensor:
    return torch.tensor(law, dtype=torch.float64).log()


def generalised_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """As the loss has it, of whole logits over the tokens that both have."""
    width = min(student.shape[-1], teacher.shape[-1])
    log_q, log_p = (torch.log_softmax(each[..., :width], dim=-1) for each in (student, teacher))
    return distill._divergence(log_q, log_p, beta)


def kl(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(p * math.log(p / q) for p, q in zip(one, other, strict=True) if p)


def by_hand(policy: Sequence[float], teacher: Sequence[float], beta: float) -> float:
    if beta in (0, 1):
        return kl(teacher, policy) if beta == 0 else kl(policy, teacher)
    mixed = [beta * p + (1 - beta) * q for p, q in zip(teacher, policy, strict=True)]
    return beta * kl(teacher, mixed) + (1 - beta) * kl(policy, mixed)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_is_what_its_formula_says(beta: float) -> None:
    q, p = [0.7, 0.2, 0.1], [0.1, 0.3, 0.6]
    found = generalised_jsd(logits_of(q), logits_of(p), beta)
    assert float(found) == pytest.approx(by_hand(q, p, beta), rel=1e-12)
    assert float(generalised_jsd(logits_of(p), logits_of(p), beta)) == pytest.approx(0, abs=1e-15)


def test_its_limits_are_the_two_divergences() -> None:
    q, p = logits_of([0.7, 0.2, 0.1]), logits_of([0.1, 0.3, 0.6])
    near = 1e-6
    assert float(generalised_jsd(q, p, near)) / near == pytest.approx(float(generalised_jsd(q, p, 0)), rel=1e-4)
    assert float(generalised_jsd(q, p, 1 - near)) / near == pytest.approx(float(generalised_jsd(q, p, 1)), rel=1e-4)


def test_tokens_that_have_no_probability_and_padded_tables_do_no_harm() -> None:
    q, p = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.0, -math.inf, 1.0, 30.0, 30.0])
    found = generalised_jsd(q, p, 0.5)
    law, other = torch.softmax(q, 0).tolist(), torch.softmax(p[:3], 0).tolist()
    assert float(found) == pytest.approx(by_hand(law, other, 0.5), rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", [LossType.GRPO, LossType.DAPO, LossType.DR_GRPO])
def test_loss_and_gradient_are_those_of_a_plain_loop(
    policy_model: Path, teacher: Path, kind: LossType, beta: float
) -> None:
    from transformers import AutoModelForCausalLM

    module, other = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64) for each in (policy_model, teacher)
    )
    how = Distillation(module, other.requires_grad_(False), "cpu", 0.8, kind, 7, beta)
    ours = how.loss(MIXED).total / how.weight(MIXED)
    ours.backward()  # type: ignore[no-untyped-call]
    found = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    module.zero_grad()

    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for each in MIXED:
        ids, start = torch.tensor([[*each.prompt_ids, *each.ids]]), len(each.prompt_ids) - 1
        laws = [torch.softmax(one(input_ids=ids).logits[0] / 0.8, dim=-1) for one in (module, other)]
        losses = []
        for place, chosen in enumerate(each.by_policy):
            if not chosen:
                continue
            q, p = (law[start + place] for law in laws)
            if beta == 0:
                losses.append((p * (p / q).log()).sum())
            elif beta == 1:
                losses.append((q * (q / p).log()).sum())
            else:
                mixed = beta * p + (1 - beta) * q
                losses.append(beta * (p * (p / mixed).log()).sum() + (1 - beta) * (q * (q / mixed).log()).sum())
        added = torch.stack(losses).sum()
        total = total + (added / len(losses) if kind == LossType.GRPO else added)
        weight += {LossType.GRPO: 1, LossType.DAPO: len(losses), LossType.DR_GRPO: 7}[kind]
    hand = total / weight
    hand.backward()  # type: ignore[no-untyped-call]
    assert float(ours.detach()) == pytest.approx(float(hand.detach()), rel=1e-9)
    wanted = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert largest > 1e-4
    assert max(float((each - wanted[name]).abs().max()) for name, each in found.items()) < 1e-9 * max(1.0, largest)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_chunks_change_nothing_and_no_law_of_all_tokens_is_ever_there(
    policy_model: Path, teacher: Path, beta: float
) -> None:
    """Neither forward nor backward, of the policy or of the teacher."""
    from transformers import AutoModelForCausalLM

    module, other = (AutoModelForCausalLM.from_pretrained(each) for each in (policy_model, teacher))
    other.requires_grad_(False)
    vocabulary = module.config.vocab_size
    tokens = sum(sum(each.by_policy) for each in MIXED)
    found = []
    for chunk in (2, 3, tokens):
        module.zero_grad()
        how = Distillation(module, other, "cpu", 0.8, LossType.DAPO, 7, beta, chunk=chunk)
        how.loss(MIXED[:1])  # heads are looked at once
        with _Widest(vocabulary) as widest:
            loss = how.loss(MIXED).total
            loss.backward()  # type: ignore[no-untyped-call]
        assert widest.rows == chunk
        found.append((loss.detach(), [each.grad.clone() for each in module.parameters() if each.grad is not None]))
    for loss, gradients in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-5, atol=0)
        for one, other_one in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(one, other_one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("missing", [0, 3])
def test_the_mismatch_of_its_own_answers_is_measured_where_it_learns(policy_model: Path, missing: int) -> None:
    """Over the policy's own vocabulary, also where the teacher's table is narrower."""
    from transformers import AutoModelForCausalLM

    module, other = (AutoModelForCausalLM.from_pretrained(policy_model) for _ in range(2))
    other.resize_token_embeddings(module.config.vocab_size - missing)
    recorded = []
    for each in MIXED:
        ids, start = torch.tensor([[*each.prompt_ids, *each.ids]]), len(each.prompt_ids) - 1
        with torch.no_grad():
            law = (module(input_ids=ids).logits[0, start:-1] / 0.8).log_softmax(-1)
        log_probs = law.gather(1, torch.tensor(each.ids)[:, None])[:, 0]
        recorded.append(replace(each, log_probs=tuple((log_probs - 0.5).tolist())))
    kept = replace(recorded[0], problem="of the teacher", log_probs=(None,) * len(recorded[0].ids))
    meter = MismatchMeter(module)
    how = Distillation(module, other.requires_grad_(False), "cpu", 0.8, LossType.DAPO, 7, 0.5, chunk=2, meter=meter)
    how.loss([kept, *recorded])
    found = meter.figures(DistEnv.single())
    assert found["sampler_kl"] == pytest.approx(-0.5, abs=1e-5)
    assert found["sampler_weight_max"] == pytest.approx(math.exp(0.5), rel=1e-5)
    how.loss([kept])
    assert meter.figures(DistEnv.single()) == {}


class _Widest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most rows of any tensor of numbers over the vocabulary that an operation returns, but the head's weight."""

    def __init__(self, vocabulary: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self._vocabulary = 0, vocabulary

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 1 and not _is_view(each, args):
                self.rows = max(
                    self.rows, each.numel() // self._vocabulary if each.shape[-1] == self._vocabulary else 0
                )
        return made


def _is_view(made: Tensor, args: Any) -> bool:
    """Such as a transposed weight, which is no law."""
    return any(isinstance(each, Tensor) and each.data_ptr() == made.data_ptr() for each in args)


def test_a_model_whose_head_is_not_plain_has_the_same_loss(policy_model: Path, teacher: Path) -> None:
    """Its logits come whole, of the tokens that are asked for."""
    from transformers import AutoModelForCausalLM

    losses = []
    for plain in (True, False):
        module, other = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64) for each in (policy_model, teacher)
        )
        if not plain:
            for each in (module, other):
                each.lm_head = torch.nn.Sequential(each.lm_head)
                each.get_output_embeddings = lambda each=each: each.lm_head
        how = Distillation(module, other.requires_grad_(False), "cpu", 0.8, LossType.GRPO, 7, 0.5, chunk=2)
        loss = how.loss(MIXED).total
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = module.get_input_embeddings().weight.grad
        losses.append((float(loss.detach()), gradient))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-12)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-9, atol=1e-12)


def test_a_teacher_elsewhere_teaches_the_same_to_the_bit(policy_model: Path, teacher: Path, tmp_path: Path) -> None:
    """On a CPU another place is the same memory; what is given to it and comes back goes the same way."""
    same_place, own = Distill(options(teacher)), Distill(options(teacher, teacher_device="own"))
    assert own.frozen_apart and not same_place.frozen_apart
    same_place.train(work(policy_model, tmp_path / "same"))
    own.train(work(policy_model, tmp_path / "own"))
    assert curves(tmp_path / "same") == curves(tmp_path / "own")
    assert same(tmp_path / "same/model", tmp_path / "own/model")


def test_the_teachers_gpu_is_behind_those_of_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert teacher_device(DistEnv.single("cpu")) == "cpu"
    assert teacher_device(DistEnv.single("cuda:0")) == "cuda:1"
    assert [teacher_device(DistEnv(rank, 2, rank, f"cuda:{rank}", "nccl")) for rank in (0, 1)] == ["cuda:2", "cuda:3"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"teacher_device=own: .* are 2, and torch sees 1; show it more"):
        teacher_device(DistEnv.single("cuda:0"))


def options(teacher: Path, **change: Any) -> DistillOptions:
    return DistillOptions(
        **{"teacher": str(teacher), "lr": 5e-3, "epochs": 4, "batch_size": 4, "samples_per_prompt": 2, **change}
    )


def test_the_policy_comes_nearer_to_its_teacher(policy_model: Path, teacher: Path, tmp_path: Path) -> None:
    assert algorithm_class("gkd") is Distill
    before = weights(teacher)
    policy = Distill(options(teacher)).train(work(policy_model, tmp_path))
    assert policy == Policy(str(tmp_path / "model"))
    lines = curves(tmp_path)
    assert len(lines) == 8 and all(line["own"] == 1 for line in lines)
    assert lines[-1]["jsd"] < 0.8 * lines[0]["jsd"]
    assert lines[0]["jsd"] == pytest.approx(lines[0]["loss"], rel=1e-5)
    assert all(torch.equal(each, weights(teacher)[name]) for name, each in before.items())


def test_collected_answers_are_the_teachers(policy_model: Path, teacher: Path, tmp_path: Path) -> None:
    problems = Letters().problems(Split.TRAIN, 8, 0)
    policies = [Policy(str(each)) for each in (policy_model, teacher)]
    works = [Collecting(Letters(), problems, each, each, 0, SAMPLING, Precision(), "cpu") for each in policies]
    half = Distill(options(teacher, on_policy=0.5))
    rows = list(half.collect(works[0]))
    assert rows == list(half.collect(works[1]))  # whatever the policy is
    assert half.collects and not Distill(options(teacher)).collects
    assert not list(Distill(options(teacher)).collect(works[0]))

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    half.train(work(policy_model, straight, rows=(rows,)))
    lines = curves(straight)
    assert all(line["own"] == 0.5 and line["rollouts"] == 8 for line in lines)
    stopping = iter([False, False, True]).__next__
    with pytest.raises(Stopped):
        half.train(work(policy_model, broken, rows=(rows,), hooks=Hooks(stopping=stopping)))
    others = [replace(each, ids=each.ids[:1], by_policy=(True,)) for each in rows if isinstance(each, Rollout)]
    with pytest.raises(UsageError, match="rows"):
        half.train(work(policy_model, broken, rows=(others,)))
    half.train(work(policy_model, broken, rows=(rows,)))
    assert same(straight / "model", broken / "model") and curves(broken) == lines

    Distill(options(teacher, on_policy=0.0)).train(work(policy_model, tmp_path / "rows", task=None, rows=(rows,)))
    alone = curves(tmp_path / "rows")
    assert all(line["own"] == 0 for line in alone) and alone[-1]["jsd"] < alone[0]["jsd"]
    with pytest.raises(UsageError, match=r"on_policy=0: problem train-\d has 0 collected answers"):
        Distill(options(teacher, on_policy=0.0)).train(work(policy_model, tmp_path / "none", task=None))


def test_a_teacher_of_other_tokens_is_refused_before_anything_is_loaded(
    policy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuherd.posttrain.rollout import loading

    other = tiny.tiny_llama(tmp_path / "other", characters="abc")
    monkeypatch.setattr(loading, "load_anew", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError, match=r"can't teach .* they have other tokenizers"):
        Distill(options(other)).train(work(policy_model, tmp_path / "out"))


def test_ranges(teacher: Path) -> None:
    bad: tuple[tuple[str, Any], ...] = (
        ("beta", 1.1),
        ("beta", -0.1),
        ("on_policy", 1.5),
        ("loss_type", "gspo"),
        ("teacher", ""),
    )
    for name, wrong in bad:
        with pytest.raises(UsageError, match=f"^{name}="):
            replace(options(teacher), **{name: wrong})
