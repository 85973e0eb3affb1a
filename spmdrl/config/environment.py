"""The table of an environment: what answers the policy between its responses, and the limits of an episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from spmdrl.config.base import Count, NonNegativeInt, SandboxConfig, Seconds, Section, regular_expression, rule

MaskedEnd = Literal["length", "context", "max_turns", "episode_timeout", "step_timeout", "environment_error", "summary"]


class FunctionTool(Section):
    kind: Literal["function"]
    """A function of yours, sync or async. Its schema comes from its signature and its docstring."""
    function: str
    """`package.module:function` or `path/to/file.py:function`."""


class PythonTool(Section):
    kind: Literal["python"]
    """A tool `python` that runs a program of the policy's in a process of its own and returns what it printed."""
    timeout_s: Seconds = 5.0
    """Time limit of one program. Below `environment.step_timeout_s`."""


class McpTools(Section):
    kind: Literal["mcp"]
    """The tools of a server of the Model Context Protocol that speaks on its standard streams; it needs the package
    `mcp`, and the environment's own process starts it."""
    command: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """The server's program with its arguments."""


ToolSource = Annotated[FunctionTool | PythonTool | McpTools, Field(discriminator="kind")]


class ToolsEnvironment(Section):
    kind: Literal["tools"]
    """The policy calls tools until a response has no call, which is its answer."""
    tools: Annotated[tuple[ToolSource, ...], Field(strict=False, min_length=1)]
    """The tools, with different names."""


class ClassEnvironment(Section):
    kind: Literal["class"]
    """A class of yours with `reset(prompt, seed)` and `step(action)`, sync or async. See `docs/environments.md`."""
    name: str
    """`package.module:Class` or `path/to/file.py:Class`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


class TrlEnvironment(Section):
    kind: Literal["trl"]
    """A class as TRL's `environment_factory` takes it: `reset` begins an episode, the other public methods are
    tools."""
    name: str
    """`package.module:Class` or `path/to/file.py:Class`."""


class GymnasiumEnvironment(Section):
    kind: Literal["gymnasium"]
    """A class with gymnasium's `reset(seed=...)` and `step(action)`; actions are text, and observations text or parts
    with images."""
    name: str
    """`package.module:Class` or `path/to/file.py:Class`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


class ReasoningGymEnvironment(Section):
    kind: Literal["reasoning_gym"]
    """A reasoning-gym item, tried again until the task's own scorer gives 1 or the turns are used up; the prompts come
    from a source of the same kind."""
    feedback: str = "That scores {score:g}. Try again."
    """Text that the policy reads after an attempt; `{score}` is the attempt's."""


class OpenEnvEnvironment(Section):
    kind: Literal["openenv"]
    """An OpenEnv server, spoken to over its WebSocket; it needs the package `openenv-core`."""
    url: str
    """The server's address, such as `http://127.0.0.1:8000`."""
    action: str = "message"
    """Name of the action's field that gets the response's text."""


class AgentEnvironment(Section):
    kind: Literal["agent"]
    """A program of yours that calls the policy through an OpenAI-compatible server; each run of it is an episode. It
    needs `pip install "spmdrl[endpoint]"`. See `docs/environments.md`."""
    command: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """The program with its arguments. It runs in a temporary directory, so arguments that name a file become absolute
    paths; `{prompt}` becomes the prompt's text."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the server on 127.0.0.1. 0 takes any free one, which several engines on one machine need."""
    max_open: Count = 32
    """Runs of the program on each rank at once; other episodes begin later."""
    gives_answer: bool = False
    """Let the program read the reference answer, to reward itself."""


class VerifiersEnvironment(Section):
    kind: Literal["verifiers"]
    """An environment of the package verifiers, in a virtual environment of its own (`make setup-verifiers`); each
    episode of it calls the policy as an agent does, so this too needs `pip install "spmdrl[endpoint]"`."""
    env: str
    """Its taskset's id: the name of an installed package, or of a module in the working directory. The prompts come
    from the rows that `python -m spmdrl.tools.verifiers_data` writes."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The environment's configuration, as verifiers has it under `[env]`, such as
    `{ taskset = { num_tasks = 10 } }`."""
    python: str = ".venv-verifiers/bin/python"
    """The interpreter of the virtual environment that has verifiers and the environment's packages."""
    max_open: Count = 32
    """Episodes on each rank at once; others begin later."""


