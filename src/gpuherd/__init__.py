"""gpuherd runs LLM experiments on GPUs that people share.

Nothing is imported here, so that ``import gpuherd`` and ``gpuherd --help`` stay fast. The public names live in the
rooms: ``gpuherd.gpus`` (see and choose GPUs), ``gpuherd.jobs`` (queue and dispatcher), ``gpuherd.esd`` (spectra).
"""

__version__ = "0.1.0"
