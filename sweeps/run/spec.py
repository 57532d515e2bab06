"""Specification of a run: its resolved configuration, its identity, and the label of its curve.

A run's identity is a hash of its seed and of everything in its configuration that affects the science; the identity of
a curve (recipe) leaves the seed out. The budget and output paths are in neither: a larger budget continues a run, and
launching the same sweep twice finds the existing runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.redact import redact_config
from sweeps.run import fields
from sweeps.run.files import parse_json, write_atomically

SPEC_FILE = "spec.json"
# Format version of frozen specifications. The first one had module paths in its identities, and no number.
FORM = 2
_OTHER_FORM = (
    "{}: written by another version, whose runs had other identities; its journals still fit, rank and publish, but to "
    "go on, launch the study into a folder of its own (study=NAME)"
)

# A specification begins with its format version, if it has one.
_FORM_FIRST = re.compile(rb'\{\s*"form":\s*(\d+),')

# The budget as written there: indented by one space, so a field of the specification itself. Strings have no line
# breaks.
_STEPS = re.compile(r'^ "steps": (\d+),$', re.MULTILINE)

_CURVE = re.compile(r'^ "curve": "([^"\\]*)",$', re.MULTILINE)

# Top-level configuration keys that affect how, where or how long a run is executed, but not what it learns.
OPERATIONAL_KEYS = frozenset(
    {"budget", "checkpoint", "rollouts", "study", "output_dir", "launch", "mlflow", "label", "hydra", "seed"}
    | {"scaled_for", "race", "strategy"}
)


@dataclass(frozen=True)
class RunSpec:
    """One member of a study, frozen at submission.

    Attributes:
        run, curve: identities of the run and of its curve, 12 hexadecimal digits each.
        recipe: label of the curve, such as `scalerl_core+loss=dapo`.
        baseline: label of the recipe it is compared with.
        departures: axes that it changes from the baseline, each with its choice in a few words.
        settings: other values that differ between members of the study.
        seed: random seed of the run.
        steps: budget in optimizer steps.
        config: resolved configuration.
        reference: configuration of the baseline recipe, with the same seed and settings.
        folders: the user's own folders with configuration files, and the modules that these name.
        overrides: command-line overrides that launched it, without addresses; enough to continue the run.
        cautions: notes for the user before the launch, one per line; not stored.
    """

    run: str
    curve: str
    recipe: str
    baseline: str
    departures: Mapping[str, str]
    settings: Mapping[str, str]
    seed: int
    steps: int
    config: Mapping[str, Any]
    reference: Mapping[str, Any]
    folders: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    cautions: tuple[str, ...] = field(default=(), compare=False)

    @property
    def title(self) -> str:
        """Label and seed of the run, for display."""
        return f"{self.recipe} seed {self.seed}"

    @property
    def first_step(self) -> int:
        """Step at which a branch leaves its parent, whose steps cost nothing again; 0 for a run of its own."""
        return int(branch_of(self.config).get("branch", {}).get("step") or 0)

    @property
    def layout(self) -> tuple[int, int] | None:
        """Nodes, and ranks per node, that the run requires (group `strategy`); None if it leaves them open."""
        return layout_of(self.config)

    def _fields(self) -> dict[str, Any]:
        """Return the fields that are stored."""
        return {key: value for key, value in self.__dict__.items() if key != "cautions"}

    def header(self) -> dict[str, Any]:
        """Return the fields of the journal's header record."""
        return {
            "run": self.run,
            "curve": self.curve,
            "recipe": self.recipe,
            "baseline": self.baseline,
            "seed": self.seed,
            "departures": dict(self.departures),
            "settings": dict(self.settings),
            **branch_of(self.config),
        }

    def checksum(self) -> str:
        """Return 16 hexadecimal digits over everything but the budget (which may grow), overrides, and operational
        keys.

        A composed specification and the same one read back have equal checksums.
        """
        frozen = {key: value for key, value in self._fields().items() if key not in ("steps", "overrides")}
        frozen |= {"config": science(self.config), "reference": science(self.reference)}
        # Keys are not sorted because their order matters: the first held-out set is the default.
        return hashlib.sha256(json.dumps(frozen, separators=(",", ":")).encode()).hexdigest()[:16]

    def check_checksum(self, run_dir: Path, expected: str | None) -> None:
        """Refuse a specification that was changed after it was frozen.

        Args:
            run_dir: folder it was read from, for the message.
            expected: its checksum when it was frozen; None for a study of an earlier version, which stored none.

        Raises:
            UserError: the checksum differs.
        """
        if expected is not None and self.checksum() != expected:
            raise UserError(
                f"{run_dir / SPEC_FILE}: changed since the study was launched, for its checksum is {self.checksum()} "
                f"and {expected} in the ledger; restore the file, or launch what you want under its own identity"
            )

    def write(self, run_dir: Path, texts: Texts | None = None) -> bytes | None:
        """Freeze the spec in the run's directory, atomically; keys keep their order: the first held-out set is the
        default.

        Args:
            run_dir: the run's folder, created if missing.
            texts: encoder shared by the specs of a study, so that common parts are encoded once.

        Returns:
            Content of the file that was replaced; None if there was none, or it was equal.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        text = (texts or Texts()).of({"form": FORM, **self._fields()}, ("config", "reference"))
        previous = None
        with suppress(OSError):
            previous = (run_dir / SPEC_FILE).read_bytes()
        if previous == text.encode():
            return None
        write_atomically(run_dir / SPEC_FILE, text)
        return previous

    @classmethod
    def read(cls, run_dir: Path, known: dict[str, Any] | None = None) -> RunSpec:
        """Read the spec frozen in a run's directory.

        Args:
            run_dir: the run's folder.
            known: cache shared by all specs of a study, so that common parts are in memory once: ten thousand specs
                would otherwise take gigabytes.

        Raises:
            UserError: it does not exist, cannot be read, or has another format version.
        """
        try:
            values = parse_json((run_dir / SPEC_FILE).read_text())
            if values.pop("form", 1) != FORM:
                raise UserError(_OTHER_FORM.format(run_dir / SPEC_FILE))
            overrides = tuple(values.get("overrides", ()))
            if known is not None:
                for key in ("config", "reference"):
                    values[key] = {sys.intern(name): _once(part, known) for name, part in values[key].items()}
                overrides = _once(overrides, known)
            spec = cls(**{**values, "folders": tuple(values["folders"]), "overrides": overrides})
            _check_kinds(values)
            return spec
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{run_dir / SPEC_FILE}: not a run's frozen specification ({error})") from error


def _check_kinds(values: Mapping[str, Any]) -> None:
    """Refuse fields of a specification that have the wrong type.

    Raises:
        ValueError: the field and its value.
    """
    fields.run_name(values)
    for name in ("curve", "recipe", "baseline"):
        fields.text(values, name)
    for name in ("departures", "settings", "config", "reference"):
        fields.group(values, name)
    fields.whole(values, "seed")
    fields.whole(values, "steps")


class Texts:
    """JSON encoder for many values with shared parts, each encoded once; same output as `json.dumps(..., indent=1)`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # keeps the part alive, so that its id is not reused

    def of(self, values: Mapping[str, Any], shared: Sequence[str]) -> str:
        """Encode one object; parts of its `shared` fields are cached for other objects."""
        lines = []
        for key, value in values.items():
            if key in shared and value and all(isinstance(name, str) for name in value):
                inside = ",".join(f"\n  {json.dumps(name)}: {self._text(part, 2)}" for name, part in value.items())
                text = f"{{{inside}\n }}"
            else:
                text = json.dumps(value, indent=1).replace("\n", "\n ")  # line breaks in strings are escaped
            lines.append(f"\n {json.dumps(key)}: {text}")
        return f"{{{','.join(lines)}\n}}"

    def _text(self, part: Any, depth: int) -> str:
        if part is None or isinstance(part, str | int | float):
            return json.dumps(part)
        if id(part) not in self._known:
            self._known[id(part)] = part, json.dumps(part, indent=1).replace("\n", "\n" + " " * depth)
        return self._known[id(part)][1]


