"""Models of a run: policy, critic and reference. All of them are created in this file.

The policy is created from the arguments of `ScaleRL`. Critic and reference are made from the policy once a fit has
resolved its choices; a reference that is a teacher is loaded from the location in `kl.reference`. All have FP32
weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_scalerl.axes.adapter import Adapter
from lightning_scalerl.axes.kl import KL
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.composition import load_recipe
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.distributed.sharded import gather_state, is_sharded
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.measure.memory import model_builder
from lightning_scalerl.model.adapter import (
    adapt,
    adapter_description,
    has_adapter,
    merge,
    merged_copy,
    store_linear_layers_in,
    without_peft_wrapper,
)
from lightning_scalerl.model.files import WeightFiles, has_no_data
from lightning_scalerl.model.head import computes_in_16_bit_only
from lightning_scalerl.model.load import (
    check_attention,
    check_weights,
    fingerprint,
    load_model,
    load_tokenizer,
    stop_tokens,
)
from lightning_scalerl.model.place import digest_of
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.tensor_parallel import check_tensor_parallel
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.session.streamed import empty_or_loaded_model
from lightning_scalerl.session.trials import check_model
from lightning_scalerl.task.arithmetic_base import is_arithmetic_base
from lightning_scalerl.update.adamw_bf16 import round_weights
from lightning_scalerl.update.trained import TrainedPolicy

if TYPE_CHECKING:
    from lightning_scalerl.generator.vllm.teacher import VLLMTeacher


class Models:
    """Policy, critic and reference of a run, with the policy's tokenizer and the ranks that train them.

    This class is not an `nn.Module`: policy and critic are children of `ScaleRL` itself, so that the names of saved
    weights begin with `policy.` and `critic.`. The reference is neither trained nor saved.

    Args:
        policy: the policy. This object is never replaced, but its language model may be replaced or sharded.
        tokenizer: tokenizer of the policy's model.
        stop_tokens: token ids that end a completion.
        packed: whether the recipe asks for packed rows.
        path: path of the policy's model; None if it was made from a model object.
        files: with `streamed`: the files of the policy's weights, which are not read yet, or a string with the reason
            why each rank has to read the whole model. None without `streamed`.

    Attributes:
        critic: critic of axis `critic`; None until `begin` makes it.
        reference: frozen model to which axis `kl` compares the policy: the initial model, or a teacher, which a vLLM
            server may run. None without KL.
        teacher: description of the teacher for `semantics.json`; empty without one.
        teacher_flops: FLOPs of the teacher's forward passes; None without one.
        trained: access to the policy between passes.
        ranks, device: ranks of the Trainer and the device of this one; set at the setup of every stage.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        stop_tokens: list[int],
        packed: bool,
        path: str | None,
        files: WeightFiles | str | None,
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.stop_tokens = stop_tokens
        self.packed = packed
        self.path = path
        self.files = files if isinstance(files, WeightFiles) else None
        self.why_not_streamed = files if isinstance(files, str) else None
        self.critic: ValueModel | None = None
        self.reference: Policy | VLLMTeacher | None = None
        self.teacher: dict[str, Any] = {}
        self.teacher_flops: FlopModel | None = None
        self._fingerprint: str | None = None
        self._stores_bf16 = False
        self.ranks = Ranks()
        self.device = torch.device("cpu")
        self.trained = TrainedPolicy(policy, lambda: self.ranks, self.load)

    def load(self) -> nn.Module:
        """Load the whole language model from its path, rounded to BF16 if `store_in_bf16` was called."""
        assert self.path is not None
        model = load_model(self.path)
        if self._stores_bf16:
            round_weights(model)
        return model

    def store_in_bf16(self) -> None:
        """Round the trained weights to BF16, as the optimizer will do after every step.

        Weights that have not been read yet are rounded when they are read. Without an adapter, the reference and the
        critic's body are also rounded, because they are copies.
        """
        if self.policy.adapter is None:
            self._stores_bf16 = True
            if self.files is not None:
                self.files = replace(self.files, in_bf16=True)
        if not has_no_data(self.policy):
            round_weights(self.policy)

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    @property
    def creation_device(self) -> torch.device:
        """Device on which a whole model is created: the host if it will be sharded, else this rank's device."""
        return torch.device("cpu") if self.ranks.sharded else self.device

    @property
    def notes(self) -> list[str]:
        """Lines for the user, if the model came with an adapter or each rank reads the whole model."""
        adapter, notes = self.policy.adapter, []
        if adapter is not None and "choice" not in adapter:
            notes.append(f"adapter: the model already has one, which is trained: {adapter}")
        if self.why_not_streamed is not None:
            notes.append(
                f"model: every rank reads the whole model before it keeps its part, because {self.why_not_streamed}"
            )
        return notes

    def begin(self, choices: Choices, capacity: int) -> None:
        """Make the critic and the reference that the choices of a fit need, unless they exist already.

        Args:
            choices: the fit's choices. If there is a teacher, `kl.relative_size` is set here.
            capacity: tokens of the longest sequence.

        Raises:
            ConfigurationError: the teacher cannot be used, or has another tokenizer than the policy.
        """
        if choices.critic.has_values and self.critic is None:
            model = self.policy.model if self.policy.adapter is None else plain_model(self.policy)
            critic = ValueModel(model, choices.precision)
            self.critic = critic if has_no_data(critic) else critic.to(self.creation_device)
        kl = choices.kl
        if kl.reads_vocabulary and self.ranks.sharded:
            raise ConfigurationError(
                "kl.estimate: full compares whole vocabularies, and strategy=fsdp2 shards the models; choose "
                "kl.estimate=k1, or strategy=ddp"
            )
        if not kl.where:
            self.reference, self.teacher, self.teacher_flops = None, {}, None
        elif self.reference is None and kl.reference is None:
            self._freeze(plain_model(self.policy))
        elif self.reference is None:
            self._load_teacher(kl, capacity)
        if self.teacher_flops is not None:
            kl.relative_size = self.teacher_flops.per_token / FlopModel.of(self.policy.model).per_token

    def _load_teacher(self, kl: KL, capacity: int) -> None:
        """Make the reference from the model that `kl.reference` names, or connect to the server at that address."""
        location = str(kl.served if kl.is_served else kl.reference)
        with naming_setting("kl.served" if kl.is_served else "kl.reference"):
            check_same_tokens(self.tokenizer, load_tokenizer(location), location)
            if kl.is_served:
                if self.policy.temperature != 1:
                    raise ConfigurationError(
                        f"kl.reference: a server gives log-probabilities at temperature 1, and context.temperature is "
                        f"{self.policy.temperature:g}; give the model's folder as kl.reference"
                    )
                with torch.device("meta"):
                    model = model_builder(location)()
                from lightning_scalerl.generator.vllm.teacher import VLLMTeacher  # a slow import, rarely needed

                self.reference = VLLMTeacher(str(kl.reference), capacity, kl.timeout_s)
                self._fingerprint = digest_of(location)
            else:
                model = load_model(location)
                check_attention(model)
                self._freeze(model)
                assert isinstance(self.reference, Policy)
                if not computes_in_16_bit_only(model):
                    check_model(self.reference, self.packed)
                if self.ranks.tensor_parallel_size > 1:
                    check_tensor_parallel(model, self.ranks.tensor_parallel_size)
            self.teacher_flops = FlopModel.of(model)
        self.teacher = {
            "model": location,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "files": digest_of(location),
            "revision": getattr(model.config, "_commit_hash", None),
            **({"address": kl.reference} if kl.is_served else {}),
        }

    def disconnect(self) -> None:
        """Close the connection to a teacher's server; the next fit opens another one."""
        if self.reference is not None and not isinstance(self.reference, Policy):
            self.reference.close()
            self.reference = None

    def restore_reference(self, saved_fingerprint: str | None) -> None:
        """Replace the reference by the saved run's, if this module was made with other weights than that run.

        Args:
            saved_fingerprint: fingerprint of the saved run's reference. None if that run had no KL and therefore no
                reference: it is then unknown which weights it began with.

        Raises:
            ConfigurationError: the fingerprint matches neither the current reference nor the model at `path`.
        """
        if self.reference is None or self.reference_fingerprint() == saved_fingerprint:
            return
        if self.teacher and saved_fingerprint is not None:
            raise ConfigurationError(
                f"kl.reference: {self.teacher['model']} has other weights than when the run of this checkpoint began; "
                "give the teacher that it had"
            )
        if self.path is not None and not self.teacher:
            model = self.load()
            if self.policy.adapter is not None:  # round the model as the run's reference was rounded
                store_linear_layers_in(model, self.policy.precision.policy_dtype)
                model.float()
            self._freeze(model)
            if saved_fingerprint in (None, self.reference_fingerprint()):
                return
        raise ConfigurationError(
            "kl: the reference is the model that training began with, and this module was made with other weights than "
            "the run of this checkpoint; go on with a module made as that run's was: ScaleRL(model=...), or "
            "ScaleRL.load_from_checkpoint(path) of the checkpoint whose weights it began with"
        )

    def reference_fingerprint(self) -> str | None:
        """Return the reference's fingerprint; computed once, for the first checkpoint, because it reads all weights."""
        if isinstance(self.reference, Policy) and self._fingerprint is None:
            read = self.files.read if self.files is not None and has_no_data(self.reference) else None
            self._fingerprint = fingerprint(self.reference.model, read)
        return None if self.reference is None else self._fingerprint

    def _freeze(self, model: nn.Module) -> None:
        """Freeze a model and make it the reference."""
        self._fingerprint = None
        reference = Policy(model, self.policy.precision, self.policy.temperature).requires_grad_(False).eval()
        reference.packs = self.policy.packs
        self.reference = reference if has_no_data(reference) else reference.to(self.creation_device)


