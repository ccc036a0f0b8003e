"""Ray as an engine: tasks of a cluster that we join, or jobs of its job server by address.

``engine`` is the follower's side, ``channel`` its way to the process beside Ray (``driver``), which alone imports Ray:
``connecting`` and ``tasks`` (with ``spanning`` for several nodes), or ``job_server``. ``worker`` is what runs in Ray's
own workers. ``address``, ``resources`` and ``ends`` are pure; ``messages`` is what the two processes say to each other.
"""

from gpuherd.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