def _once(part: Any, known: dict[str, Any]) -> Any:
    """Return the first part seen with the same repr, so that specs share memory."""
    return known.setdefault(repr(part), part)


def run_folder(name: str) -> Path:
    """Return the folder of a run, after checking that it contains a specification of `scalerl train`.

    Raises:
        UserError: it contains none.
    """
    run = Path(name)
    if not (run / SPEC_FILE).is_file():
        raise UserError(f"{run}: no run of scalerl train; give a folder such as outputs/STUDY/runs/IDENTITY")
    return run


def check_form(run_dirs: Iterable[Path]) -> None:
    """Check that no run in these directories was frozen by a version with another identity format.

    Raises:
        UserError: one was; the message has the remedy.
    """
    for run_dir in run_dirs:
        try:
            with (run_dir / SPEC_FILE).open("rb") as handle:
                first = _FORM_FIRST.match(handle.read(64))
            form = int(first[1]) if first else parse_json((run_dir / SPEC_FILE).read_text()).get("form", 1)
        except (OSError, ValueError, AttributeError):
            continue  # missing or unreadable: reported elsewhere
        if form != FORM:
            raise UserError(_OTHER_FORM.format(run_dir / SPEC_FILE))


def budget_of(run_dir: Path) -> int | None:
    """Return the budget in optimizer steps from a frozen specification of any format; None without one."""
    try:
        text = (run_dir / SPEC_FILE).read_text()
        match = _STEPS.search(text)
        return int(match[1]) if match else int(parse_json(text)["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def kept_steps_of(run_dir: Path) -> frozenset[int]:
    """Return `checkpoint.keep_steps` from a frozen specification: steps whose checkpoints are never deleted."""
    try:
        config = parse_json((run_dir / SPEC_FILE).read_text())["config"]
        return frozenset(map(int, (config.get("checkpoint") or {}).get("keep_steps") or ()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return frozenset()


def curve_of(run_dir: Path) -> str | None:
    """Return the curve's identity from a frozen specification of any format; None without one."""
    try:
        text = (run_dir / SPEC_FILE).read_text()
        match = _CURVE.search(text)
        return match[1] if match else str(parse_json(text)["curve"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def layout_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return `RunSpec.layout` for a run's configuration."""
    strategy = config.get("strategy") or {}
    devices = strategy.get("devices")
    return None if devices is None else (strategy.get("nodes") or 1, devices)


def branch_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `branch` of a journal's header: where a run left its parent; empty for a run of its own."""
    branch = config.get("branch")
    if not isinstance(branch, Mapping) or branch.get("run") is None:
        return {}
    return {"branch": {key: branch.get(key) for key in ("run", "step", "optimizer", "ancestors")}}


def science(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that affects what a run learns, without its seed."""
    return {key: value for key, value in config.items() if key not in OPERATIONAL_KEYS}


def changed_keys(what: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the top-level keys in which two configurations (or their identities) differ, sorted."""
    differing = {key for key in what.keys() & base.keys() if what[key] != base[key]}
    return tuple(sorted(differing | (what.keys() ^ base.keys())))


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration to a mapping from dotted keys to values; a list is a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def digest(value: Any) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of a value's canonical JSON, where 5 and 5.0 are equal."""
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def identities(lasting: Mapping[str, Any], seed: int) -> tuple[str, str]:
    """Return the identities of a run and of its curve.

    Args:
        lasting: values that affect what a run learns, without its seed, in a form that later versions keep.
        seed: random seed of the run.
    """
    return digest({"science": lasting, "seed": seed}), digest({"science": lasting})


def make_spec(
    config: Mapping[str, Any],
    reference: Mapping[str, Any],
    label: str,
    baseline: str,
    identity: Mapping[str, Any] | None = None,
    departures: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    folders: Sequence[str] = (),
    clean: dict[tuple[str, int], Any] | None = None,
) -> RunSpec:
    """Make a run's specification from a resolved configuration, with its identities.

    Args:
        config: resolved configuration of the run, as plain values.
        reference: configuration of the recipe without the run's changes.
        label: label of the run's curve.
        baseline: label of the recipe.
        identity: values that affect what the run learns, without its seed, in a form that later versions keep; None for
            all keys that are not operational, unchanged.
        departures, settings, folders: see `RunSpec`; None for none.
        clean: cache shared by configurations with common parts, so that each part is searched for secrets once.

    Raises:
        UserError: the configuration contains a secret.
    """
    what = science(config)
    lasting = what if identity is None else identity
    seed = int(config["seed"])
    clean = {} if clean is None else clean
    for key, part in what.items():
        if (key, id(part)) in clean:
            continue
        if secret := _secret({key: part}, {key: redact_config(part, key)}):
            break
        clean[key, id(part)] = part  # also keeps the part alive, so that its id is not reused
    else:
        secret = None
    if secret:
        raise UserError(
            f"{secret}: holds what looks like a secret, and the configuration is written down in many places; pass it "
            "in an environment variable"
        )
    config, reference = _without_secrets(config), _without_secrets(reference)
    run, curve = identities(lasting, seed)
    return RunSpec(
        run=run,
        curve=curve,
        recipe=label,
        baseline=baseline,
        seed=seed,
        steps=int(config["budget"]["steps"]),
        config=config,
        reference=reference,
        departures=dict(departures or {}),
        settings=dict(settings or {}),
        folders=tuple(folders),
    )


def _without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Redact the operational keys of a configuration: the address of an MLflow server may contain a login."""
    return {key: redact_config(value, key) if key in OPERATIONAL_KEYS else value for key, value in config.items()}


def _secret(value: Any, masked: Any, path: str = "") -> str | None:
    """Return the dotted key of the first value that redaction changes; None without one."""
    if isinstance(value, Mapping):
        keys = (_secret(item, masked[key], f"{path}.{key}" if path else str(key)) for key, item in value.items())
        return next(filter(None, keys), None)
    if isinstance(value, list | tuple):
        return next(filter(None, (_secret(v, m, path) for v, m in zip(value, masked, strict=True))), None)
    return None if not isinstance(value, str) or value == masked else path


def check_distinct(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the specs without duplicates, in order.

    Raises:
        UserError: two different curves have the same label.
    """
    by_run = {spec.run: spec for spec in specs}
    curves: dict[str, str] = {}
    for spec in by_run.values():
        if curves.setdefault(spec.recipe, spec.curve) != spec.curve:
            raise UserError(f"recipe: two different configurations are both labelled {spec.recipe!r}; sweep them apart")
    return list(by_run.values())
