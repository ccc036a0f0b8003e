"""Policy gradients: advantages, losses, and what the loops of GRPO, PPO and REINFORCE have in common."""