@contextmanager
def naming_setting(setting: str) -> Iterator[None]:
    """Name `setting` instead of `model.path` in errors about a model that are raised in the `with` block."""
    try:
        yield
    except ConfigurationError as error:
        head, separator, message = str(error).partition(": ")
        if head not in ("model", "model.path"):
            raise
        raise ConfigurationError(f"{setting}{separator}{message.replace('model.path', setting)}") from error


def check_same_tokens(policy_tokenizer: Any, teacher_tokenizer: Any, location: str) -> None:
    """Check that a teacher's tokenizer gives every token the same id as the policy's.

    Raises:
        ConfigurationError: an id differs; the message names the first such token.
    """
    own_vocabulary, other_vocabulary = policy_tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    differing = sorted(
        token
        for token in own_vocabulary.keys() | other_vocabulary.keys()
        if own_vocabulary.get(token) != other_vocabulary.get(token)
    )
    if differing:
        raise ConfigurationError(
            f"model: {location} has another tokenizer than the model in training ({len(differing)} tokens differ, such "
            f"as {differing[0]!r}); distil from a model of the same family"
        )


def make(
    model: str | nn.Module | None,
    recipe: str | Recipe | None,
    overrides: Sequence[str],
    tokenizer: Any,
    config_dir: str | Path | None,
    streamed: bool = False,
) -> tuple[Recipe, Models, dict[str, Any]]:
    """Make recipe and models from the arguments of `ScaleRL`, which documents them.

    Also return the arguments that a checkpoint can store as hyper-parameters, for `load_from_checkpoint`.

    Raises:
        ConfigurationError: an argument is missing or unknown, cannot be loaded, or conflicts with another.
    """
    if recipe is None:
        raise ConfigurationError(
            "recipe: not given; the checkpoint of a run that was given a built recipe does not hold it: "
            "ScaleRL.load_from_checkpoint(path, recipe=...)"
        )
    if model is None:
        raise ConfigurationError(
            "model: not given; a folder, a hub id, or a model with its tokenizer. The checkpoint of a run that was "
            "given a model object holds weights only: ScaleRL.load_from_checkpoint(path, model=..., tokenizer=...)"
        )
    # `scale=` is allowed, because it only says that the user has chosen the scale (see `check_scale` below).
    unused = [] if isinstance(recipe, str) else [entry for entry in overrides if not entry.startswith("scale=")]
    if unused:
        raise ConfigurationError(
            f"overrides: {' '.join(unused)} would have no effect, because the recipe is built already; give them to "
            "load_recipe instead"
        )
    folders = () if config_dir is None else (config_dir,)
    built = load_recipe(recipe, overrides, folders) if isinstance(recipe, str) else recipe
    arguments: dict[str, Any] = {
        **({"model": model} if isinstance(model, str) else {}),
        "recipe": recipe if isinstance(recipe, str) else None,
        "recipe_name": built.name,
        "overrides": list(overrides),
        "config_dir": None if config_dir is None else str(config_dir),
    }
    if isinstance(model, str):
        tokenizer = tokenizer or load_tokenizer(model)
    elif tokenizer is None:
        raise ConfigurationError("tokenizer: a model object comes without one; pass tokenizer=")
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise ConfigurationError(
            "tokenizer: it has no eos_token, so completions could never end; set tokenizer.eos_token to the token that "
            "ends a completion"
        )
    if not any(override.startswith("scale=") for override in overrides):
        built.check_scale(is_arithmetic_base(model))
    path = model if isinstance(model, str) else None
    files: WeightFiles | str | None = None
    if isinstance(model, str) and streamed:
        model, files = empty_or_loaded_model(model, built.choices.adapter)
    else:
        model = load_model(model) if isinstance(model, str) else without_peft_wrapper(model)
    check_weights(model)
    check_attention(model)
    policy = Policy(model, built.choices.precision, built.context.temperature)
    # A model whose weights are not read yet, or that needs a GPU, is checked later.
    if not isinstance(files, WeightFiles) and not computes_in_16_bit_only(model):
        check_model(policy, built.batch.packed)
    if has_adapter(model):
        policy.adapter = arguments["model_adapter"] = adapter_description(model)
    if built.choices.adapter.adapts:
        adapt_policy(policy, built.choices.adapter)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ConfigurationError(
            "model: all its parameters are frozen, so nothing would be trained; set requires_grad=True on those to "
            'train, or add an adapter: overrides=["adapter=lora"]'
        )
    models = Models(policy, tokenizer, stop_tokens(model, tokenizer), built.batch.packed, path, files)
    return built, models, arguments


