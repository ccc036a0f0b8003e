"""All that the loops of GRPO, PPO and REINFORCE stand on: a policy in training, what it samples (by itself or by
vLLM), its reference, its checkpoints and curves, in one process or several.

Every process samples the problems that are its share; then all know all rollouts, and each learns from every
``size``-th of them. Draws belong to (seed, round, step, problem, sample), orders to (seed, round, step): so any number
of processes does the same but for the order of additions. Under FSDP each process holds the whole policy while it
samples and weighs (``TrainEngine.gathered``), and its rows of the reference.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from types import TracebackType
from typing import Any, Self

from gpuherd.engines import progress
from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.checkpoints import DIGESTS
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.engine.options import StepOptions, Stopped, hooks_of
from gpuherd.posttrain.engine.recorder import Recorder
from gpuherd.posttrain.engine.train_engine import StepFigures, TrainEngine
from gpuherd.posttrain.policy_gradient.algorithm import ASKED_AT_ONCE, MODEL, Hooks, SamplingOptions, plain_roll
from gpuherd.posttrain.policy_gradient.forward import forward_spare, score_rollouts
from gpuherd.posttrain.policy_gradient.objective import Objective
from gpuherd.posttrain.policy_gradient.plan import Plan, digest_of, figures_of, grouped, plan_of
from gpuherd.posttrain.policy_gradient.policy import (
    Reference,
    ValuedPolicy,
    critic_before,
    evaluating,
    load_for_training,
    load_value_head,
    reference_of,
    save_policy,
)
from gpuherd.posttrain.rollout.following import FollowingSampler
from gpuherd.posttrain.rollout.mismatch import Correction, MismatchMeter
from gpuherd.posttrain.rollout.sampler import RolloutBackend, Sampler
from gpuherd.posttrain.types import BackendName, Problem, Rollout, Row, Training


class RolloutTrainer:
    """A training at work; a context manager that saves the policy at its end.

    Attributes:
        world: this process among all.
        trainee: the policy (with a value head, where it has one) and its optimiser.
        sampler: the policy as it is, answering.
        correction: by which the loss is weighed where sampler and trainer differ.
        meter: what the losses tell how far they differ; its figures are in the curves.
        kept: what ``finish`` was given with the step that this training goes on behind; empty at the beginning.
        device, temperature: where tensors go, and by what logits are divided.
    """

    def __init__(
        self,
        work: Training,
        options: SamplingOptions,
        name: str,
        *,
        online: bool,
        kl_coef: float,
        correction: Correction = Correction.NONE,
        passes: int = 1,
        valued: bool = False,
        greedy: bool = False,
        identity: Mapping[str, Any] | None = None,
    ):
        """Loads policy and reference, and goes on from the newest checkpoint. Raises what loading raises, UsageError
        for a checkpoint of another training.

        Args:
            online: the training samples; False: it learns from the rows that were collected.
            kl_coef: above 0 a reference is loaded.
            correction: weighs the loss where sampler and trainer differ.
            passes: how often each step's rollouts are gone over.
            valued: the policy gets a value head.
            greedy: the most probable answer is taken, and none is drawn.
            identity: what else decides what is learnt.
        """
        import torch

        self.work, self.options, self.online, self.correction = work, options, online, correction
        self.world = DistEnv.from_environment(work.device)
        self.device, self.temperature = self.world.device, work.sampling.temperature
        self._hooks = hooks_of(work, Hooks(save_every=options.save_every))
        self._steps: StepOptions = work.steps or StepOptions()
        self._greedy = greedy
        self._collected = [] if online else grouped(_rollouts(work.rows[-1] if work.rows else ()))
        self.plan = self._planned(passes)
        torch.manual_seed(work.seed)  # of a new adapter, and of dropout
        loaded = load_for_training(work.policy, work.precision, self.device, options.lora, sharded=self._steps.shards)
        self._policy = loaded.module
        module = loaded.module
        if valued:
            module = ValuedPolicy(loaded.module)
            if (critic := critic_before(work.policy)) is not None:
                load_value_head(module, critic)
        self.trainee = TrainEngine(
            module,
            options.optimiser,
            self._steps,
            self.world,
            total_steps=max(1, self.plan.updates()),
            amp_dtype=work.precision.amp_dtype,
        )
        self._reference: Reference | None = None
        if kl_coef > 0:
            self._reference = reference_of(work, self._policy, self.world)
        self.sampler = self._sampler(loaded.tokenizer)
        self._recorder = Recorder(
            work.folder,
            self.trainee,
            self._hooks,
            identity={**self._identity(name), **(identity or {})},
            total_steps=self.plan.steps,
        )
        restored = self._recorder.restored
        self.kept: Mapping[str, Any] = {} if restored is None else restored.extra
        self._begun = 0 if restored is None else restored.step
        self._started = 0.0
        self.meter = MismatchMeter(self.trainee.module, apart=self.by_vllm)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                save_policy(self.work.folder, self.trainee, self.sampler.tokenizer)
                self._recorder.end(self.work.folder / MODEL)
        finally:
            if isinstance(self.sampler, FollowingSampler):
                self.sampler.release()
            self._recorder.close()
            self.world.close(together=kind is None or issubclass(kind, Stopped))

    # ---- a step ------------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, from 0."""
        for step in range(self._begun, self.plan.steps):
            progress.report(step, self.plan.steps, "train")
            self._started = time.monotonic()
            yield step
        progress.report(self.plan.steps, self.plan.steps, "train")

    def rollouts(self, step: int) -> list[Rollout]:
        """The rollouts of a step, of all processes, in the same order in each."""
        if not self.online:
            return [each for unit in self.plan.units(step) for each in self._collected[unit]]
        return self.sampled(step, self.problems(step))

    def problems(self, step: int) -> list[Problem]:
        """The problems of a step that samples."""
        return [self.work.problems[unit] for unit in self.plan.units(step)]

    def sampled(self, step: int, problems: Sequence[Problem], attempt: int = 0) -> list[Rollout]:
        """Answers of the policy as it is to these problems, of all processes, in the same order in each; those of
        another ``attempt`` at a step are others."""
        roll = self._hooks.roll or plain_roll(self.work.task, self.work.reward_batch_size, greedy=self._greedy)
        mine = self.world.share(problems)
        stream = f"round {self.work.round} step {step}{f' again {attempt}' if attempt else ''}"
        with self._sampling():
            made = roll(self.sampler, mine, self.options.samples_per_prompt, stream) if mine else []
        found = {(each.problem, each.sample): each for share in self.world.gather(made) for each in share}
        samples = range(self.options.samples_per_prompt)
        return [found[each.id, sample] for each in problems for sample in samples]

    def mine(self, rollouts: Sequence[Rollout]) -> list[int]:
        """The places of the rollouts that this process learns from."""
        return list(self.world.share(range(len(rollouts))))

    def of_all(self, mine: Sequence[float], count: int) -> list[float]:
        """Numbers of all ``count`` rollouts, in their order, of those that each process has of ``mine``."""
        found = [0.0] * count
        for rank, each in enumerate(self.world.gather(list(mine))):
            found[rank :: self.world.size] = each
        return found

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[list[float]], list[list[float]]]:
        """Log-probs of this process's rollouts under the policy as it is, and values, where it has a value head."""
        with self._whole(), evaluating(self.trainee.plain), self._autocast():
            return score_rollouts(self.trainee.plain, rollouts, self.temperature, self.device, self._rows)

    def ref_logprobs(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Log-probs of this process's rollouts under the reference; empty lists where ``kl_coef`` is 0."""
        if self._reference is None:
            return [[] for _ in rollouts]
        with self._whole() if self._reference.shared else nullcontext(), self._autocast():
            return self._reference.log_probs(rollouts, self.temperature, self._rows)

    def old_logprobs(
        self, step: int, rollouts: Sequence[Rollout], now: Sequence[Sequence[float]] | None = None
    ) -> Sequence[Sequence[float | None] | None]:
        """Log-probs of this process's rollouts that ratios are to: under the policy before it learns from them. None
        each where it drew them itself and a step has one update alone: it is its own.

        Of collected rollouts those that were recorded; with a correction the policy's own before the step (its weights
        then take the ratio of these to the recorded ones), and None for a token without a recorded one.

        Args:
            now: those of ``score``, where they are there already.
        """
        corrects = self.correction is not Correction.NONE
        if self._recorded:
            return [each.log_probs for each in rollouts]
        if now is None and self.plan.updates_of(step) == 1 and not corrects:
            return [None] * len(rollouts)
        scored = self.score(rollouts)[0] if now is None else now
        if self.online:
            return scored
        return [
            [mine if known is not None else None for mine, known in zip(mines, each.log_probs, strict=True)]
            for mines, each in zip(scored, rollouts, strict=True)
        ]

    def objective(self, **how: Any) -> Objective:
        """The loss of the policy in training; ``how``: further arguments of ``Objective``."""
        return Objective(
            self.trainee.module,
            self.device,
            self.temperature,
            self.options.loss_type,
            self.work.sampling.max_new_tokens,
            recorded=self._recorded,
            correction=self.correction,
            correction_cap=getattr(self.options, "sampler_clip", 2.0),
            meter=self.meter,
            **how,
        )

    def minibatches(self, step: int, pass_number: int, count: int) -> Iterator[list[int]]:
        """Of each minibatch the places among ``mine``; those that other processes learn from are left out."""
        rank, size = self.world.rank, self.world.size
        for places in self.plan.minibatches(step, pass_number, count):
            yield [place // size for place in places if place % size == rank]

    def finish(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        learnt: Sequence[StepFigures],
        figures: Mapping[str, float | None],
        keep: Mapping[str, Any],
    ) -> None:
        """Ends a step: its figures, an evaluation and a checkpoint where they are due.

        Raises Stopped where the training is asked to stop.
        """
        done = step + 1
        logged: dict[str, float | None] = {**figures_of(rollouts, learnt), **figures, **self.meter.figures(self.world)}
        logged["seconds"] = time.monotonic() - self._started
        every = self._hooks.evaluate_every
        evaluated: Mapping[str, float] | None = None
        if self._hooks.evaluate is not None and every and (done % every == 0 or done == self.plan.steps):
            with self._sampling():
                evaluated = self._hooks.evaluate(self.sampler, done)
        self._recorder.step(done, logged, evaluated=evaluated, extra=keep, saves_last=True)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _sampler(self, tokenizer: Any) -> RolloutBackend:
        """The policy as it is, answering: in this process, or in vLLM's."""
        work = self.work
        if self.by_vllm:
            return FollowingSampler(
                work.policy,
                self._policy,
                work.precision,
                self.world,
                work.sampling,
                work.problems,
                work.folder,
                turns=self._hooks.turns,
            )
        return Sampler.over(
            self._policy, tokenizer, work.sampling, device=self.device, amp_dtype=work.precision.amp_dtype
        )

    @property
    def by_vllm(self) -> bool:
        """Whether the training samples by vLLM, whose log-probs are not the trainer's."""
        return self.online and self.work.backend is BackendName.VLLM

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The sampler is the policy as it is."""
        follower = self.sampler if isinstance(self.sampler, FollowingSampler) else None
        with self._whole():
            if follower is not None:
                follower.follow(self.trainee.steps_done)
            yield
        if follower is not None:
            follower.sleep()

    @property
    def _recorded(self) -> bool:
        """Whether ratios are to the log-probs that were recorded."""
        return not self.online and self.correction is Correction.NONE

    @property
    def _rows(self) -> int:
        """Rollouts that are scored at once."""
        return ASKED_AT_ONCE * self._steps.micro_batch_size

    def _planned(self, passes: int) -> Plan:
        options = self.options
        samples = options.samples_per_prompt
        sizes = [samples] * len(self.work.problems) if self.online else [len(each) for each in self._collected]
        return plan_of(
            sizes,
            batch_size=options.batch_size,
            epochs=options.epochs,
            max_steps=options.max_steps,
            minibatch_size=options.minibatch_size,
            passes=passes,
            seed=f"{self.work.seed} {self.work.round}",
        )

    def _identity(self, name: str) -> dict[str, Any]:
        """All that decides what is learnt."""
        work = self.work
        return {
            "algorithm": name,
            "options": deciding(self.options),
            "policy": work.named(work.policy),
            "reference": work.named(work.reference),
            DIGESTS: dict(work.digests),
            "round": work.round,
            "sampling": {name: each for name, each in asdict(work.sampling).items() if name != "batch_size"},
            "precision": asdict(work.precision),
            "seed": work.seed,
            "sizes": list(self.plan.sizes),
            "data": digest_of(self._collected) if self._collected else digest_of([work.problems]),
            "task": None if work.task is None else work.task.name,
            **({} if self.correction is Correction.NONE else {"sampler_correction": self.correction.value}),
            **({"sampler": self.work.backend.value} if self.by_vllm else {}),
        }

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Each process has the whole policy, and may call it as often as it likes."""
        with self.trainee.gathered():
            if self._steps.shards:
                # FSDP wants its root called first; the sampler calls what is inside.
                import torch

                with torch.no_grad():
                    forward_spare(self.trainee.plain, self.device)
            yield

    def _autocast(self) -> Any:
        import torch

        amp = self.work.precision.amp_dtype
        dtype = None if amp is None else getattr(torch, amp)
        return torch.autocast(self.device.partition(":")[0], dtype, enabled=dtype is not None)


def deciding(options: SamplingOptions) -> dict[str, Any]:
    """The options that decide what is learnt, as checkpoints of all versions know them."""
    values = asdict(options)
    later = {each.name for each in fields(options) if each.metadata.get("later") and values[each.name] == each.default}
    return {name: each for name, each in values.items() if name != "save_every" and name not in later}


def _rollouts(rows: Sequence[Row]) -> list[Rollout]:
    """The collected rows. Raises UsageError for comparisons, which have no rewards."""
    found = [each for each in rows if isinstance(each, Rollout)]
    if len(found) != len(rows):
        raise UsageError("online=false: comparisons were collected, and policy gradients learn from rollouts")
    return found
