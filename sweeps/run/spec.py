"""Specification of a run: its resolved configuration, its identity, and the label of its curve.

A run's identity is a hash of its seed and of all configuration values that affect what it learns. The identity of its
curve, which has all seeds of a recipe, is the same hash without the seed. Budget and output paths are in neither: a
larger budget continues a run, and launching the same study again finds the existing runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.redact import redact_config
from sweeps.run import fields
from sweeps.run.files import parse_json, write_atomically

SPEC_FILE = "spec.json"
# Format version of specifications. The first format had no version number, and module paths in its identities.
FORM = 2
_OTHER_FORM = (
    "{}: written by another version, whose runs had other identities; its journals can still be fitted, ranked and "
    "published; to continue, launch the study into a folder of its own (study=NAME)"
)

# Beginning of a specification's file, with the format version. Files of the first format do not match.
_FORM_FIRST = re.compile(rb'\{\s*"form":\s*(\d+),')

# The line with the budget. The single space of indentation shows that it is a field of the specification itself, not of
# a part of it. A string cannot match, because its line breaks are escaped.
_STEPS = re.compile(r'^ "steps": (\d+),$', re.MULTILINE)

_CURVE = re.compile(r'^ "curve": "([^"\\]*)",$', re.MULTILINE)

# Top-level configuration keys that affect how, where or how long a run is executed, but not what it learns.
OPERATIONAL_KEYS = frozenset(
    {"budget", "checkpoint", "rollouts", "study", "output_dir", "launch", "mlflow", "label", "hydra", "seed"}
    | {"scaled_for", "race", "strategy"}
)


@dataclass(frozen=True)
class RunSpec:
    """Specification of one member of a study, sufficient to start or continue its run.

    At submission it is written to the run's folder, and its checksum to the study's ledger, which reveals later
    changes.

    Attributes:
        run, curve: identities of the run and of its curve, 12 hexadecimal digits each.
        recipe: label of the curve, such as `scalerl_core+loss=dapo`.
        baseline: label of the recipe with which this one is compared.
        departures: for each axis on which the recipe differs from the baseline, its choice in a few words.
        settings: other values in which members of the study differ.
        seed: random seed of the run.
        steps: budget in optimizer steps.
        config: resolved configuration.
        reference: configuration of the baseline, with this run's seed and settings.
        folders: the user's own folders with configuration files, and modules that these name.
        overrides: command-line overrides of the launch, enough to continue the run. Addresses of servers are left out.
        cautions: warnings to print before the launch; not stored.
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
        """Step at which a branch leaves its parent; 0 for a run that is not a branch."""
        return int(branch_of(self.config).get("branch", {}).get("step") or 0)

    @property
    def layout(self) -> tuple[int, int] | None:
        """Numbers of nodes and of ranks per node that the run requires (group `strategy`); None if not set."""
        return layout_of(self.config)

    def _fields(self) -> dict[str, Any]:
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

    def labelled_like(self, other: RunSpec) -> RunSpec:
        """Return this specification with the label of `other`, a run of its curve, and the fields that explain it."""
        operational = {key: value for key, value in self.reference.items() if key in OPERATIONAL_KEYS}
        return replace(
            self,
            recipe=other.recipe,
            baseline=other.baseline,
            departures=other.departures,
            settings=other.settings,
            reference={**other.reference, **operational},
        )

    def checksum(self) -> str:
        """Return a checksum of 16 hexadecimal digits, to detect changes after the launch.

        It covers everything except the budget (which may grow), overrides, and operational keys. It is the same before
        writing the specification and after reading it.
        """
        frozen = {key: value for key, value in self._fields().items() if key not in ("steps", "overrides")}
        frozen |= {"config": learning_config(self.config), "reference": learning_config(self.reference)}
        # Keys are not sorted, because their order matters: the first held-out set is the default one.
        return hashlib.sha256(json.dumps(frozen, separators=(",", ":")).encode()).hexdigest()[:16]

    def check_checksum(self, run_dir: Path, expected: str | None) -> None:
        """Refuse a specification that was changed after the launch.

        Args:
            run_dir: folder from which the specification was read; shown in the message.
            expected: checksum in the study's ledger; None (from a ledger of an earlier version) accepts any
                specification.

        Raises:
            UserError: the checksum differs.
        """
        if expected is not None and self.checksum() != expected:
            raise UserError(
                f"{run_dir / SPEC_FILE}: changed since the study was launched, for its checksum is {self.checksum()} "
                f"and {expected} in the ledger; restore the file, or launch what you want under its own identity"
            )

    def write(self, run_dir: Path, texts: Texts | None = None) -> bytes | None:
        """Write the specification to the run's directory, atomically. Later launches read it from there.

        Keys keep their order, because the first held-out set is the default one.

        Args:
            run_dir: the run's folder, created if missing.
            texts: encoder that the specs of a study share, so that parts they have in common are encoded once.

        Returns:
            Content of the replaced file; None if there was none, or if it had the same content.
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
        """Read the specification in a run's directory.

        Args:
            run_dir: the run's folder.
            known: cache that the specs of a study share, so that parts they have in common are in memory once.
                Otherwise ten thousand specs would take gigabytes.

        Raises:
            UserError: the file does not exist, cannot be read, or has another format version.
        """
        try:
            values = parse_json((run_dir / SPEC_FILE).read_text())
            if values.pop("form", 1) != FORM:
                raise UserError(_OTHER_FORM.format(run_dir / SPEC_FILE))
            overrides = tuple(values.get("overrides", ()))
            if known is not None:
                for key in ("config", "reference"):
                    values[key] = {sys.intern(name): _shared_part(part, known) for name, part in values[key].items()}
                overrides = _shared_part(overrides, known)
            spec = cls(**{**values, "folders": tuple(values["folders"]), "overrides": overrides})
            _check_types(values)
            return spec
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{run_dir / SPEC_FILE}: not a run's frozen specification ({error})") from error


def _check_types(values: Mapping[str, Any]) -> None:
    fields.run_name(values)
    for name in ("curve", "recipe", "baseline"):
        fields.text(values, name)
    for name in ("departures", "settings", "config", "reference"):
        fields.group(values, name)
    fields.whole(values, "seed")
    fields.whole(values, "steps")


class Texts:
    """JSON encoder that encodes a part only once if objects share it. Its output equals `json.dumps(..., indent=1)`."""

    def __init__(self) -> None:
        # Encoded parts by the part's id. The part is kept as well, because the id of a deleted object is used again.
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, values: Mapping[str, Any], shared: Sequence[str]) -> str:
        """Encode one object. The values in its fields `shared` are cached, because other objects share them."""
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


def _shared_part(part: Any, known: dict[str, Any]) -> Any:
    """Return the object in the cache `known` that has the same repr as `part`, so that specs share memory."""
    return known.setdefault(repr(part), part)


def run_folder(name: str) -> Path:
    """Return the run folder `name`, after checking that it has a specification of `scalerl train`.

    Raises:
        UserError: the folder has no specification.
    """
    run = Path(name)
    if not (run / SPEC_FILE).is_file():
        raise UserError(f"{run}: no run of scalerl train; give a folder such as outputs/STUDY/runs/IDENTITY")
    return run


def check_form(run_dirs: Iterable[Path]) -> None:
    """Check that no specification in these directories has the format of another version.

    Raises:
        UserError: a specification has another format. The message has the remedy.
    """
    for run_dir in run_dirs:
        try:
            with (run_dir / SPEC_FILE).open("rb") as handle:
                first = _FORM_FIRST.match(handle.read(64))
            form = int(first[1]) if first else parse_json((run_dir / SPEC_FILE).read_text()).get("form", 1)
        except (OSError, ValueError, AttributeError):
            continue  # a missing or unreadable specification is reported elsewhere
        if form != FORM:
            raise UserError(_OTHER_FORM.format(run_dir / SPEC_FILE))


def budget_of(run_dir: Path) -> int | None:
    """Return the budget in optimizer steps from a run's specification of any format; None if it cannot be read."""
    try:
        text = (run_dir / SPEC_FILE).read_text()
        match = _STEPS.search(text)
        return int(match[1]) if match else int(parse_json(text)["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def kept_steps_of(run_dir: Path) -> frozenset[int]:
    """Return the steps whose checkpoints a run never deletes (`checkpoint.keep_steps`).

    Return an empty set if the specification cannot be read.
    """
    try:
        config = parse_json((run_dir / SPEC_FILE).read_text())["config"]
        return frozenset(map(int, (config.get("checkpoint") or {}).get("keep_steps") or ()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return frozenset()


def curve_of(run_dir: Path) -> str | None:
    """Return the curve's identity from a run's specification of any format; None if it cannot be read."""
    try:
        text = (run_dir / SPEC_FILE).read_text()
        match = _CURVE.search(text)
        return match[1] if match else str(parse_json(text)["curve"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def run_of_curve(runs_dir: Path, curve: str) -> Path | None:
    """Return the folder of some run of this curve in a study's folder `runs`; None if there is none."""
    return next((run_dir for run_dir in sorted(runs_dir.glob("*")) if curve_of(run_dir) == curve), None)


def layout_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of nodes and of ranks per node in a configuration, see `RunSpec.layout`."""
    strategy = config.get("strategy") or {}
    devices = strategy.get("devices")
    return None if devices is None else (strategy.get("nodes") or 1, devices)


def branch_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `branch` of a journal's header, which describes the parent run; empty if there is no parent."""
    branch = config.get("branch")
    if not isinstance(branch, Mapping) or branch.get("run") is None:
        return {}
    return {"branch": {key: branch.get(key) for key in ("run", "step", "optimizer", "ancestors")}}


def learning_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that affects what a run learns, without its seed."""
    return {key: value for key, value in config.items() if key not in OPERATIONAL_KEYS}


def changed_keys(what: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the top-level keys in which two configurations differ, sorted."""
    differing = {key for key in what.keys() & base.keys() if what[key] != base[key]}
    return tuple(sorted(differing | (what.keys() ^ base.keys())))


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration to a mapping from dotted keys to values; lists are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_finite(config: Mapping[str, Any], prefix: str = "") -> None:
    """Check that no value of a configuration is NaN or infinite, which JSON cannot express.

    Raises:
        UserError: a value is NaN or infinite. The message names its dotted key.
    """
    for name, value in config.items():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, Mapping):
                check_finite(part, f"{prefix}{name}.")
            elif isinstance(part, float) and not math.isfinite(part):
                raise UserError(f"{prefix}{name}: {part!r} must be a finite number")


def digest(value: Any) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of a value's canonical JSON, where 5 and 5.0 are equal."""
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(value: Any) -> Any:
    """Convert keys to strings, tuples to lists, and whole floats to integers, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def identities(lasting: Mapping[str, Any], seed: int) -> tuple[str, str]:
    """Return the identities of a run and of its curve.

    Args:
        lasting: values that affect what a run learns, without its seed, in a form that does not change with versions.
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
    """Make a run's specification, with its identities, from a resolved configuration.

    Args:
        config: resolved configuration of the run, as plain values.
        reference: configuration of the baseline, with the run's seed and settings.
        label: label of the run's curve.
        baseline: label of the recipe with which this one is compared.
        identity: values that affect what the run learns, without its seed, in a form that is the same in all versions;
            None for all values of `config` without the operational keys.
        departures, settings, folders: see `RunSpec`; None means empty.
        clean: cache of parts without secrets. Configurations that share it also share the search for secrets.

    Raises:
        UserError: the configuration contains a secret, NaN or infinity.
    """
    learned_config = learning_config(config)
    identity_values = learned_config if identity is None else identity
    seed = int(config["seed"])
    clean = {} if clean is None else clean
    for key, part in learned_config.items():
        if (key, id(part)) in clean:
            continue
        if secret := _secret({key: part}, {key: redact_config(part, key)}):
            break
        clean[key, id(part)] = part  # the part is kept too, because the id of a deleted object is used again
    else:
        secret = None
    if secret:
        raise UserError(
            f"{secret}: holds what looks like a secret, and the configuration is written down in many places; pass it "
            "in an environment variable"
        )
    check_finite(identity_values)
    config, reference = _without_secrets(config), _without_secrets(reference)
    run, curve = identities(identity_values, seed)
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
    """Redact the operational keys of a configuration: an address of an MLflow server may contain a login."""
    return {key: redact_config(value, key) if key in OPERATIONAL_KEYS else value for key, value in config.items()}


def _secret(value: Any, masked: Any, path: str = "") -> str | None:
    """Return the dotted key of the first value that redaction has changed in `masked`; None if there is none."""
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
