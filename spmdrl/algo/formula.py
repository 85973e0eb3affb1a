"""Algorithms by name, with what the documentation, the configuration and the loop must know of each.

The tables of estimators and policy losses name their functions, so that who reads settings imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spmdrl.user_code import load

Divergence = Literal["reverse", "forward", "jsd"]  # `model.divergence.next_token_divergence` defines them


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A row of `docs/algorithms.md`."""

    text: str  # the formula
    source: str
    when: str  # to use it
    settings: Mapping[str, bool | float | None] = field(default_factory=dict)  # its keyword arguments by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula(Described):
    """A function and its row."""

    function: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Described):
    """A function by its name, `package.module:function`, and its row."""

    name: str
    needs: tuple[str, ...]  # the columns that the function takes: its parameters that are not settings

    @property
    def function(self) -> Callable[..., Any]:
        """The function, imported."""
        return load(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator(Named):
    """An advantage estimator: rewards [P, G] of groups, or token_rewards [T], to advantages of the same shape; or
    rewards [P, G] with those of N turns to advantages of the turns, [N]."""

    whiten: bool = False  # over the global batch, unless the user says otherwise
    smallest_group: int = 2  # rollouts: fewer leave nothing to compare a reward with
    per_term: bool = False  # its rewards are sums of terms that `normalized_terms` has compared one by one

    @property
    def per_token(self) -> bool:
        """True for an estimator of tokens, which takes token_rewards; others take the rewards of groups."""
        return "token_rewards" in self.needs

    @property
    def per_turn(self) -> bool:
        """True for an estimator of turns, which takes their rollouts."""
        return "turn_rollouts" in self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind(Named):
    """A policy loss: logprobs, old_logprobs, advantages, loss_mask and what else it needs to `PolicyLoss`."""

    per_sequence: bool = False  # it knows one advantage a sequence
    off_policy_only: bool = False  # it does nothing of its own while the policy is the one that sampled
    # Whose tokens are selected over the whole mini-batch: (covariance, seeds, positions), each [N], to priorities [N].
    prioritise_name: str | None = None
    cov_selection: Mapping[str, float] = field(default_factory=dict)  # cov_fraction, and arguments of prioritise

    @property
    def prioritise(self) -> Callable[..., Any] | None:
        """The function that chooses tokens, imported; None for a loss that chooses none."""
        return None if self.prioritise_name is None else load(self.prioritise_name)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(
        name="spmdrl.algo.advantage:grpo",
        needs=("rewards",),
        text="(R - mean) / (std + 1e-6) of the group; with divide_by_std = false R - mean (Dr.GRPO)",
        source="arXiv:2402.03300, arXiv:2503.20783",
        when="The default. Without division prompts of little spread are not magnified.",
        settings={"divide_by_std": True},
    ),
    "rloo": Estimator(
        name="spmdrl.algo.advantage:rloo",
        needs=("rewards",),
        text="R - mean of the other G - 1",
        source="arXiv:2402.14740",
        when="An unbiased baseline; small groups.",
    ),
    "reinforce_plus_plus": Estimator(
        name="spmdrl.algo.advantage:returns",
        needs=("token_rewards", "loss_mask", "cu_seqlens"),
        text="sum over j >= t of discount^(j - t) r_j, r_j = -kl_coef KL_j, at the last token + R; whitened",
        source="arXiv:2501.03262",
        when="KL in the reward, credited to the tokens that caused it. Prompts should be about equally difficult: none "
        "has a baseline of its own.",
        settings={"discount": 1.0},
        whiten=True,
        smallest_group=1,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        name="spmdrl.algo.advantage:centre",
        needs=("rewards",),
        text="R - mean of the group; whitened",
        source="arXiv:2501.03262",
        when="As `grpo` with one deviation for all prompts instead of each group's.",
        whiten=True,
    ),
    "gae": Estimator(
        name="spmdrl.algo.advantage:gae",
        needs=("token_rewards", "loss_mask", "cu_seqlens", "values"),
        text="sum over j >= t of (discount gae_lambda)^(j - t) (r_j + discount V_j+1 - V_j), r_j as above; whitened",
        source="arXiv:1506.02438, arXiv:1707.06347",
        when="PPO with a critic (`[critic]`), which credits each token with what it changed; few rollouts per prompt.",
        settings={"discount": 1.0, "gae_lambda": 0.95},
        whiten=True,
        smallest_group=1,
    ),
    "max_rl": Estimator(
        name="spmdrl.algo.advantage:max_rl",
        needs=("rewards",),
        text="(R - mean) / (mean + 1e-6) of the group, for rewards of 0 or more",
        source="arXiv:2602.02710",
        when="Verifiers of right and wrong, and prompts that are rarely solved: each counts by its log-likelihood.",
    ),
    "gdpo": Estimator(
        name="spmdrl.algo.advantage:centre",
        needs=("rewards",),
        text="sum over the terms k of the reward of weight_k (R_k - mean) / (std + 1e-6), each of the group; whitened",
        source="arXiv:2601.05242",
        when="Several terms in the reward: none of them drowns in the spread of another, whatever their scales.",
        whiten=True,
        per_term=True,
    ),
    "opo": Estimator(
        name="spmdrl.algo.advantage:opo",
        needs=("rewards", "num_tokens"),
        text="R - sum(n R) / sum(n) over the group, n being a rollout's loss tokens",
        source="arXiv:2505.23585",
        when="Exactly on-policy training; lengths that differ much within a group.",
    ),
    "remax": Estimator(
        name="spmdrl.algo.advantage:remax",
        needs=("rewards", "greedy_rewards"),
        text="R - the reward of one more response to the prompt, sampled greedily and not trained on",
        source="arXiv:2310.10505",
        when="One rollout per prompt, or few: the baseline costs one more response, and is the prompt's own.",
        smallest_group=1,
    ),
    "none": Estimator(
        name="spmdrl.algo.advantage:no_advantage",
        needs=("rewards",),
        text="0",
        source="spmdrl",
        when="To learn from `[distill]` alone: rewards are measured, and nothing is trained on them.",
        smallest_group=1,
    ),
    "pass_at_k": Estimator(
        name="spmdrl.algo.advantage:pass_at_k",
        needs=("rewards",),
        text="(E[best of k, this one among them] - E[best of k]) / (std[best of k] + 1e-6), over subsets of the group",
        source="arXiv:2508.10751",
        when="To keep exploring: a group that has one right answer in k counts as solved.",
        settings={"k": 4},
    ),
    "gigpo": Estimator(
        name="spmdrl.algo.advantage:gigpo",
        needs=("rewards", "turn_rewards", "turn_rollouts", "turn_states"),
        text="A_E + step_weight A_S: `grpo` of the rewards, and `grpo` of the turns' returns, sum over k >= t of "
        "discount^(k - t) r_k, among the group's turns that began in the same state",
        source="arXiv:2505.10978",
        when="Episodes of many turns (`[environment]`) whose rollouts meet the same states again.",
        settings={"discount": 0.95, "step_weight": 1.0, "divide_by_std": True},
    ),
    "grpo_by_role": Estimator(
        name="spmdrl.algo.advantage:grpo_by_role",
        needs=("rewards", "turn_rewards", "turn_rollouts", "turn_roles"),
        text="`grpo` of each role's reward among the group's rollouts, on its turns: what these earned, and what no "
        "turn did",
        source="arXiv:2506.24119",
        when="Episodes in which the policy plays several roles (`[environment]`), such as two players or an agent and "
        "those that it asks.",
        settings={"divide_by_std": True},
    ),
    "hierarchical_grpo": Estimator(
        name="spmdrl.algo.advantage:hierarchical_grpo",
        needs=("rewards", "turn_rewards", "turn_rollouts", "turn_roles", "turn_teams"),
        text="`grpo_by_role`, but for roles `TEAM/NAME`: `grpo` among the team's members in the same rollout",
        source="prime-rl pull request 3138",
        when="Episodes with several attempts at what the policy itself has set: solvers of a proposed problem, "
        "sub-agents of one plan.",
        settings={"divide_by_std": True},
    ),
}
# What is known of a function of the user's before it is loaded.
UNKNOWN_ESTIMATOR = Estimator(name="", needs=("rewards",), text="", source="", when="", smallest_group=1)


