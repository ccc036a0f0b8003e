"""Post-training: policies are sampled, trained and compared in rounds, over as many GPUs as are free.

Names that a guide gives to the parts of such a system stand for ours here; they load when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.posttrain.algos.registry import PostTrainingAlgorithms, ValueGuidedAlgorithms
    from gpuherd.posttrain.runs.gpu_manager import GPUManager, get_gpu_manager
    from gpuherd.posttrain.runs.parallel import ParallelDataGenerator, ParallelJobExecutor
    from gpuherd.posttrain.runs.priority import TrainingJob

__all__ = [
    "GPUManager",
    "ParallelDataGenerator",
    "ParallelJobExecutor",
    "PostTrainingAlgorithms",
    "TrainingJob",
    "ValueGuidedAlgorithms",
    "get_gpu_manager",
]

_HOME_OF = {
    "GPUManager": "runs.gpu_manager",
    "get_gpu_manager": "runs.gpu_manager",
    "ParallelDataGenerator": "runs.parallel",
    "ParallelJobExecutor": "runs.parallel",
    "TrainingJob": "runs.priority",
    "PostTrainingAlgorithms": "algos.registry",
    "ValueGuidedAlgorithms": "algos.registry",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME_OF)
