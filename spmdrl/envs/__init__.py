"""Environments: what answers the policy between its responses, in processes that can be killed.

Only `client` and what it imports know torch or the configuration: environment processes start without them. A class of
the user's imports its nouns from here.
"""

from spmdrl.conversation import Action, Observation, ToolCall

__all__ = ["Action", "Observation", "ToolCall"]
