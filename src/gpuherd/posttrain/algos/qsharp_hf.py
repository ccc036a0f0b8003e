"""Q#-HF: Q# from human feedback, with a reward model that is learnt from preferences in the reward's place.

The baseline of the PITA paper (Bobbili et al. 2025, arXiv 2507.20067) and its code:

    comparisons are collected as PITA's, or read from a file; a proxy reward model is learnt from them (Bradley and
    Terry); it scores both sides of each; a histogram of these scores is fitted (mle); guidance is by its expectation

Three phases, each done when its file is there, so that a killed training goes on in the right one: ``proxy/model``,
``scores.json``, ``model``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpuherd.atomic import atomic_write
from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.guidance.collecting import comparisons
from gpuherd.posttrain.guidance.data import of_comparisons, rows_of
from gpuherd.posttrain.guidance.options import ComparingOptions, Loss
from gpuherd.posttrain.guidance.training import GuidedAlgorithm, refuse_value_model, train_guide
from gpuherd.posttrain.preference.proxy import ProxyOptions, compared_by_people, load_proxy, train_proxy
from gpuherd.posttrain.types import Collecting, Comparison, Policy, Row, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv


class ProxyLoss(StrEnum):
    """What the proxy reward model is learnt by."""

    BRADLEY_TERRY = "bradley_terry"


@dataclass(frozen=True, kw_only=True)
class QSharpHFOptions(ComparingOptions, ProxyOptions):
    """Q#-HF's, in addition to ``ProxyOptions``. Raises UsageError.

    Attributes:
        loss_type: of the classifier.
        proxy_loss_type: what the proxy is learnt by.
    """

    loss_type: Loss | None = Loss.MLE
    proxy_loss_type: ProxyLoss = ProxyLoss.BRADLEY_TERRY

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_proxy()
        if self.loss_type is Loss.BRADLEY_TERRY:
            raise UsageError("loss_type=bradley_terry needs no proxy: that is PITA; Q#-HF's is mle, bce or mse")

    def usual_mode(self, loss: Loss) -> Mode:  # noqa: ARG002 - the same for all
        """The expectation."""
        return Mode.EXPECTATION


@register
class QSharpFromHumanFeedback(GuidedAlgorithm):
    """See the module."""

    name: ClassVar[str] = "QSharp-HF"
    aliases: ClassVar[tuple[str, ...]] = ("q#-hf",)
    Options: ClassVar[type[QSharpHFOptions]] = QSharpHFOptions

    def collect(self, work: Collecting) -> Iterator[Row]:
        """Comparisons of two ends of the policy's greedy answers; nothing where preferences are read from a file."""
        return iter(()) if self.options.preferences is not None else comparisons(work, self.options)

    def train(self, work: Training) -> Policy:
        """The proxy first, then its scores, then the classifier."""
        from gpuherd.posttrain.engine.dist_env import DistEnv

        with DistEnv.from_environment(work.device) as world:
            pairs = self._comparisons(work)
            refuse_value_model(work.reference.model, work.value_model)
            scores = self._scores(work, train_proxy(work, pairs, self.options), pairs, world)
            return train_guide(of_comparisons([pairs], self.options, scores), work, self.options)

    def _comparisons(self, work: Training) -> list[Comparison]:
        """Of all rounds."""
        if self.options.preferences is None:
            return [each for rows in work.rows for each in rows_of(Comparison, rows)]
        return compared_by_people(self.options.preferences, work.reference, chat=work.sampling.use_chat_template)

    def _scores(
        self, work: Training, proxy: Path, pairs: Sequence[Comparison], world: DistEnv
    ) -> list[tuple[float, float]]:
        """The proxy's scores of both sides, chosen first. Kept in a file: a score that is read again on another
        machine may differ by rounding, and then the data of a resumed training would be other data."""
        path = work.folder / "scores.json"
        if world.is_main and not path.exists():
            model = load_proxy(proxy, world.device, work.reward_batch_size)
            sides = [
                (*each.prompt_ids, *each.context_ids, *side)
                for each in pairs
                for side in (each.chosen_ids, each.rejected_ids)
            ]
            atomic_write(path, json.dumps(model.scores_of_ids(sides)).encode() + b"\n")
        world.barrier()
        found = [float(each) for each in json.loads(path.read_bytes())]
        if len(found) != 2 * len(pairs):
            raise UsageError(
                f"{path} has {len(found)} scores of {len(pairs)} comparisons: it is of another training; choose "
                "another output folder, or the old options"
            )
        return list(zip(found[::2], found[1::2], strict=True))