POLICY_LOSSES: dict[str, LossKind] = {
    "ppo": LossKind(
        name="spmdrl.algo.losses:ppo",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask"),
        text="max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A); with dual_clip c, where A < 0, at most -c A",
        source="arXiv:1707.06347, arXiv:2503.14476 (two bounds), arXiv:1912.09729 (dual)",
        when="The default. A higher clip_high (0.28) leaves unlikely tokens room to grow.",
        settings={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    ),
    "gspo": LossKind(
        name="spmdrl.algo.losses:gspo",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask", "cu_seqlens"),
        text="max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the sequence of d)",
        source="arXiv:2507.18071",
        when="Mixtures of experts, where single ratios are noise; long responses.",
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
        per_sequence=True,
    ),
    "cispo": LossKind(
        name="spmdrl.algo.losses:cispo",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask"),
        text="-stop_grad(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob",
        source="arXiv:2506.13585; the bound of 5 is arXiv:2510.13786's",
        when="Several updates a step without losing rare tokens to the clip.",
        settings={"clip_low": 1.0, "clip_high": 4.0},
    ),
    "gmpo": LossKind(
        name="spmdrl.algo.losses:gmpo",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask", "cu_seqlens"),
        text="-A exp(mean over the sequence of min(d, clip_high) where A > 0, of max(d, -clip_low) elsewhere)",
        source="arXiv:2507.20673",
        when="As `gspo`, with outliers bounded token by token; the bounds are in nats.",
        settings={"clip_low": 0.4, "clip_high": 0.4},
        per_sequence=True,
    ),
    "sapo": LossKind(
        name="spmdrl.algo.losses:sapo",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask"),
        text="-A sigmoid(tau (ratio - 1)) 4 / tau, tau = tau_positive where A > 0, else tau_negative",
        source="arXiv:2511.20347",
        when="A trust region without an edge.",
        settings={"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "clip_cov": LossKind(
        name="spmdrl.algo.losses:clip_cov",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask", "cov_selected"),
        text="`ppo`; 0 at cov_fraction of the tokens, chosen at random among those with cov_low < cov < cov_high",
        source="arXiv:2505.22617",
        when="Entropy collapses: the tokens that lower it most are left out at random.",
        settings={"clip_low": 0.2, "clip_high": 0.2},
        prioritise_name="spmdrl.algo.losses:random_priorities",
        cov_selection={"cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    ),
    "kl_cov": LossKind(
        name="spmdrl.algo.losses:kl_cov",
        needs=("logprobs", "old_logprobs", "advantages", "loss_mask", "cov_selected"),
        text="-ratio A; + cov_kl_coef abs(d) at the cov_fraction of tokens with the greatest cov",
        source="arXiv:2505.22617",
        when="Entropy collapses: the tokens that lower it most are held back.",
        settings={"cov_kl_coef": 1.0},
        prioritise_name="spmdrl.algo.losses:greatest_first",
        cov_selection={"cov_fraction": 2e-3},
        off_policy_only=True,
    ),
    "dppo_tv": LossKind(
        name="spmdrl.algo.losses:dppo_tv",
        needs=("logprobs", "rollout_logprobs", "advantages", "loss_mask"),
        text="-exp(s) A, s = logprob - rollout_logprob; 0 where abs(p - q) > divergence_threshold and s A > 0, p and q "
        "being the two probabilities",
        source="arXiv:2602.04879",
        when="Stale tokens, and engines unlike the trainer: rare tokens may move far in ratio, likely ones not.",
        settings={"divergence_threshold": 0.15},
    ),
    "dppo_kl": LossKind(
        name="spmdrl.algo.losses:dppo_kl",
        needs=("logprobs", "rollout_logprobs", "advantages", "loss_mask"),
        text="as `dppo_tv`, with q log(q / p) + (1 - q) log((1 - q) / (1 - p)) in place of abs(p - q)",
        source="arXiv:2602.04879",
        when="As `dppo_tv`; a distance that also counts what happens to improbable tokens.",
        settings={"divergence_threshold": 0.05},
    ),
}
