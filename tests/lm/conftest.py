"""The small language models of the tests of answers."""

from tests.qa.conftest import chatting, gpt2, trained

__all__ = ["chatting", "gpt2", "trained"]
