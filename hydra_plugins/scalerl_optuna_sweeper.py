"""Hydra sweeper for Optuna: Hydra discovers plugins only in this namespace; the search is in `sweeps.search`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hydra_plugins.scalerl_sweeper import ScaleRLSweeper
from sweeps.cli.launchers import StudyLauncher
from sweeps.errors import UserError
from sweeps.report.plain import one_line
from sweeps.search.settings import Axis


class ScaleRLOptunaSweeper(ScaleRLSweeper):
    """Sweeper that lets Optuna search the swept space, selected by `hydra/sweeper=scalerl_optuna`.

    Comma-separated values, `choice(...)` and `range(...)` are categories. `interval(a, b)` is a range of numbers,
    `int(interval(a, b))` a range of whole numbers, `tag(log, interval(a, b))` a range on a logarithmic scale.

    Args:
        params: axes of the search space, in addition to those that the command line sweeps.
        sampler: Optuna's sampler, by its `_target_`; it is given the argument `seed`.
        rows: rows of an experiment that is a grid; refused.
        settings: those of `sweeps.search.settings.SearchSettings`.
    """

    def __init__(
        self, sampler: Mapping[str, Any], params: Mapping[str, str] | None = None, rows: Any = None, **settings: Any
    ) -> None:
        super().__init__(None, params, rows)
        self.sampler, self.settings = sampler, settings

    def sweep(self, arguments: list[str]) -> None:
        """Parse the overrides into fixed ones and a search space, and have the launcher run the search.

        Raises:
            UserError: a launcher that is not ours, rows, nothing to search, or settings out of range.
        """
        if self.rows:
            raise UserError(
                "hydra.sweeper.rows: they list members one by one, and a search takes a space; leave the experiment "
                "that has them away, or give hydra.sweeper.rows=null and what is to be searched"
            )
        if not isinstance(self.launcher, StudyLauncher):
            raise UserError(f"hydra/sweeper=scalerl_optuna: needs {self.launchers_of_ours()}")
        self.launcher.files = self.kept()
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = {each.get_key_element(): each for each in parser.parse_overrides([*self._parse_config(), *arguments])}
        base = [each.input_line for each in given.values() if not each.is_sweep_override()]
        space = [_axis(each) for each in given.values() if each.is_sweep_override()]
        if not space:
            raise UserError("hydra/sweeper=scalerl_optuna: nothing to search; give values: loss=dapo,gspo")
        plain: Any = OmegaConf.to_container(OmegaConf.create(dict(self.settings)), resolve=True)
        self.launcher.search(base, space, plain, self._made)

    def _made(self, seed: int) -> Any:
        """Instantiate the configured Optuna sampler with this seed."""
        try:
            if not self.sampler:
                raise UserError("hydra.sweeper.sampler: none; give one of Optuna's, by its _target_ and arguments")
            return instantiate(self.sampler, seed=seed)
        except InstantiationException as error:
            reason = one_line(str(error))
            if "unexpected keyword argument" in reason:
                reason += "; ~hydra.sweeper.sampler.ARGUMENT removes an argument of the default sampler"
            raise UserError(f"hydra.sweeper.sampler: {reason}") from error


def _axis(override: Override) -> Axis:
    key = override.get_key_element()
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None
        return Axis(key, low=value.start, high=value.end, log="log" in value.tags)
    choices = tuple(override.sweep_string_iterator())
    if not choices:
        raise UserError(f"{override.input_line}: stands for no value, so there is nothing to search")
    return Axis(key, choices)