EnvironmentSource = Annotated[
    ToolsEnvironment
    | ClassEnvironment
    | TrlEnvironment
    | GymnasiumEnvironment
    | ReasoningGymEnvironment
    | OpenEnvEnvironment
    | AgentEnvironment
    | VerifiersEnvironment,
    Field(discriminator="kind"),
]


# What stays of a conversation that is rewritten: `[environment.context]`.


class SummaryContext(Section):
    kind: Literal["summary"]
    """Compaction: the policy is asked for a summary, which takes the place of the turns. See `docs/environments.md`."""
    max_tokens: Count
    """Tokens after the prompt above which a summary is asked for before the next response."""
    max_summary_tokens: Count
    """Longest summary; one that reaches it, or is no shorter than what it replaces, fails the episode with the end
    `summary`."""
    keep_turns: NonNegativeInt = 0
    """The last turns that stay behind the summary: a response, and what the environment answered to it."""
    request: str = "Summarize what is needed to go on. The conversation continues from your summary alone."
    """The message that asks the policy for a summary."""
    heading: str = "\n\nSummary of what came before:\n"
    """Text between the first messages of the conversation and the summary."""
    train_summaries: bool = True
    """Train summaries with the episode's advantage. `false` masks them, to measure what that is worth."""


class NotesContext(Section):
    kind: Literal["notes"]
    """Of the responses only what matches `pattern` stays, in place of the turns."""
    pattern: Annotated[str, AfterValidator(regular_expression)]
    """Regular expression for the notes in a response, in which `.` is any character. Its first group, if it has one, is
    the note: `<note>(.*?)</note>`."""
    max_tokens: Count | None = None
    """Tokens after the prompt above which the conversation is rewritten before the next response. Unset: before each
    response."""
    keep_turns: Count = 1
    """The last turns that stay whole behind the notes: a response, and what the environment answered to it."""
    heading: str = "\n\nNotes:\n"
    """Text between the first messages of the conversation and the notes, which are lines."""


class TruncateContext(Section):
    kind: Literal["truncate"]
    """The responses stay, and of each observation `placeholder`."""
    max_tokens: Count | None = None
    """Tokens after the prompt above which the conversation is rewritten before the next response. Unset: before each
    response."""
    keep_turns: Count = 1
    """The last turns whose observations stay."""
    placeholder: str = "[left out]"
    """Text in the place of an observation."""


ContextConfig = SummaryContext | NotesContext | TruncateContext


class EnvironmentConfig(Section):
    source: EnvironmentSource
    """The environment that the policy acts in. See `docs/environments.md`."""
    max_turns: Count = 16
    """Responses in an episode; after the last one it ends with `max_turns`."""
    max_turn_tokens: Count | None = None
    """Longest response of one turn; a longer one ends the episode with `length`. Unset: what is left of
    `rollout.max_response_tokens`, which counts everything after the prompt."""
    step_timeout_s: Seconds = 30.0
    """Time limit of a reset or a step; past it the episode ends with `step_timeout` and the process is killed. Other
    episodes in that process are played again from their actions."""
    episode_timeout_s: Annotated[float, Field(gt=0.0, le=1e8)] = 600.0
    """Time limit of an episode in seconds; it ends with `episode_timeout` when the next response would begin. The
    parts of one that is resumed after a refit, a step or a stop of the run add up; of a pause counts what the
    environment has worked on."""
    num_workers: Count = 1
    """Environment processes of each rank; each holds many episodes at once."""
    max_observation_characters: Count = 20_000
    """Longer texts of an environment are cut, with a note of how much is missing."""
    tool_parser: str = "hermes"
    """Format of the policy's tool calls: `hermes` (`<tool_call>{...}</tool_call>`, which Qwen uses too), or with
    `rollout.engine = "sglang"` any parser of SGLang's, such as `llama3`, `mistral` or `gpt-oss`."""
    history: Literal["append", "template"] = "append"
    """`append`: what the policy read and wrote stays as it was, token for token. `template`: each turn the chat
    template sees the whole conversation, and where it rewrites what came before, such as thinking that it drops, a new
    sequence of the same rollout begins."""
    context: Annotated[ContextConfig, Field(discriminator="kind")] | None = None
    """`history = "template"` only: what stays of a conversation that has grown long. Unset: all of it."""
    masked_ends: Annotated[tuple[MaskedEnd, ...], Field(strict=False)] = ("environment_error", "step_timeout")
    """Episodes with these ends are not trained on; their reward counts among their group's all the same."""
    sandbox: SandboxConfig = SandboxConfig()
    """Permissions of the environment processes."""

    @property
    def max_open(self) -> int | None:
        """The episodes that a rank may have open at once; None without a limit."""
        return self.source.max_open if isinstance(self.source, AgentEnvironment | VerifiersEnvironment) else None

    @property
    def has_agents(self) -> bool:
        """True where programs ask the policy, each with a prompt of its own."""
        return isinstance(self.source, AgentEnvironment | VerifiersEnvironment)


