"""Post-training: policies are sampled, trained and compared in rounds, over as many GPUs as are free.

Names that a guide gives to the parts of such a system stand for ours here; they load when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.posttrain.algos.registry import PostTrainingAlgorithms, ValueGuidedAlgorithms
    from gpuherd.posttrain.engine.callbacks import TrainEvent
    from gpuherd.posttrain.runs.guide_names import (
        GPUManager,
        ParallelDataGenerator,
        ParallelJobExecutor,
        get_gpu_manager,
    )
    from gpuherd.posttrain.runs.plan import TrainingJob

__all__ = [
    "GPUManager",
    "ParallelDataGenerator",
    "ParallelJobExecutor",
    "PostTrainingAlgorithms",
    "TrainEvent",
    "TrainingJob",
    "ValueGuidedAlgorithms",
    "get_gpu_manager",
]

_HOME_OF = {
    "GPUManager": "runs.guide_names",
    "get_gpu_manager": "runs.guide_names",
    "ParallelDataGenerator": "runs.guide_names",
    "ParallelJobExecutor": "runs.guide_names",
    "TrainEvent": "engine.callbacks",
    "TrainingJob": "runs.plan",
    "PostTrainingAlgorithms": "algos.registry",
    "ValueGuidedAlgorithms": "algos.registry",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME_OF)
