"""The parameters of a batch: one flat model, used by the CLI, the flow and `plan.json`."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollout.engine.urls import read_urls
from rollout.errors import BadConfig
from rollout.ray_options import parse_resources, read_modules
from rollout.row_sampling import Bounds, parse_bounds, row_sampling

BATCH_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")
MAX_SHARDS = 1000
"""Shards of one flow run: a few thousand task runs strain a Prefect server (prefect#18883)."""

DEMO_PROMPTS = "demo"
"""Name of the prompt file that ships with the package."""


class BatchConfig(BaseModel):
    """What one batch does. Times in seconds, lengths in tokens. Every field has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: str = Field(
        DEMO_PROMPTS,
        description="Prompts: a JSONL or parquet file, a Delta table (TABLE or TABLE@v12; local or s3://), a folder of "
        "datasets' save_to_disk, or 'demo' for the shipped file.",
    )
    lake: str = Field("./lake", description="Lake to publish to: a local path or s3://bucket/prefix.")
    batch_id: str | None = Field(None, description="Name of the batch; the same name goes on where it stopped.")
    n_samples_per_prompt: int = Field(4, ge=1, le=1024, description="Rollouts per prompt (the GRPO group's size).")
    agent: str = Field("tool_loop", description="Agent for rows that name none: an entry point of rollout.agents.")
    agent_command: str | None = Field(
        None, description="Command line of the agent 'command', split as a shell would; no shell runs it."
    )
    reward: str | None = Field("exact_answer", description="Reward, an entry point of rollout.rewards; null: agent's.")
    reward_key: str | None = Field(None, description="Key of the reward where the reward function returns several.")
    session_version: Literal["v1", "v2"] = Field("v2", description="Session path: v1 linear, v2 tree.")
    matcher: str = Field(
        "loose_tool_call",
        description="How a replayed message is recognised: strict, loose_tool_call, role_content_only, or your own.",
    )
    picker: str = Field(
        "drop_retries", description="Which leaves of a v2 session become samples: drop_retries, keep_all, or your own."
    )
    finisher: str = Field("train_once", description="What is done to the samples' masks: train_once, or your own.")
    control_text: Literal["reference", "plain", "refuse"] = Field(
        "reference", description="Control strings in user text: as the template's ids, as plain text, or refused."
    )
    temperature: float = Field(1.0, ge=0.0, le=10.0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, le=1_000_000, description="Top-k sampling; -1 is off.")
    max_new_tokens: int = Field(128, ge=1, le=1_000_000, description="Sampled tokens of one turn, at most.")
    sampling_bounds: str | None = Field(
        None,
        description="What a prompt row may set in metadata.sampling, as temperature=0:1.2,max_new_tokens=16:512; "
        "null: nothing.",
    )
    seed: int = Field(0, ge=0, le=2**53 - 1, description="Batch seed; the same seed samples the same again.")
    max_turns: int | None = Field(16, ge=1, le=1024, description="Turns of one rollout, at most.")
    max_seq_len: int | None = Field(None, ge=2, le=2**31 - 1, description="Tokens of one sample, at most.")
    rollout_ids: Literal["none", "index"] = Field(
        "none", description="rollout_id of rows that have none: left null, or set to the rollout's index."
    )
    enable_thinking: bool = Field(False, description="Open the turn for thinking where the renderer can.")
    renderer: str = Field("qwen3", description="Name of the chat format in `renderers`.")
    model: str | None = Field(
        None, description="Checkpoint: a directory or s3://bucket/prefix; null: the shipped one. External: tokenizer."
    )
    lora: str | None = Field(
        None, min_length=1, max_length=1000, description="LoRA adapter that samples, by its name at the engine."
    )
    routed_experts: bool = Field(
        False, description="Keep which experts of a mixture each token was routed to; the engine must give them."
    )
    policy_version: str | None = Field(
        None, description="Name of the policy's weights, written to every row; null: weight_version."
    )
    update_weights: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="Weights that external engines load before the batch: a directory as they see it.",
    )
    weight_version: str | None = Field(
        None, min_length=1, max_length=200, description="What the engines call the weights of update_weights."
    )
    engine: Literal["embedded", "sglang", "external"] = Field(
        "embedded", description="Where tokens come from: the embedded engine, SGLang on this host, or engine_url."
    )
    engine_recipe: str | None = Field(
        None, description="How SGLang is started here: tiny_cpu, qwen3_8b_h200 or qwen3_30b_a3b_h200x8."
    )
    engine_url: str | None = Field(
        None, description="URL of an external SGLang server or router, or of several: with commas between them."
    )
    engine_gpus: int | None = Field(
        None, ge=0, le=4096, description="GPUs that the engines hold; null: as the recipe says, of external not known."
    )
    gpu_price_per_hour: float | None = Field(
        None, ge=0.0, le=1_000_000.0, description="Price of one GPU for an hour, in any currency; null: no costs."
    )
    concurrency: int = Field(16, ge=1, le=4096, description="Rollouts in flight at the engine.")
    task_runner: Literal["local", "ray"] = Field(
        "local", description="Where shards run: in the flow's process, or as tasks of a Ray cluster."
    )
    ray_address: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="Ray cluster, as host:6379; null: RAY_ADDRESS, else this host's.",
    )
    ray_resources: str = Field(
        "CPU=1", description="What one shard takes of a Ray node: GPU=1, or names of the cluster's own: H200=1,CPU=4."
    )
    ray_modules: str | None = Field(
        None, description="Modules of yours that Ray brings to its nodes, with commas between: own_agent,own_tools."
    )
    shard_size: int = Field(32, ge=1, le=1_000_000, description="Rollouts of one Prefect task; cut between groups.")
    rollout_timeout_s: float = Field(300.0, gt=0, le=86400, description="Deadline of one rollout in seconds.")
    max_attempts: int = Field(2, ge=1, le=10, description="Tries at a rollout whose engine failed.")
    retry_agent_errors: bool = Field(False, description="Give a rollout whose agent failed its other tries too.")
    max_failed_in_a_row: int | None = Field(
        32, ge=1, le=1_000_000, description="Rollouts failing one after another that end the batch early; null: never."
    )
    canary: int = Field(
        0, ge=0, le=1_000_000, description="Groups of which each needs a good rollout before the rest starts; 0: none."
    )
    skip_bad_prompts: bool = Field(False, description="Record refused prompt rows instead of refusing the file.")
    parity_min_equal: float = Field(
        0.95, ge=0.0, le=1.0, description="Share of provable rollouts that must be equal, or the batch is quarantined."
    )
    parity_live_fraction: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of rollouts whose agents run again, on both session paths, to compare."
    )

    @field_validator("batch_id")
    @classmethod
    def _check_batch_id(cls, value: str | None) -> str | None:
        if value is not None and not BATCH_ID_PATTERN.fullmatch(value):
            raise ValueError(f"{value!r} does not match {BATCH_ID_PATTERN.pattern}")
        return value

    @field_validator("engine_url")
    @classmethod
    def _check_engine_url(cls, value: str | None) -> str | None:
        return None if value is None else ",".join(read_urls(value))

    @field_validator("ray_resources")
    @classmethod
    def _check_ray_resources(cls, value: str) -> str:
        parse_resources(value)
        return value

    @field_validator("ray_modules")
    @classmethod
    def _check_ray_modules(cls, value: str | None) -> str | None:
        return None if value is None else ",".join(read_modules(value))

    @field_validator("sampling_bounds")
    @classmethod
    def _check_sampling_bounds(cls, value: str | None) -> str | None:
        for name, ends in (parse_bounds(value) if value is not None else {}).items():
            for end in ends:
                try:
                    cls.model_validate({name: end})  # as a batch's own value would be
                except ValidationError as error:
                    raise ValueError(f"{name} {end:g}: {error.errors()[0]['msg']}") from error
        return value

    @model_validator(mode="after")
    def _check_engine(self) -> BatchConfig:
        if (self.engine == "external") != (self.engine_url is not None):
            raise ValueError("engine_url goes with engine=external, and external needs one")
        if (self.engine == "sglang") != (self.engine_recipe is not None):
            raise ValueError("engine_recipe goes with engine=sglang, and sglang needs one")
        if (self.update_weights is None) != (self.weight_version is None):
            raise ValueError("update_weights and weight_version go together")
        if self.update_weights is not None and self.engine != "external":
            raise ValueError("update_weights needs engine=external: the others are started with their model")
        if self.update_weights is not None and self.update_weights[0] in ".~":
            raise ValueError("update_weights is read by the engines: give the whole path")
        if self.lora is not None and self.engine != "external":
            raise ValueError("lora needs engine=external: an SGLang server that was started with the adapter")
        if self.routed_experts and self.engine == "embedded":
            raise ValueError("routed_experts needs SGLang: the embedded engine serves dense models")
        return self

    @property
    def engine_urls(self) -> list[str]:
        """Of the external engines, in the order given; none with engines of our own."""
        return [] if self.engine_url is None else read_urls(self.engine_url)

    @property
    def modules(self) -> list[str]:
        """What Ray brings to its nodes, by the names of ray_modules."""
        return [] if self.ray_modules is None else read_modules(self.ray_modules)

    @property
    def bounds(self) -> Bounds | None:
        """What rows may set for themselves; None: nothing."""
        return None if self.sampling_bounds is None else parse_bounds(self.sampling_bounds)

    def sampling_of(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The sampling parameters that the sessions of a row with this metadata pin (SGLang's names).

        Raises:
            ValueError: the row sets what `sampling_bounds` does not allow; planning refuses such rows.
        """
        return {**self.sampling, **row_sampling(metadata, self.bounds)}

    @property
    def sampling(self) -> dict[str, Any]:
        """The batch's own sampling parameters, which every row has that sets none (SGLang's names)."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
        }


IDENTITY_OPTIONS = (
    "skip_bad_prompts",
    "n_samples_per_prompt",
    "agent",
    "agent_command",
    "reward",
    "reward_key",
    "session_version",
    "matcher",
    "picker",
    "finisher",
    "control_text",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "sampling_bounds",
    "seed",
    "max_turns",
    "max_seq_len",
    "rollout_ids",
    "enable_thinking",
    "renderer",
    "lora",
    "routed_experts",
)
"""Fields that decide what a batch's rows are, and so go into its config hash beside the prompt
bytes, the model's digest and the package version. URLs, concurrency, shard size, time-outs,
attempts, parity settings and paths do not."""


def make_config(**options: Any) -> BatchConfig:
    """A BatchConfig from user options.

    Raises:
        BadConfig: one line that names every refused field and its bound.
    """
    try:
        return BatchConfig(**options)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors()]
        raise BadConfig("; ".join(problems)) from error


def refuse_relative(**paths: str | None) -> None:
    """Refuse local paths that hang on a working directory where nobody chose one: in a worker.

    Raises:
        BadConfig: names the first parameter whose path is relative.
    """
    for name, path in paths.items():
        if path is None or path == DEMO_PROMPTS or path.startswith(("/", "~")) or "://" in path:
            continue
        raise BadConfig(
            f"{name}: {path!r} is relative, but a worker has no folder of yours: give the whole path or a URI"
        )