@rule(EnvironmentConfig)
def programs_end_before_the_step(environment: EnvironmentConfig) -> Iterator[str]:
    if isinstance(environment.source, ToolsEnvironment):
        for tool in environment.source.tools:
            if isinstance(tool, PythonTool) and tool.timeout_s >= environment.step_timeout_s:
                yield (
                    f"the python tool's timeout_s = {tool.timeout_s:g} must be below step_timeout_s = "
                    f"{environment.step_timeout_s:g}; lower the one or raise the other"
                )


@rule(EnvironmentConfig)
def programs_need_a_sandbox(environment: EnvironmentConfig) -> Iterator[str]:
    tools = environment.source.tools if isinstance(environment.source, ToolsEnvironment) else ()
    if environment.sandbox.mode == "off" and any(isinstance(tool, PythonTool) for tool in tools):
        yield (
            'the tool of kind "python" runs what the model wrote, and sandbox.mode = "off" would let that do '
            'anything; set it to "auto" or "strict"'
        )


@rule(EnvironmentConfig)
def connections_need_no_sandbox(environment: EnvironmentConfig) -> Iterator[str]:
    source = environment.source
    if environment.sandbox.mode != "off" and (environment.has_agents or isinstance(source, OpenEnvEnvironment)):
        yield (
            f'source.kind = "{source.kind}" opens connections, which sandbox.mode = '
            f'"{environment.sandbox.mode}" does not let it; set sandbox.mode = "off"'
        )


@rule(EnvironmentConfig)
def agents_keep_their_own_history(environment: EnvironmentConfig) -> Iterator[str]:
    if environment.history == "template" and environment.has_agents:
        yield (
            'history = "template" renders conversations anew, but with source.kind = '
            f'"{environment.source.kind}" each call says what the conversation is; set history = "append"'
        )


@rule(EnvironmentConfig)
def contexts_are_rendered(environment: EnvironmentConfig) -> Iterator[str]:
    if environment.context is None:
        return
    if environment.has_agents:
        yield (
            f'context rewrites conversations, but with source.kind = "{environment.source.kind}" each call says what '
            "the conversation is; remove [environment.context], and let the agent leave out what it wants to"
        )
    elif environment.history == "append":
        yield (
            f'context.kind = "{environment.context.kind}" rewrites what the policy has read, which history = "append" '
            'leaves as it was; set history = "template"'
        )


@rule(EnvironmentConfig)
def summaries_are_shorter(environment: EnvironmentConfig) -> Iterator[str]:
    context = environment.context
    if isinstance(context, SummaryContext) and context.max_summary_tokens >= context.max_tokens:
        yield (
            f"context.max_summary_tokens = {context.max_summary_tokens} lets a summary be longer than the max_tokens = "
            f"{context.max_tokens} that it replaces; set it below that"
        )