def adapt_policy(policy: Policy, choice: Adapter) -> None:
    """Add the adapter of axis `adapter` to a policy that does not have it yet.

    Raises:
        ConfigurationError: the policy already has an adapter of another choice, or its model came with one.
    """
    semantics = choice.semantics()
    if policy.adapter is None and choice.adapts:
        adapt(policy.model, choice)
        policy.adapter = semantics
    elif policy.adapter is not None and policy.adapter != semantics:
        came_with_model = "choice" not in policy.adapter
        if came_with_model and not choice.adapts:
            return
        raise ConfigurationError(
            f"adapter: the model that was handed in has a LoRA adapter already ({_text(policy.adapter)}); choose "
            "adapter=none to train that one, or merge it first: model.merge_and_unload()"
            if came_with_model
            else f"adapter: this module's model has the adapter {_text(policy.adapter)}, and {_text(semantics)} is "
            "asked for now; give the choice that it has, or begin with another module"
        )


def _text(semantics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in semantics.items())


def plain_model(policy: Policy) -> nn.Module:
    """Return a copy of the policy's language model on the host, without adapter. If sharded, all ranks call this."""
    if policy.adapter is None:
        return copy.deepcopy(policy.model)
    state = policy.model.state_dict()
    return merged_copy(
        policy.model, merge(gather_state(state, keep=True) if is_sharded(policy) else state, policy.model)
    )
