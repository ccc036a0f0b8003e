"""What the model knows of its own knowledge: asked (P(True)), and read from its hidden state (P(IK))."""

from __future__ import annotations

import math

from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, Need
from gpuherd.qa.measures.registry import measure

_PAPER = "Kadavath et al. 2022 (arXiv 2207.05221)"


@measure("p-true", needs=[Need.P_TRUE], source=f"{_PAPER}: P(True); jlko: p_false_fixed, as log-odds")
def p_true(evidence: Evidence) -> float:
    """The model, asked, does not call its answer true: log((1 - p) / p), p = p("True")."""
    # Not 1 - p: that is 1 for every p below 1e-16, and answers that differ in nats would be tied.
    log_p = given.log_p_true(evidence)
    return math.log(-math.expm1(log_p)) - log_p


@measure("p-true:nll", needs=[Need.P_TRUE], source=f"{_PAPER}: P(True); LM-Polygraph: PTrue")
def p_true_nll(evidence: Evidence) -> float:
    """P(True) in nats, in the same order: -log p("True")."""
    return -given.log_p_true(evidence)


@measure("p-ik", needs=[Need.P_IK], source=f"{_PAPER}: P(IK); jlko: p_ik", aliases=["p_ik"])
def p_ik(evidence: Evidence) -> float:
    """A probe of the hidden state behind the prompt says that the model does not know: 1 - P(IK)."""
    return 1.0 - given.p_ik(evidence)
