"""Replays a queue against a machine or cluster of any size, in virtual time, with the policy that real runs use."""
